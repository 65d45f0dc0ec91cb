"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import gc
import os
import pathlib
import sys

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MANY_MAPS = 20_000
"""Memory maps of a process at which it is time to drop compiled programs; Linux gives a process 65,530."""

# The same examples in every run, on every machine, with nothing stored between runs.
hypothesis.settings.register_profile("paxkv", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("paxkv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", action="store_true", help="run all of tests/test_soak.py, some minutes, not a fifth of it"
    )
    parser.addoption("--real-model", action="store_true", help="run the tests of a real model that pip has installed")


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The checkout's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of the real traces: ``PAXKV_SHARED``, else ``../shared/data`` beside the checkout; skips without one.

    Every test that takes this fixture has a twin on seeded data that never skips, so a checkout without the traces
    still tests the same rule.
    """
    override = os.environ.get("PAXKV_SHARED")
    folder = pathlib.Path(override) if override else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        if override:
            pytest.fail(f"PAXKV_SHARED={override} is not a folder; unset it or correct it")
        pytest.skip(f"no real traces at {folder}; set PAXKV_SHARED to their folder (the seeded twin of this test ran)")
    return folder


@pytest.fixture(autouse=True, scope="module")
def room_for_compiled_code():
    """After a module, drops compiled programs if they hold many memory maps.

    Each program that XLA compiles for a CPU keeps some, and a process that gets no more of them crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
