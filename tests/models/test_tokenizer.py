"""Tokenizers: texts survive the way to ids and back, whole and token by token, whatever file they come from."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paxkv.models import chat_template, tokenizer
from paxkv.models.piece_merger import PieceMerger
from paxkv.models.tokenizer import Tokenizer, byte_level_text, load
from paxkv.sampling import SamplingParams
from paxkv.testing.tiny_engine import tiny_engine
from tests.models import vocabularies
from tests.models.vocabularies import CHATML, LETTERS, write_folder, write_gguf, write_llama2c

TEXTS = st.one_of(st.text(LETTERS, max_size=40), st.text(max_size=20))
"""Some that the vocabulary knows well, and any."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {
        "gguf byte-level": load(write_gguf(folder / "b.gguf", "gpt2")),
        "gguf scored": load(write_gguf(folder / "s.gguf", "llama")),
        "gguf scored, no start": load(write_gguf(folder / "n.gguf", "llama", add_bos_token=False)),
        "llama2.c": load(write_llama2c(folder / "tok.bin")),
    }
    for name, inner in INNER.items():
        place = folder / name
        place.mkdir()
        found[name] = load(write_folder(place, inner))
    return found


INNER = {
    "byte-level": vocabularies.byte_level_json(),
    "sentencepiece": vocabularies.sentencepiece_json(),
    "metaspace": vocabularies.sentencepiece_json(metaspace=True),
}
KINDS = ["gguf byte-level", "gguf scored", "gguf scored, no start", "llama2.c", *INNER]


def writable(kind: str, text: str) -> str:
    """The part of a text that a kind can write: its spaces may stand for U+2581, and old ones have no bytes."""
    if kind == "metaspace":
        return "".join(filter(LETTERS[:-2].__contains__, text)).lstrip()
    return text.replace("\u2581", " ") if kind != "llama2.c" and "byte" not in kind else text


def streamed(made: Tokenizer, ids) -> list[str]:
    """What a detokenizer says at each token, and at the end."""
    detokenizer = made.detokenizer()
    return [detokenizer.add(token) for token in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_round_trip(made, kind, text):
    text = writable(kind, text)
    assert made[kind].decode(made[kind].encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_streams_are_exact(made, kind, data):
    """Any ids, even such that no text has: pieces add up to the whole, which the bytes alone decide."""
    ids = data.draw(st.lists(st.integers(0, made[kind].vocab_size - 1), max_size=30))
    parts = streamed(made[kind], ids)
    assert "".join(parts) == made[kind].decode(ids)
    said = b"".join(made[kind].texts[token] for token in ids).decode("utf-8", "replace")
    assert "".join(parts).replace(" ", "") == said.replace(" ", "")


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_half_a_character_is_never_said(made, kind, text):
    """Each prefix of a stream is a prefix of the text, as it could not be with a U+FFFD in it."""
    text, said = text.replace("\ufffd", "?"), ""
    ids = made[kind].encode(text)
    whole = made[kind].decode(ids)
    for part in streamed(made[kind], ids):
        said += part
        assert whole.startswith(said)


@pytest.mark.parametrize("kind", INNER)
@given(text=TEXTS)
def test_as_the_package_has_it(made, kind, text):
    """Ids and texts are those of the package ``tokenizers``, special tokens included."""
    text = writable(kind, text)
    ids = INNER[kind].encode(text).ids
    assert made[kind].encode(text) == ids
    assert made[kind].decode(ids) == INNER[kind].decode(ids)
    marked = f"<|im_start|>{text}<|im_end|>"
    assert made[kind].encode(marked, start=False) == INNER[kind].encode(marked, add_special_tokens=False).ids


def test_the_256_letters():
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert sorted(b"".join(map(byte_level_text, alphabet))) == list(range(256))
    assert byte_level_text("\u0120the") == b" the" and byte_level_text("a b") == b"a b"


def test_an_output_continues_its_prompt(made):
    """The space in front is the prompt's, taken away once; the output's own stays."""
    for kind in ("sentencepiece", "gguf scored", "llama2.c"):
        ids = made[kind].encode("the rest  is")
        for cut in range(2, len(ids)):  # the start token and at least one other
            assert made[kind].decode(ids[:cut]) + made[kind].decode(ids[cut:]) == "the rest  is"


def test_ids_that_say_nothing(made):
    """Special tokens, and rows that a model has beyond its vocabulary."""
    for kind in KINDS:
        ids = made[kind].encode("or")
        assert made[kind].decode([*ids, 2, made[kind].vocab_size, 10**6]) == "or"


def test_a_text_without_bytes(made):
    for kind in KINDS:
        with pytest.raises(ValueError, match="surrogates not allowed"):
            made[kind].encode("half a pair \ud83d")


def test_an_engine_says_what_its_ids_say():
    """The tiny model's 256 ids as bytes: mostly broken characters. Outputs grow, and stop texts are found in them."""
    made = Tokenizer(lambda text: list(text.encode()), [bytes([byte]) for byte in range(256)])
    engine = tiny_engine(tokenizer=made)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
    before = ""
    for output in engine.stream("h\u00e9", params):
        assert output.prompt_ids == (104, 195, 169)
        assert output.text.startswith(before)
        before = output.text
    assert output.text == made.decode(output.token_ids)
    assert "\ufffd" in output.text
    stop = output.text[5:8]
    (stopped,) = engine.generate(["h\u00e9"], SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop=(stop,)))
    assert stopped.text == output.text[: output.text.index(stop)]


# --- scores ---------------------------------------------------------------------------------------


def naive(text: str, ids: dict[str, int], scores: dict[int, float]) -> list[str]:
    """Joins the best-scored neighbours, the first of equals, until none make a piece."""
    pieces = list(text)
    while True:
        pairs = [
            (scores[ids[a + b]], -at) for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in ids
        ]
        if not pairs:
            return pieces
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(st.text("abc ", max_size=60), st.integers(0, 30), st.booleans())
def test_best_scores_join_first(text, seed, ties):
    words = [*"abc ", *("".join(pair) for pair in vocabularies.joined([*"abc "], 40, seed))]
    ids = {word: 256 + at for at, word in enumerate(words)}
    draw = np.random.default_rng(seed)
    scores = {token: float(draw.integers(0, 3 if ties else 1000)) for token in ids.values()}
    merger = PieceMerger(ids, scores, range(256), prefix=False)
    assert merger(text) == [ids[piece] for piece in naive(text, ids, scores)]


def test_a_long_text_is_cut_in_time():
    """100,000 letters; the naive way would need 10 billion steps."""
    words = [*"ab", "aa", "aaaa", "bb", "ab"]
    merger = PieceMerger({word: 256 + at for at, word in enumerate(words)}, dict.fromkeys(range(262), 0.0), range(256))
    assert len(merger("a" * 100_000)) == 25_001


def test_special_tokens_split_a_text(made):
    """And the space in front comes back behind each of them, as files of this kind have it."""
    cut = made["gguf scored"].encode
    assert cut("or<|im_end|>or") == [1, *cut("or", start=False), 4, *cut("or", start=False)]
    assert cut("<|im_end|>") == [1, 4] and cut("") == [1]


# --- what the files say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "sizes"),
    [("smollm", [1] * 9), ("qwen2", [1] * 9), ("llama-bpe", [3, 3, 3]), ("gpt-2", [2, 2, 2, 3])],
)
def test_digits(tmp_path, pre, sizes):
    """How many digits can be one token is the main difference between these."""
    runs = ["1" * size for size in range(2, 10)]
    tokens = [*vocabularies.CONTROLS, *vocabularies.byte_letters(), *runs]
    fields = {"tokens": tokens, "token_type": [3] * 5 + [1] * (len(tokens) - 5), "pre": pre}
    made = load(write_gguf(tmp_path / "x.gguf", "gpt2", **fields, merges=[f"{run[1:]} 1" for run in runs]))
    assert [len(made.texts[token]) for token in made.encode("1" * 9)] == sizes
    assert made.decode(made.encode("It's 1111!\n\n\t x")) == "It's 1111!\n\n\t x"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("gpt2", {"model": "t5"}, "tokenizer.ggml.model must be gpt2 .* or llama .*, got 't5'"),
        ("gpt2", {"pre": "poro-chat"}, "tokenizer.ggml.pre must be one of gpt-2, smollm, .* got 'poro-chat'"),
        ("gpt2", {"pre": None}, "must have tokenizer.ggml.pre"),
        ("gpt2", {"merges": ["a zzz"]}, "tokenizer.ggml.merges do not fit its tokens"),
        ("gpt2", {"token_type": [1, 1]}, "tokens and token_type must be equally long"),
        ("gpt2", {"eos_token_id": 5000}, "eos_token_id must be below its .* tokens, got 5000"),
        ("llama", {"scores": [0.5]}, "tokens and scores must be equally long"),
        ("llama", {"tokens": ["a"], "token_type": [1], "scores": [0.5]}, "must be below its 1 tokens|256 bytes, got 0"),
    ],
)
def test_gguf_that_cannot_be_read(tmp_path, kind, fields, message):
    with pytest.raises(ValueError, match=message):
        load(write_gguf(tmp_path / "x.gguf", kind, **fields))


def test_ends_of_a_gguf(tmp_path):
    """The declared ones, and the end of a turn that the chat template writes."""
    assert load(write_gguf(tmp_path / "a.gguf", "gpt2")).end_ids == (2,)
    made = load(write_gguf(tmp_path / "b.gguf", "gpt2", eot_token_id=3, chat_template=CHATML))
    assert made.end_ids == (2, 3, 4) and made.start_id is None
    assert made.names == {"bos_token": "<s>", "eos_token": "</s>", "eot_token": "<|im_start|>"}
    assert load(write_gguf(tmp_path / "c.gguf", "gpt2", add_bos_token=True)).encode("or")[0] == 1


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [2, 3]}}, (2, 3)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}, "chat_template": CHATML}}, (2, 4)),
        ({"tokenizer_config": {"eos_token": None, "chat_template": [{"name": "default", "template": CHATML}]}}, (4,)),
    ],
)
def test_ends_of_a_folder(tmp_path, files, ends):
    assert load(write_folder(tmp_path, INNER["byte-level"], **files)).end_ids == ends


def test_end_ids_outside_the_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="end ids must lie in the vocabulary of .*got \\[5000\\]"):
        load(write_folder(tmp_path, INNER["byte-level"], config={"eos_token_id": 5000}))


def test_another_decoder(tmp_path):
    inner = vocabularies.byte_level_json()
    inner.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder must be ByteLevel, .*got WordPiece"):
        load(write_folder(tmp_path, inner))


def test_a_folder_that_cuts_or_pads(tmp_path):
    """Settings left over from training do not shorten a prompt."""
    inner = vocabularies.byte_level_json()
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    assert load(write_folder(tmp_path, inner)).encode("or" * 9) == INNER["byte-level"].encode("or" * 9).ids


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json not found"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not there"):
        load(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json is not JSON"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer"):
        load(tmp_path)
    path = write_llama2c(tmp_path / "tok.bin")
    whole = path.read_bytes()
    for keep in (len(whole) - 1, 2000, 10, 0):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"expected to end at byte \d+, found|must have tokens for all 256"):
            load(path)
    path.write_bytes(struct.pack("<ifi", 3, 0.0, -5))
    with pytest.raises(ValueError, match="fetch it again"):
        load(path)


@pytest.mark.parametrize("package", ["tokenizers", "gguf"])
def test_packages_are_asked_for_by_name(tmp_path, monkeypatch, package):
    path = write_gguf(tmp_path / "x.gguf", "gpt2")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'paxkv\[{'hf' if package == 'tokenizers' else 'gguf'}\]'"):
        load(path)


# --- conversations --------------------------------------------------------------------------------


@pytest.fixture
def chat(tmp_path):
    """Arguments → a tokenizer with a template."""

    def make(template: str | None) -> Tokenizer:
        settings = {"bos_token": "<s>", "chat_template": template}
        return load(write_folder(tmp_path, INNER["sentencepiece"], tokenizer_config=settings))

    return make


ASK = [{"role": "user", "content": "or"}]


def test_a_conversation(chat):
    made = chat(CHATML)
    assert chat_template.render(made, ASK) == "<|im_start|>user\nor<|im_end|>\n<|im_start|>assistant\n"
    ids = chat_template.encode_chat(made, ASK)
    assert ids[0] == 3 and ids.count(3) == 2 and ids.count(4) == 1  # and no start token that the template did not write
    both = chat("{{ bos_token }}{% for m in messages %}\n    {{ m.content | trim }}\n{% endfor %}")
    assert chat_template.render(both, ASK) == "<s>    or\n"  # blocks on lines of their own leave nothing
    assert chat_template.encode_chat(both, ASK)[:2] != [1, 1]


def test_conversations_that_are_refused(chat, monkeypatch):
    with pytest.raises(ValueError, match="no chat template"):
        chat_template.render(chat(None), ASK)
    with pytest.raises(ValueError, match="refused the conversation: no system role"):
        chat_template.render(chat("{{ raise_exception('no system role') }}"), ASK)
    with pytest.raises(ValueError, match="refused the conversation"):
        chat_template.render(chat("{% for"), ASK)
    with pytest.raises(ValueError, match="refused the conversation"):
        chat_template.render(chat("{{ ''.__class__.__mro__[1].__subclasses__() }}"), ASK)
    for wrong in ({"role": "tool", "content": "x"}, {"role": "user", "content": 3}, {}):
        with pytest.raises(ValueError, match="a message must have a role of system, user, assistant"):
            chat_template.render(chat(CHATML), [wrong])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'paxkv\[hf\]'"):
        chat_template.render(chat(CHATML), ASK)


# --- real ones ------------------------------------------------------------------------------------


def test_stories260k(shared_data):
    """The ids that other engines were prompted with, and the text that they wrote. The seeded twins are all above."""
    made = tokenizer.load(shared_data / "models" / "stories260k" / "tok512.bin")
    for line in map(json.loads, (shared_data / "golden" / "stories260k_greedy.jsonl").read_text("utf-8").splitlines()):
        assert made.encode(line["prompt"]) == line["prompt_ids"]
        ids = line["prompt_ids"] + line["output_ids"]
        assert "".join(streamed(made, ids)) == line["text"]
