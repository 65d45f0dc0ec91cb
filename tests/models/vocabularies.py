"""Small seeded vocabularies, in the files that real ones come in."""

from __future__ import annotations

import json
import pathlib
import random
import struct

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from paxkv.models.tokenizer_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

CONTROLS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "abcdehilnorst .,'\u00e9\u6f22\U0001f642"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def joined(letters: list[str], count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs to join, in order of rank: random pieces of up to six letters, each made in one way."""
    draw, pieces, pairs = random.Random(seed), list(letters), []
    while len(pairs) < count:
        left, right = draw.choice(pieces), draw.choice(pieces)
        if len(left + right) <= 6 and left + right not in pieces:
            pairs.append((left, right))
            pieces.append(left + right)
    return pairs


def byte_letters() -> list[str]:
    """The letters of a byte-level vocabulary, as the package ``tokenizers`` has them, those of ``LETTERS`` first."""
    before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    used = dict.fromkeys("".join(part for part, _ in before.pre_tokenize_str(LETTERS)))
    return [*used, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(used))]


def byte_level(seed: int = 0) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges of a byte-level vocabulary, without special tokens."""
    letters = byte_letters()
    merges = joined(letters[:24], 120, seed)
    return letters + ["".join(pair) for pair in merges], merges


def byte_level_json(seed: int = 0) -> tokenizers.Tokenizer:
    """As GPT-2's."""
    pieces, merges = byte_level(seed)
    vocabulary = {piece: token for token, piece in enumerate([*CONTROLS, *pieces])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(CONTROLS)
    made.add_tokens(["  "])  # some models add runs of spaces as plain text
    return made


def sentencepiece_json(seed: int = 0, *, metaspace: bool = False) -> tokenizers.Tokenizer:
    """As Llama 2's: a space in front of each text, bytes for what is no piece, a start token."""
    letters = [letter.replace(" ", "\u2581") for letter in LETTERS[:-2]]
    merges = joined(letters, 100, seed)
    pieces = [*CONTROLS, *BYTES, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(CONTROLS)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def write_folder(folder: pathlib.Path, made: tokenizers.Tokenizer, **files: dict) -> pathlib.Path:
    """A Hugging Face folder; ``files`` are further ones by their names without ``.json``."""
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_gguf(path: pathlib.Path, kind: str, seed: int = 0, **fields) -> pathlib.Path:
    """A GGUF file with a vocabulary and no tensors; ``fields`` of ``tokenizer.ggml`` replace its own, None removes."""
    if kind == "gpt2":
        pieces, merges = byte_level(seed)
        tokens, types = [*CONTROLS, *pieces, "\u00e9!"], [CONTROL] * 5 + [NORMAL] * len(pieces) + [USER_DEFINED]
        values = {"merges": [" ".join(pair) for pair in merges], "pre": "smollm", "add_bos_token": False}
    else:
        letters = [letter.replace(" ", "\u2581") for letter in LETTERS[:-2]]
        merged = ["".join(pair) for pair in joined(letters, 100, seed)]
        tokens = [*CONTROLS, *BYTES, *letters, *merged]
        types = [UNKNOWN] + [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * (len(letters) + len(merged))
        values = {"scores": [0.0] * 261 + [-1e3] * len(letters) + [-float(i) for i in range(len(merged))]}
    values |= {"model": kind, "tokens": tokens, "token_type": types, "bos_token_id": 1, "eos_token_id": 2}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (values | fields).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            place = key if key.startswith("chat") else f"ggml.{key}"
            add[type(value)](f"tokenizer.{place}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_llama2c(path: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """A tokenizer of llama2.c."""
    letters = [*LETTERS[:-2]]
    merged = ["".join(pair) for pair in joined(letters, 100, seed)]
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTES, *letters, *merged]
    scores = [0.0] * 259 + [-1e3] * len(letters) + [-float(i) for i in range(len(merged))]
    data = struct.pack("<i", max(len(piece.encode()) for piece in pieces))
    for score, piece in zip(scores, map(str.encode, pieces), strict=True):
        data += struct.pack("<fi", score, len(piece)) + piece
    path.write_bytes(data)
    return path
