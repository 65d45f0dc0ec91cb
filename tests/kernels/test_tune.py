"""Block sizes: which entry a call takes, which candidate the search keeps, and what is committed."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_kernels import tune
from pallas_kernels.paged_attention import tpu_blocks, tpu_tuned
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.tpu_blocks import Blocks
from pallas_kernels.paged_attention.tpu_tuned import Kind
from pallas_kernels.proof import targets
from pallas_kernels.proof.targets import abstract_mesh

KIND = Kind(several=False, k="bfloat16", v="bfloat16", page_size=16, size=128, heads=32, kv_heads=8)
SIZES = {"queries": 1, "tokens": 1024, "depth": 4, "parts": 8}
COMMITTED = sorted(path.stem for path in tpu_tuned.FOLDER.glob("*.json"))


def trial(tokens: int, bundles: float, spilled: int = 0, flight: int = 1 << 30, parts: int = 1) -> tune.Trial:
    """A candidate with these figures."""
    return tune.Trial(Blocks(1, tokens, 3, parts), bundles, spilled, 0, 1 << 20, 1 << 10, flight)


# --- which entry a call takes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        ({}, 0),
        ({"page_size": 32}, 1),
        ({"page_size": 8}, 1),
        ({"page_size": 64}, math.inf),
        ({"heads": 16, "kv_heads": 4}, 1),
        ({"heads": 16}, 1),
        ({"heads": 64, "page_size": 32}, 2),
        ({"heads": 8}, math.inf),
        ({"k": "int8"}, math.inf),
        ({"v": "bfloat16/token"}, math.inf),
        ({"size": 64}, math.inf),
        ({"several": True}, math.inf),
    ],
)
def test_distance(other, distance):
    assert KIND.distance(dataclasses.replace(KIND, **other)) == distance


def test_the_nearest_entry_is_taken_and_only_the_same_kind_takes_its_parts():
    near, far = dataclasses.replace(KIND, page_size=32), dataclasses.replace(KIND, page_size=128)
    entries = {near: SIZES, far: {**SIZES, "tokens": 512}}
    assert tpu_tuned.nearest(near, entries) == SIZES
    assert tpu_tuned.nearest(KIND, entries) == {**SIZES, "parts": 0}
    assert tpu_tuned.nearest(dataclasses.replace(KIND, page_size=256), entries) == {**SIZES, "tokens": 512, "parts": 0}
    assert tpu_tuned.nearest(dataclasses.replace(KIND, size=256), entries) is None
    assert tpu_tuned.nearest(KIND, {}) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": [{}]}', '{"entries": [{"kind": {"several": true}}]}'])
def test_a_file_that_is_no_tuning_is_refused(tmp_path, text):
    (tmp_path / "v9.json").write_text(text)
    with pytest.raises(ValueError, match=r"v9.json: must be as python -m pallas_kernels.tune writes it"):
        tpu_tuned.read("v9", tmp_path)


def test_a_device_without_a_file_has_no_entries(tmp_path):
    assert tpu_tuned.read("v9", tmp_path) == {}


@pytest.mark.parametrize(
    ("height", "columns", "pages", "wanted", "parts"),
    [
        (2, 4096, 4, 0, 2),  # 64 registers of logits, of which a part may have 32
        (2, 4096, 1, 0, 1),  # a page is never divided
        (16, 1024, 8, 0, 4),
        (2, 4096, 32, 8, 8),
        (2, 256, 32, 8, 2),  # a part has a register of columns at least
        (2, 4096, 4, 1, 1),
    ],
)
def test_parts_of_a_block(height, columns, pages, wanted, parts):
    assert tpu_blocks.count_parts(height, columns, pages, wanted) == parts


def test_a_block_has_no_more_groups_of_pages_than_a_word_has_bits():
    spec = ArgSpec("small", ((1, 4096),), size=128, page_size=2, heads=8, kv_heads=8)
    call = tune.make_call(spec, spec.shapes())
    with abstract_mesh("TPU v6 lite", "tpu"):
        layout = tpu_blocks.arrange(call, Blocks(1, 2048, 3), tune.tpu_chip.current())
    assert layout.pages // layout.joined <= 32


# --- which candidate is kept -----------------------------------------------------------------------------------------


def test_the_cheapest_candidate_is_kept_that_fits_and_keeps_the_memory_busy():
    rule = trial(512, 2.0)
    good, spilling, slow, idle = trial(512, 1.5), trial(512, 1.0, 201), trial(256, 2.1), trial(512, 0.5, flight=10)
    assert tune.choose(rule, [slow, spilling, idle, good], 100) == good
    assert tune.choose(rule, [slow, spilling, idle], 100) == rule
    assert tune.choose(trial(512, 1.0, 201), [slow], 100) == slow  # the rule spills


def test_what_a_long_block_computes_for_nothing_counts():
    short, long = trial(512, 1.5), trial(4096, 1.49)
    assert tune.choose(short, [long], 100) == short


def schedule_of(spec: ArgSpec, blocks: Blocks) -> tune.Trial:
    """Figures that a compiler might give: best at 1,024 tokens in four parts of eight queries."""
    apart = [abs(math.log2(a / b)) for a, b in ((blocks.tokens, 1024), (blocks.parts, 4), (blocks.queries, 8))]
    flight = (blocks.depth - 1) * blocks.tokens * tune.token_bytes(tune.make_call(spec, spec.shapes()))
    return tune.Trial(blocks, (1 + sum(apart)) * blocks.queries, 0, 0, 1 << 20, 1 << 10, flight)


@pytest.mark.parametrize("spec", tune.specs()[:4] + tune.specs()[10:12], ids=lambda spec: spec.name)
def test_the_search_finds_no_worse_than_the_rule_and_keeps_the_memory_busy(spec):
    chip = tune.chip_of("v6e")
    tried = []

    def compiled(spec, blocks):
        tried.append(blocks)
        return schedule_of(spec, blocks)

    rule, best = tune.search(spec, chip, compiled)
    assert len(tried) == len(set(tried)) <= 12
    assert rule.blocks in tried and best.blocks in tried
    assert best.rate <= rule.rate and best.cost == min(
        schedule_of(spec, x).cost for x in tried if x == rule.blocks or x.depth >= 3
    )
    assert best.flight_bytes >= tune.wanted_bytes(chip)


def test_a_candidate_that_does_not_compile_is_out_and_so_is_a_kind_whose_rule_does_not():
    spec, chip = tune.specs()[0], tune.chip_of("v6e")
    rule, best = tune.search(spec, chip, lambda spec, x: schedule_of(spec, x) if x.tokens == 512 else "too large")
    assert best.blocks.tokens == rule.blocks.tokens == 512
    assert tune.search(spec, chip, lambda spec, x: "no room") == "no room"


def test_trials_are_kept_and_an_abort_is_met_twice_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "versions", lambda target: {"jax": "1"})
    spec, blocks, done = tune.specs()[0], Blocks(1, 512, 4, 1), []

    def compiled(spec, blocks, target):
        done.append(target)
        if len(done) == 1:
            raise MemoryError("no room")
        raise SystemExit  # as an abort: nothing after it runs

    monkeypatch.setattr(tune, "compile_trial", compiled)
    monkeypatch.setattr(tune.inspect, "getsource", lambda _: "")
    trials = tune.Trials("v6e", tmp_path)
    for _ in range(2):  # a refusal is kept
        assert trials.get(spec, blocks) == "MemoryError: no room"
    assert len(done) == 1
    other = dataclasses.replace(blocks, depth=5)
    for _ in range(2):
        with pytest.raises(SystemExit):
            trials.get(spec, other)
    assert trials.get(spec, other) == "the compiler ended the process"
    assert len(done) == 3


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--targets=v9"], "--targets: must be some of"),
        (["--targets="], "--targets: must be some of"),
        (["--jobs=0"], "--jobs: must be at least 1; got 0"),
        (["--only=nothing"], "--only: must fit a kind"),
        (["--only=decode*"], "add --dry"),
    ],
)
def test_bad_arguments(capsys, arguments, words):
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert words in capsys.readouterr().err


def test_kinds_are_listed(capsys):
    assert tune.main(["--list", "--only=*int8*"]) == 0
    names = capsys.readouterr().out.split("\n")[:-1]
    assert names and all("int8" in name for name in names) and len(names) == len(set(names))


# --- what is committed -----------------------------------------------------------------------------------------------


def test_three_generations_are_tuned():
    assert {"v5e", "v6e", "7x"} <= set(COMMITTED)


@pytest.mark.parametrize("target", COMMITTED)
def test_committed_sizes_hold_what_the_search_asks_and_are_taken(target):
    kept = json.loads((tpu_tuned.FOLDER / f"{target}.json").read_text())
    names = [entry["name"] for entry in kept["entries"]]
    assert sorted([*names, *kept["left_out"]]) == sorted(spec.name for spec in tune.specs())
    assert all("the loop over blocks has a loop inside" in why for why in kept["left_out"].values())
    assert f"--targets={target}" in kept["command"] and {"jax", "libtpu"} <= set(kept["versions"])
    by_name = {entry["name"]: entry for entry in kept["entries"]}
    with tune.abstract_mesh(target):
        for spec in (spec for spec in tune.specs() if spec.name in by_name):
            entry = by_name[spec.name]
            several = tune.is_several(spec)
            assert entry["kind"] == dataclasses.asdict(tune.kind_of(spec))
            call = tune.make_call(spec, spec.shapes())
            taken = tpu_blocks.default(call, several)
            assert dataclasses.asdict(taken) == {name: entry[name] for name in tpu_tuned.SIZES}
            assert tune.settle(call, taken, tune.tpu_chip.current()) == taken
            assert several or entry["fills"] + entry["spills"] <= tune.SPILLED
            assert (
                entry["bundles_per_token"] / entry["queries"] <= entry["rule_bundles_per_token"] / entry["rule_queries"]
            )
            exact = dataclasses.replace(call, q=call.q.update(dtype=jnp.float32))
            assert tpu_blocks.default(exact, several) == tpu_blocks.rule(exact, several)


def test_what_is_committed_can_be_made_again(tmp_path):
    """One kind, with the compiler; where it is the one that made the file, the sizes and figures are the same."""
    pytest.importorskip("libtpu", reason="needs libtpu: pip install -e '.[aot]'")
    command = [
        sys.executable,
        "-m",
        "pallas_kernels.tune",
        "--targets=v6e",
        "--only=decode bfloat16 p128 d128*",
        "--dry",
    ]
    root = pathlib.Path(tune.__file__).parents[1]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"], capture_output=True, text=True, cwd=root, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    [entry] = made["entries"]
    kept = json.loads((tpu_tuned.FOLDER / "v6e.json").read_text())
    same = next(one for one in kept["entries"] if one["name"] == entry["name"])
    if made["versions"] == kept["versions"]:
        assert entry == same
    else:
        assert entry["bundles_per_token"] <= same["bundles_per_token"] * 1.1
