"""Conversations, and the chat workload of figure 17."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload import Conversations, WorkloadError, chat_workload, embedded_conversations
from paxkv.workload.chat import _pick_rounds

TALKS = Conversations("talks", [10, 20, 30, 5, 0], [100, 200, 300, 7, 2000], [0, 3, 5], "test")


def test_prompts_hold_the_history():
    requests = TALKS.as_requests()
    # 10; 10+100+20; 10+100+20+200+30; 5; 5+7+0
    assert requests.prompt.tolist() == [10, 130, 360, 5, 12]
    assert requests.output.tolist() == [100, 200, 300, 7, 1016]
    cut = TALKS.as_requests(context_tokens=128, max_output_tokens=150)
    assert cut.prompt.tolist() == [10, 128, 128, 5, 12]
    assert cut.output.tolist() == [100, 150, 150, 7, 150]


def test_empty_turns_count_as_one_token():
    empty = Conversations("e", [0, 3], [0, 0], [0, 1, 2], "test").as_requests()
    assert (empty.prompt.tolist(), empty.output.tolist()) == ([1, 3], [1, 1])


def test_first_rounds():
    first = TALKS.first_rounds(start_tokens=1)
    assert (first.prompt.tolist(), first.output.tolist()) == ([11, 6], [101, 8])
    assert len(Conversations("e", [0, 3], [5, 5], [0, 1, 2], "test").first_rounds()) == 1
    with pytest.raises(WorkloadError, match="no first round of 'e' has a prompt and an output"):
        Conversations("e", [0], [5], [0, 1], "test").first_rounds()


def test_probability_one_only_starts_conversations():
    picked = _pick_rounds([0, 3, 5, 6], 3, 1.0, random.Random(0))
    assert sorted(picked) == [0, 3, 5]


def test_probability_zero_finishes_a_conversation_before_the_next():
    picked = _pick_rounds([0, 3, 5, 6], 6, 0.0, random.Random(0))
    assert sorted(picked) == list(range(6))
    starts = [picked.index(first) for first in (0, 3, 5)]
    for first, at, rounds in zip((0, 3, 5), starts, (3, 2, 1), strict=True):
        assert picked[at : at + rounds] == list(range(first, first + rounds))


def test_the_conversations_may_be_started_again():
    picked = _pick_rounds([0, 3, 5, 6], 14, 0.5, random.Random(1))
    assert np.bincount(picked).sum() == 14
    assert sorted(picked[:6]) == sorted(picked[6:12]) == list(range(6))


@given(
    rounds=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    probability=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_rounds_come_in_order_and_once(rounds, probability, seed):
    offsets = np.concatenate([[0], np.cumsum(rounds)]).tolist()
    total = offsets[-1]
    picked = _pick_rounds(offsets, total, probability, random.Random(seed))
    assert sorted(picked) == list(range(total))
    when = {turn: at for at, turn in enumerate(picked)}
    for start, end in zip(offsets, offsets[1:], strict=False):
        assert [when[turn] for turn in range(start, end)] == sorted(when[turn] for turn in range(start, end))


def test_share_of_new_conversations():
    conversations = embedded_conversations()
    workload = chat_workload(conversations, 0.8, 3600, new_probability=0.5, seed=3)
    first = set(conversations.offsets[:-1].tolist())
    picked = _pick_rounds(conversations.offsets.tolist(), len(workload), 0.5, random.Random(3))
    share = np.mean([turn in first for turn in picked])
    assert share == pytest.approx(0.5, abs=0.04)
    requests = conversations.as_requests()
    np.testing.assert_array_equal(workload.prompt_tokens, requests.prompt[picked])
    np.testing.assert_array_equal(workload.output_tokens, requests.output[picked])
    assert workload.max_total_tokens <= 1024 + 1016


def test_pinned_hash():
    workload = chat_workload(embedded_conversations(), 0.8, 3600, new_probability=0.5)
    assert len(workload) == 2895
    assert workload.content_hash == "7d1a84fd0237f2d68e6a83dfbaa96a6327ae4bbcb56ed9d7d43258fb50285656"
    assert "new_probability 0.5" in workload.source


def test_a_copy_is_whole():
    copy = pickle.loads(pickle.dumps(TALKS))
    for field in ("human", "reply", "offsets"):
        np.testing.assert_array_equal(getattr(copy, field), getattr(TALKS, field))
        assert not getattr(copy, field).flags.writeable


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (([1, -2], [1, 1], [0, 2]), r"Conversations.human\[1\] must be in 0 .. 2147483647, got -2"),
        (([1, 2], [1], [0, 2]), "as many replies as human turns, got 1 and 2"),
        (([1, 2], [1, 1], [0]), "at least one conversation"),
        (([1, 2], [1, 1], [0, 1]), "run from 0 to the number of rounds, 2"),
        (([1, 2], [1, 1], [0, 0, 2]), "every conversation needs at least one round, conversation 0 has none"),
        (([1, 2], [1.5, 1], [0, 2]), "Conversations.reply must hold integers"),
    ],
)
def test_bad_conversations_are_refused(fields, message):
    with pytest.raises(WorkloadError, match=message):
        Conversations("bad", *fields, "test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new_probability": 1.5}, "new_probability must be a probability in 0 .. 1, got 1.5"),
        ({"new_probability": float("nan")}, "new_probability must be a probability"),
        ({"new_probability": "0.5"}, "new_probability must be a probability"),
        ({"rate": 0}, "rate must be finite and above zero"),
        ({"duration_s": -1}, "duration_s must be finite and above zero"),
        ({"context_tokens": 0}, "context_tokens must be in 1"),
        ({"max_output_tokens": 0}, "max_output_tokens must be in 1"),
        ({"seed": -1}, "seed must be in 0"),
        ({"conversations": [1]}, "conversations must be a Conversations value .* got list"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    arguments = {"conversations": TALKS, "rate": 1.0, "duration_s": 60.0, "new_probability": 0.5} | arguments
    with pytest.raises(WorkloadError, match=message):
        chat_workload(**arguments)
