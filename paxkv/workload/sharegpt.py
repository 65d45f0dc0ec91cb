"""Reader of ShareGPT conversation files (JSON with the text of every turn), through a tokenizer.

The public file cuts long conversations into entries whose ids end in ``_0``, ``_1`` and so on; more than a third
of the entries begin in the middle, with an answer. Entries of one conversation are joined while they follow each
other, so that an answer is never taken for a prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import numpy as np

from paxkv.workload import validate
from paxkv.workload.chat import Conversations
from paxkv.workload.textfile import fail, read_text
from paxkv.workload.validate import WorkloadError

Tokenize = Callable[[str], Sized | int]
"""A function from a text to its tokens, or to their number."""

_HUMAN = {"human", "user"}
_REPLY = {"gpt", "chatgpt", "assistant", "bard", "bing"}


def read_sharegpt(
    path: str | os.PathLike,
    tokenizer: Tokenize,
    *,
    name: str | None = None,
    max_conversations: int | None = None,
) -> Conversations:
    """Read conversations: a list of ``{"id": ..., "conversations": [{"from": ..., "value": ...}, ...]}``.

    Of each conversation the rounds up to the first that breaks the order (human, then reply) are kept;
    leading system messages are skipped; conversations without a round are left out. No start tokens are
    counted: turns are meant to be joined. ``Conversations.first_rounds`` gives the paper's pairs.

    Args:
        path: .json or .json.gz file.
        tokenizer: a function from a text to its tokens, or to their number.
        max_conversations: keep the first so many.

    Raises:
        WorkloadError: names the file, the entry, the value and the rule.
    """
    count = _counter(tokenizer)
    if max_conversations is not None:
        validate.whole_number(max_conversations, "max_conversations", least=1)
    entries = _entries(path)
    human: list[int] = []
    reply: list[int] = []
    offsets = [0]
    for messages in _joined(path, entries):
        for question, answer in _rounds(messages):
            human.append(count(question))
            reply.append(count(answer))
        if len(human) > offsets[-1]:
            offsets.append(len(human))
        if len(offsets) - 1 == max_conversations:
            break
    if len(offsets) == 1:
        fail(
            path,
            None,
            f"at least one conversation must start with a human turn and a reply, got {len(entries)} without",
        )
    name = name or Path(path).name.partition(".")[0]
    return Conversations(name, np.array(human), np.array(reply), np.array(offsets), f"real:{Path(path).name}")


def _counter(tokenizer: Tokenize) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text."""
    if not callable(tokenizer):
        raise WorkloadError(
            f"tokenizer must be a function from a text to its tokens, got {tokenizer!r}; for a tokenizer.json file "
            "install the package tokenizers and pass tokenizers.Tokenizer.from_file(path).encode"
        )

    def count(text: str) -> int:
        tokens = tokenizer(text)
        number = len(tokens) if isinstance(tokens, Sized) else tokens
        if type(number) is not int or number < 0:
            raise WorkloadError(f"a tokenizer must return tokens or their number, got {tokens!r} for {text[:40]!r}")
        return number

    return count


def _entries(path: str | os.PathLike) -> list[Any]:
    text = read_text(path)
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        fail(
            path,
            error.lineno,
            f"the file must be valid JSON: {error.msg}, got {error.doc[error.pos : error.pos + 40]!r}",
        )
    if not isinstance(entries, list):
        fail(path, 1, f"the file must hold a list of conversations, got a {type(entries).__name__}")
    return entries


def _joined(path: str | os.PathLike, entries: list[Any]) -> Iterator[list[tuple[str, str]]]:
    """Yield the messages of each conversation, as (speaker, text), entries with following ids joined."""
    messages: list[tuple[str, str]] = []
    expected = None
    for index, entry in enumerate(entries):
        stem, part = _id_parts(path, index, entry)
        found = _messages(path, index, entry)
        if part is not None and (stem, part) == expected:
            messages += found
        else:
            if messages:
                yield messages
            # A later part without the one before it starts in the middle: it is left out.
            messages = found if not part else []
        expected = (stem, part + 1) if part is not None and messages else None
    if messages:
        yield messages


def _id_parts(path: str | os.PathLike, index: int, entry: Any) -> tuple[str, int | None]:
    """Split an entry's id ``abc_2`` into ``("abc", 2)``; other ids have no part."""
    if not isinstance(entry, dict) or not isinstance(entry.get("conversations"), list):
        fail(path, None, f"entry {index} must be an object with a list 'conversations', got {str(entry)[:60]}")
    stem, _, part = str(entry.get("id", index)).rpartition("_")
    return (stem, int(part)) if stem and part.isdigit() and part.isascii() and len(part) < 10 else ("", None)


def _messages(path: str | os.PathLike, index: int, entry: dict[str, Any]) -> list[tuple[str, str]]:
    messages = []
    for number, message in enumerate(entry["conversations"]):
        ok = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("from", "value"))
        if not ok:
            fail(
                path,
                None,
                f"entry {index}, message {number} needs the texts 'from' and 'value', got {str(message)[:60]}",
            )
        messages.append((message["from"].lower(), message["value"]))
    return messages


def _rounds(messages: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (human turn, reply) while they alternate."""
    start = next((i for i, (speaker, _) in enumerate(messages) if speaker != "system"), len(messages))
    turns = messages[start:]
    for (asker, question), (answerer, answer) in zip(turns[::2], turns[1::2], strict=False):
        if asker not in _HUMAN or answerer not in _REPLY:
            return
        yield question, answer
