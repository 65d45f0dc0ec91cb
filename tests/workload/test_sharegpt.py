"""The reader of ShareGPT conversations, with a tokenizer that counts words."""

from __future__ import annotations

import gzip
import json

import pytest

from paxkv.workload import WorkloadError, read_sharegpt


def entry(name: str, *texts: str, first: str = "human") -> dict:
    """A conversation of these texts, speakers alternating."""
    speakers = ["human", "gpt"] if first == "human" else ["gpt", "human"]
    return {
        "id": name,
        "conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)],
    }


def read(tmp_path, entries, tokenizer=str.split, **options):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(entries))
    return read_sharegpt(path, tokenizer, **options)


def rounds(conversations) -> list[list[tuple[int, int]]]:
    pairs = list(zip(conversations.human.tolist(), conversations.reply.tolist(), strict=True))
    offsets = conversations.offsets.tolist()
    return [pairs[start:end] for start, end in zip(offsets, offsets[1:], strict=False)]


def test_rounds_are_counted(tmp_path):
    found = read(tmp_path, [entry("a", "one two", "three", "four", "five six seven"), entry("b", "", "x y")])
    assert rounds(found) == [[(2, 1), (1, 3)], [(0, 2)]]
    assert (found.name, found.source) == ("chat", "real:chat.json")
    assert found.first_rounds(start_tokens=1).prompt.tolist() == [3, 1]


@pytest.mark.parametrize("tokenizer", [len, lambda text: list(text), lambda text: text.encode()])
def test_any_function_is_a_tokenizer(tmp_path, tokenizer):
    assert rounds(read(tmp_path, [entry("a", "abc", "de")], tokenizer)) == [[(3, 2)]]


def test_gzipped_and_cut_short(tmp_path):
    path = tmp_path / "chat.json.gz"
    path.write_bytes(gzip.compress(json.dumps([entry(c, "q", "a") for c in "abc"]).encode()))
    assert len(read_sharegpt(path, str.split, max_conversations=2, name="mine")) == 2


def test_other_speakers_and_system_messages(tmp_path):
    talk = {
        "conversations": [
            {"from": "system", "value": "be good"},
            {"from": "User", "value": "q"},
            {"from": "assistant", "value": "a a"},
            {"from": "user", "value": "q q"},
            {"from": "system", "value": "stop"},
            {"from": "user", "value": "q"},
        ]
    }
    assert rounds(read(tmp_path, [talk])) == [[(1, 2)]]


def test_entries_that_start_with_an_answer_are_left_out(tmp_path):
    talks = [entry("a", "late answer", "q", "a", first="gpt"), entry("b", "q", "a")]
    assert rounds(read(tmp_path, talks)) == [[(1, 1)]]


def test_parts_of_a_conversation_are_joined(tmp_path):
    talks = [
        entry("x_0", "q", "a", "q q"),
        entry("x_1", "a a", "q q q", "a a a", first="gpt"),
        entry("y_0", "q", "a"),
        entry("y_2", "q", "a a a a"),  # part 1 is missing, so this one is left out
        entry("z_1", "a", "q", "a", first="gpt"),  # its start is missing
        entry("z_2", "q", "a"),
        entry("plain", "q q", "a"),
    ]
    assert rounds(read(tmp_path, talks)) == [[(1, 1), (2, 2), (3, 3)], [(1, 1)], [(2, 1)]]


@pytest.mark.parametrize(
    ("content", "where", "rule"),
    [
        ('[\n{"id": 1,}]', ", line 2", "the file must be valid JSON"),
        ('{"conversations": []}', ", line 1", "must hold a list of conversations, got a dict"),
        ("[3]", "", "entry 0 must be an object with a list 'conversations', got 3"),
        ('[{"id": "a"}]', "", "entry 0 must be an object with a list 'conversations'"),
        ('[{"conversations": [{"from": "human"}]}]', "", "entry 0, message 0 needs the texts 'from' and 'value'"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "", "entry 0, message 0 needs the texts"),
        ('[{"conversations": [["human", "q"]]}]', "", "entry 0, message 0 needs the texts"),
        ('[{"conversations": [{"from": "human", "value": "q"}]}]', "", "at least one conversation must start"),
        ("[]", "", "at least one conversation must start"),
        ("", ", line 1", "the file must not be empty"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, where, rule):
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=rule) as error:
        read_sharegpt(path, str.split)
    assert str(error.value).startswith(f"{path}{where}: ")


def test_bad_tokenizers_are_refused(tmp_path):
    talks = [entry("a", "q", "a")]
    with pytest.raises(
        WorkloadError, match="tokenizer must be a function .* got 'tokenizer.json'; for a tokenizer.json"
    ):
        read(tmp_path, talks, "tokenizer.json")
    with pytest.raises(WorkloadError, match="must return tokens or their number, got True"):
        read(tmp_path, talks, lambda text: True)
    with pytest.raises(WorkloadError, match="must return tokens or their number, got None"):
        read(tmp_path, talks, lambda text: None)
    with pytest.raises(WorkloadError, match="pickles and binary arrays are never read"):
        read_sharegpt(tmp_path / "chat.pkl", str.split)
    with pytest.raises(WorkloadError, match="max_conversations must be in 1"):
        read(tmp_path, talks, max_conversations=0)
