"""The workload values: what they refuse, what their hash covers, and that nobody can change them."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload import Lengths, Workload, WorkloadError

GOOD = Workload("w", [0.0, 0.5, 0.5], [3, 2, 700], [1, 9, 4], "test")
HASHED = dataclasses.replace(GOOD, hash_ids=((7,), (7,), (7, 8)), hash_block=512)


def packed(tag: str, form: str, values) -> bytes:
    return tag.encode() + b"\0" + struct.pack("<Q", len(values)) + struct.pack(f"<{len(values)}{form}", *values)


def test_hash_is_the_documented_bytes():
    expected = b"paxkv workload 1\0"
    expected += packed("arrival_s", "d", [0.0, 0.5, 0.5])
    expected += packed("prompt_tokens", "q", [3, 2, 700]) + packed("output_tokens", "q", [1, 9, 4])
    expected += packed("prefix_tokens, hash_block", "q", [0, 512])
    expected += packed("hash_id counts", "q", [1, 1, 2]) + packed("hash_ids", "q", [7, 7, 7, 8])
    assert HASHED.content_hash == hashlib.sha256(expected).hexdigest()


def test_hash_covers_the_content_and_nothing_else():
    changes = [
        {"arrival_s": [0.0, 0.5, 0.6]},
        {"prompt_tokens": [3, 2, 701]},
        {"output_tokens": [1, 9, 5]},
        {"prompt_tokens": [1, 9, 4], "output_tokens": [3, 2, 700]},
        {"prefix_tokens": 2},
        {"hash_ids": ((7,), (7,), (7, 8)), "hash_block": 512},
        {"hash_ids": ((7,), (7,), (7, 9)), "hash_block": 512},
    ]
    hashes = {dataclasses.replace(GOOD, **change).content_hash for change in changes}
    assert len(hashes | {GOOD.content_hash}) == len(changes) + 1
    renamed = dataclasses.replace(GOOD, name="other", source="other")
    assert renamed.content_hash == GOOD.content_hash
    assert renamed == GOOD and hash(renamed) == hash(GOOD)
    assert HASHED != GOOD and GOOD != "w"


def test_equal_values_of_other_types_hash_equally():
    as_arrays = Workload(
        "w", np.array([-0.0, 0.5, 0.5], np.float32), np.array([3, 2, 700], np.uint16), np.array([1, 9, 4], ">i4"), "t"
    )
    assert as_arrays.content_hash == GOOD.content_hash


def test_arrays_cannot_be_changed():
    given_by_caller = np.array([3, 2, 700])
    workload = dataclasses.replace(GOOD, prompt_tokens=given_by_caller)
    given_by_caller[0] = 99
    assert workload.prompt_tokens.tolist() == [3, 2, 700]
    for value in (workload, pickle.loads(pickle.dumps(workload))):
        for field in ("arrival_s", "prompt_tokens", "output_tokens"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(value, field)[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.name = "x"


def test_copies_are_equal():
    assert pickle.loads(pickle.dumps(HASHED)) == HASHED
    lengths = Lengths("d", [1, 2], [3, 4], "test")
    assert pickle.loads(pickle.dumps(lengths)) == lengths
    assert lengths != dataclasses.replace(lengths, output=[3, 5])
    assert len({lengths, dataclasses.replace(lengths)}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": [3, 0, 700]}, r"prompt_tokens\[1\] must be in 1 .. 2147483647, got 0"),
        ({"prompt_tokens": [3, -2, 700]}, r"prompt_tokens\[1\] .* got -2"),
        ({"prompt_tokens": [3, 2, 2**31]}, r"prompt_tokens\[2\] .* got 2147483648"),
        ({"prompt_tokens": [3, 2, 2**70]}, "must hold integers up to 2147483647"),
        ({"prompt_tokens": [3, 2, 700.0]}, "must hold integers"),
        ({"prompt_tokens": [3, 2, float("nan")]}, "must hold integers"),
        ({"prompt_tokens": [3, True, 700]}, "must hold integers, got the boolean True"),
        ({"prompt_tokens": np.array([True, True, False])}, "must hold integers"),
        ({"prompt_tokens": ["3", "2", "700"]}, "must hold integers"),
        ({"prompt_tokens": [[3, 2, 700]]}, "must have one dimension"),
        ({"prompt_tokens": [[3], [2, 7], 1]}, "must be a flat list of integers"),
        ({"prompt_tokens": None}, "must be a flat list of integers, got None"),
        ({"prompt_tokens": [3, 2]}, "one arrival, prompt and output per request, got 3, 2 and 3"),
        ({"arrival_s": [0.0, 0.5, 0.4]}, "must not go back in time, got 0.4 after 0.5 at index 2"),
        ({"arrival_s": [-0.1, 0.5, 0.5]}, r"arrival_s\[0\] must be finite and zero or more, got -0.1"),
        ({"arrival_s": [0.0, 0.5, float("nan")]}, r"arrival_s\[2\] must be finite and zero or more, got nan"),
        ({"arrival_s": [0.0, 0.5, float("inf")]}, "must be finite"),
        ({"arrival_s": ["0", "1", "2"]}, "must hold numbers of seconds"),
        ({"arrival_s": [False, False, True]}, "must hold numbers of seconds"),
        ({"arrival_s": 5}, "must have one dimension"),
        ({"arrival_s": [], "prompt_tokens": [], "output_tokens": []}, "at least one request, got none"),
        ({"name": ""}, "Workload.name must be a non-empty string"),
        ({"source": 3}, "Workload.source must be a non-empty string"),
        ({"prefix_tokens": 3}, "a shared prefix must fit in every prompt, got prefix_tokens=3 and a prompt of 2"),
        ({"prefix_tokens": -1}, "prefix_tokens must be in 0"),
        ({"prefix_tokens": 1.0}, "prefix_tokens must be an integer, got 1.0"),
        ({"hash_block": 512}, "hash_block=512 needs hash_ids"),
        ({"hash_ids": ((7,), (7,), (7, 8))}, "hash_ids need hash_block"),
        ({"hash_ids": ((7,), (7,)), "hash_block": 512}, "one entry per request, got 2 for 3 requests"),
        ({"hash_ids": ((7,), (7,), (7,)), "hash_block": 512}, "2 ids for 700 tokens, got 1"),
        ({"hash_ids": ((7,), (-7,), (7, 8)), "hash_block": 512}, r"hash_ids\[1\] must hold integers .* got -7"),
        ({"hash_ids": ((7,), (True,), (7, 8)), "hash_block": 512}, "got True"),
    ],
)
def test_bad_values_are_refused(change, message):
    with pytest.raises(WorkloadError, match=message):
        dataclasses.replace(GOOD, **change)


def test_lengths_are_checked():
    with pytest.raises(WorkloadError, match="as many outputs as prompts, got 2 prompts and 1 outputs"):
        Lengths("d", [1, 2], [3], "test")
    with pytest.raises(WorkloadError, match="at least one pair"):
        Lengths("d", [], [], "test")
    with pytest.raises(WorkloadError, match=r"Lengths.output\[0\] must be in 1"):
        Lengths("d", [1], [0], "test")


def test_filters():
    lengths = Lengths("d", [5, 1, 4], [5, 1, 5], "test").with_total_at_most(9)
    assert (lengths.prompt.tolist(), lengths.output.tolist()) == ([1, 4], [1, 5])
    with pytest.raises(WorkloadError, match=r"prompt \+ output <= 5; the shortest has 9; raise max_total_tokens"):
        Lengths("d", [4], [5], "test").with_total_at_most(5)
    assert GOOD.require_fit(704) is GOOD
    assert GOOD.max_total_tokens == 704
    with pytest.raises(WorkloadError, match=r"max_model_len=703, but request 2 of 'w' has 700 \+ 4"):
        GOOD.require_fit(703)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1)), min_size=1, max_size=20
    )
)
def test_any_valid_workload_survives_a_copy(requests):
    times, prompts, outputs = zip(*sorted(requests), strict=True)
    workload = Workload("w", times, prompts, outputs, "test")
    assert pickle.loads(pickle.dumps(workload)).content_hash == workload.content_hash
    assert workload.arrival_s.tolist() == list(times)
