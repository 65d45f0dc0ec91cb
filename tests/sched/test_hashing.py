"""Content keys: everything that changes keys and values is in them, and nothing of the process is."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched import hashing
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.scripted import ScriptedRun

# B10: no adapter, an adapter, a salt that spells the adapter's name, and two generations of one adapter.
CONTEXTS = [
    {},
    {"adapter": "X"},
    {"salt": "X"},
    {"salt": ""},
    {"adapter": "Y weights 1"},
    {"adapter": "Y weights 2"},
    {"adapter": "X", "salt": "X"},
]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(CONTEXTS, 2)))
def test_nothing_is_shared_between_contexts(first, second):
    memory = PagedMemory(CacheConfig(20, prefix_caching=True))
    run = ScriptedRun(Scheduler(SchedulerConfig(), memory, check=True))
    ids = tuple(range(32))
    for name, context in enumerate((first, second, first, second)):
        run.submit(Request(name, 32, 2, prompt_ids=ids, **context))
        run.run()
    hits = [event.cached_tokens for plan in run.plans for event in plan.admitted]
    assert hits == [0, 0, 16, 16]


def test_the_parent_is_part_of_the_key():
    """Pages [A, B], then [C, B]: the second B is another page."""
    root = hashing.root_key()
    first = hashing.page_keys([1, 2, 3, 4], 2, root)
    second = hashing.page_keys([5, 6, 3, 4], 2, root)
    assert not set(first) & set(second)
    assert hashing.page_keys([1, 2, 3, 9], 2, root)[0] == first[0]


def test_only_full_pages_have_keys_and_known_ones_are_kept():
    root = hashing.root_key()
    ids = list(range(11))
    keys = hashing.page_keys(ids, 4, root)
    assert len(keys) == 2
    assert hashing.page_keys(ids + [11], 4, root, keys) == hashing.page_keys(ids + [11], 4, root)
    assert hashing.page_keys(ids[:3], 4, root) == []
    assert hashing.page_keys(ids, 4, root, [b"taken as it is"])[0] == b"taken as it is"


def test_a_field_cannot_be_read_as_another():
    roots = {
        hashing.root_key(**context)
        for context in [*CONTEXTS, {"adapter": "a", "salt": "bc"}, {"adapter": "ab", "salt": "c"}]
    }
    assert len(roots) == len(CONTEXTS) + 2


def test_the_format_is_fixed():
    """Stores outlive processes and versions: these values change only with the format's number."""
    root = hashing.root_key("salt", "adapter")
    assert root.hex() == "a84675399b4def79cecfeb617a5613a7a08ee87b865def8b94b77916dbf18643"
    assert (
        hashing.page_key(root, [0, 1, -1, 2**62]).hex()
        == "c80770cc8a36166ae3333297899da520853a60f5bb5f9a80574dd9aec7955422"
    )


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_finds_the_same_keys(repo_root, seed):
    """B19: keys owe nothing to PYTHONHASHSEED."""
    code = (
        "from paxkv.sched import hashing; print(hashing.page_keys(range(32), 16, hashing.root_key('s', 'a'))[1].hex())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repo_root,
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == hashing.page_keys(range(32), 16, hashing.root_key("s", "a"))[1].hex()


@pytest.mark.parametrize("ids", [(1, 2**63), (1, 2.5), (1, "x"), (1, None)])
def test_ids_that_cannot_be_keyed_are_refused_at_submit(ids):
    """They would otherwise raise when the request is admitted, in a step that serves others."""
    scheduler = Scheduler(SchedulerConfig(), PagedMemory(CacheConfig(8, prefix_caching=True)))
    with pytest.raises(RequestRejected, match="64 bits"):
        scheduler.submit(Request("bad", 2, 2, prompt_ids=ids))
    assert not scheduler.has_work


def test_any_text_is_a_salt():
    assert hashing.root_key("\ud800") != hashing.root_key("\ud801")
    assert hashing.root_key(adapter="\ud800") != hashing.root_key("\ud800")
