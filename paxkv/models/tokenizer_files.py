"""The files that a tokenizer comes in, each made into a :class:`paxkv.models.tokenizer.Tokenizer`."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paxkv.config import require
from paxkv.models.hf_folder import read_json
from paxkv.models.piece_merger import PieceMerger
from paxkv.models.tokenizer import TURN_ENDS, Tokenizer, byte_level_text, spaced_text

if TYPE_CHECKING:
    from paxkv.models.gguf_file import GGUFFile

NEEDS_EXTRA = "this tokenizer needs the package tokenizers: pip install 'paxkv[hf]'"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens in GGUF's ``tokenizer.ggml.token_type``."""

_LONG_DIGITS = r"\p{N}{1,3}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _package():
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(NEEDS_EXTRA) from error
    return tokenizers


# --- Hugging Face folders -------------------------------------------------------------------------


def from_folder(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises:
        FileNotFoundError: no tokenizer.json.
        ImportError: the package ``tokenizers`` is missing.
        ValueError: a decoder that is not one of the usual, or a file that is damaged.
    """
    path = folder / "tokenizer.json"
    spec = read_json(path)
    try:
        inner = _package().Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the package raises bare Exceptions
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    say, spaced = _decoder(spec.get("decoder"), path)
    texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token in vocabulary.items():
        texts[token] = say(piece)
    for added in spec.get("added_tokens") or ():
        if added.get("special"):
            texts[added["id"]] = b""
    settings = _optional(folder / "tokenizer_config.json")
    names = {name: text for name in ("bos_token", "eos_token") if (text := _text_of(settings.get(name)))}
    template = _template_of(folder, settings)
    head = inner.encode("", add_special_tokens=True).ids
    return Tokenizer(
        lambda text: inner.encode(text, add_special_tokens=False).ids,
        texts,
        start_id=head[0] if head else None,
        end_ids=_end_ids(vocabulary, template, names.get("eos_token"), _declared_ends(folder)),
        spaced=spaced,
        chat_template=template,
        names=names,
    )


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text_of(token: Any) -> str | None:
    """A special token's text, which files write as it is or in an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _template_of(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name, of which "default" is for conversations
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _declared_ends(folder: pathlib.Path) -> list[int]:
    """End ids of generation_config.json, or else of config.json: one or several."""
    for name in ("generation_config.json", "config.json"):
        ends = _optional(folder / name).get("eos_token_id")
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    return []


def _end_ids(vocabulary: Mapping[str, int], template: str | None, end: str | None, declared: list[int]) -> list[int]:
    """Declared ends, the tokenizer's own, and the ends of a turn that the template writes."""
    turns = [name for name in TURN_ENDS if template and name in template]
    return declared + [vocabulary[name] for name in (end, *turns) if name in vocabulary]


def _decoder(spec: Mapping[str, Any] | None, path: pathlib.Path) -> tuple[Callable[[str], bytes], bool]:
    """What a piece says, and whether a space in front of a text is taken away."""
    steps = (spec.get("decoders") or [spec]) if spec else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_text, False
    if kinds == ["Metaspace"] and steps[0].get("replacement", "\u2581") == "\u2581":
        never = steps[0].get("prepend_scheme") == "never" or steps[0].get("add_prefix_space") is False
        return spaced_text, not never
    replaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == replaces and kinds[3:] in ([], ["Strip"]):
        return spaced_text, bool(kinds[3:]) and steps[3].get("start", 0) > 0
    raise ValueError(
        f"{path}: its decoder must be ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip in a row, "
        f"got {' and '.join(kinds) or 'none'}; another needs code of its own"
    )


# --- GGUF -----------------------------------------------------------------------------------------


def from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer inside a GGUF file.

    Raises:
        ImportError: a byte-level one, and the package ``tokenizers`` is missing.
        ValueError: a kind that is not supported, or lists that do not fit each other.
    """
    kind = file.need("tokenizer.ggml.model")
    require(
        kind in ("gpt2", "llama"),
        f"{file.path}: tokenizer.ggml.model must be gpt2 (byte-level BPE) or llama (SentencePiece BPE), got {kind!r}",
    )
    pieces, types = file.need("tokenizer.ggml.tokens"), file.need("tokenizer.ggml.token_type")
    require(
        len(pieces) == len(types),
        f"{file.path}: tokenizer.ggml.tokens and token_type must be equally long, got {len(pieces)} and {len(types)}",
    )
    say = byte_level_text if kind == "gpt2" else spaced_text
    texts = [b"" if type in (CONTROL, UNKNOWN, UNUSED) else say(p) for p, type in zip(pieces, types, strict=True)]
    for token, type in enumerate(types):
        if type == USER_DEFINED:
            texts[token] = pieces[token].encode()
    special = {pieces[i]: i for i, type in enumerate(types) if type in (CONTROL, USER_DEFINED)}
    spaced = bool(file.get("tokenizer.ggml.add_space_prefix", kind == "llama")) and kind == "llama"
    cut = _byte_level(file, pieces, types) if kind == "gpt2" else _scored(file, pieces, types, special, spaced)
    marks = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    for name, token in marks.items():
        require(
            token is None or token < len(pieces),
            f"{file.path}: tokenizer.ggml.{name}_token_id must be below its {len(pieces)} tokens, got {token}",
        )
    template = file.get("tokenizer.chat_template")
    ends = [token for name, token in marks.items() if name != "bos" and token is not None]
    return Tokenizer(
        cut,
        texts,
        start_id=marks["bos"] if file.get("tokenizer.ggml.add_bos_token", kind == "llama") else None,
        end_ids=_end_ids(special, template, None, ends),
        spaced=spaced,
        chat_template=template,
        names={f"{name}_token": pieces[token] for name, token in marks.items() if token is not None},
    )


def _scored(file: GGUFFile, pieces: list[str], types: list[int], special: dict[str, int], prefix: bool) -> PieceMerger:
    scores = file.need("tokenizer.ggml.scores")
    require(
        len(scores) == len(pieces),
        f"{file.path}: tokenizer.ggml.tokens and scores must be equally long, got {len(pieces)} and {len(scores)}",
    )
    normal = {piece: i for i, piece in enumerate(pieces) if types[i] == NORMAL}
    of_byte = {spaced_text(piece): i for i, piece in enumerate(pieces) if types[i] == BYTE}
    byte_ids = [of_byte[bytes([b])] for b in range(256) if bytes([b]) in of_byte]
    return PieceMerger(normal, dict(enumerate(scores)), byte_ids, space="\u2581", prefix=prefix, special=special)


def _byte_level(file: GGUFFile, pieces: list[str], types: list[int]) -> Callable[[str], list[int]]:
    """Byte-level BPE by ranked merges, carried out by the package ``tokenizers``."""
    package = _package()
    before, model = package.pre_tokenizers, package.models
    bytes_only = before.ByteLevel(add_prefix_space=False, use_regex=False)
    by_words = before.ByteLevel(add_prefix_space=False, use_regex=True)

    def split(digits: str):
        pattern = package.Regex(_WORDS.replace("DIGITS", digits))
        return before.Sequence([before.Split(pattern, "isolated"), bytes_only])

    known = {
        "gpt-2": lambda: by_words,
        "smollm": lambda: before.Sequence([before.Digits(individual_digits=True), by_words]),
        "qwen2": lambda: split(r"\p{N}"),
        "llama-bpe": lambda: split(_LONG_DIGITS),
    }
    name = file.need("tokenizer.ggml.pre")
    require(name in known, f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(known)}, got {name!r}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    try:
        bpe = model.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe")
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"{file.path}: tokenizer.ggml.merges do not fit its tokens: {error}") from error
    inner = package.Tokenizer(bpe)
    inner.pre_tokenizer = known[name]()
    if name == "qwen2":
        inner.normalizer = package.normalizers.NFC()
    added = [(piece, type == CONTROL) for piece, type in zip(pieces, types, strict=True) if type in (3, 4)]
    inner.add_tokens([package.AddedToken(piece, special=control, normalized=False) for piece, control in added])
    return lambda text: inner.encode(text, add_special_tokens=False).ids


# --- llama2.c -------------------------------------------------------------------------------------


def from_llama2c(path: pathlib.Path) -> Tokenizer:
    """The tokenizer of llama2.c: int32 longest piece, then for each token float32 score, int32 length and its bytes.

    Tokens 0 to 2 are unknown, start and end, 3 to 258 the bytes.

    Raises:
        ValueError: the file ends inside a token.
    """
    data, at = path.read_bytes(), 4
    pieces, scores = [], []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at) if at + 8 <= len(data) else (0.0, len(data))
        at += 8 + length
        require(
            length >= 0 and at <= len(data),
            f"{path}: token {len(pieces)} is expected to end at byte {at}, found {len(data)} in all; fetch it again",
        )
        scores.append(score)
        pieces.append(data[at - length : at])
    require(len(pieces) >= 259, f"{path} must have tokens for all 256 bytes, got {len(pieces)} tokens; fetch it again")
    texts = [b""] * 3 + [bytes([byte]) for byte in range(256)] + pieces[259:]
    # Later tokens of the same text win, which none of the files has.
    ids = {piece.decode("utf-8"): token for token, piece in enumerate(pieces) if token >= 259}
    cut = PieceMerger(ids, dict(enumerate(scores)), range(3, 259))
    return Tokenizer(cut, texts, start_id=1, end_ids=(2,), spaced=True)
