"""The live runs: real tokens of a tiny model on every system, their checks, the clock, the chapters made of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from experiments import calibration as calibrations
from experiments import fig02, fig12, fig13, fig14, fig15, fig16, fig18, paper, study_live
from experiments.context import Context
from experiments.live import attention, checks
from experiments.live.attention import measure_figure, measure_point, names_here
from experiments.live.clock import Batch, batches, fit_cost, points_of, serve_batch
from experiments.live.prediction import UNTIMED, predict
from experiments.live.serve import LiveResult, run_live
from experiments.live.session import LiveSession
from experiments.live.setting import (
    LONGEST_SEQUENCES,
    SIZES,
    SYSTEMS,
    LiveSetting,
    build_live_memory,
    build_live_workload,
    checkpoint_size,
    prompt_ids,
    saturated,
)
from experiments.report import write_report
from experiments.reproduce import LIVE, chosen, reproduce
from experiments.run import Runner
from pallas_kernels.paged_attention.arg_specs import SMALL
from paxkv.record import RunDirectory
from paxkv.sim.cost_model import CostModel

# The tiny size with every data set: the shapes, and so the compiled steps, are those of the smoke preset.
TINY = dataclasses.replace(SIZES["tiny"], scales=(("sharegpt", 1 / 48), ("alpaca", 1 / 8), ("wmt16", 1 / 8)))
CLOCK = {
    "points": [
        {"decodes": rows, "prompts": 0, "tokens": rows, "sequences": rows, "context_tokens": rows * context,
         "seconds": 2e-3 + 1e-4 * rows + 1e-7 * rows * context, "plans": 5}
        for rows in (2, 4, 8, 12) for context in (20, 50)
    ],
    "limits": {"flops_per_s": 1e11, "bytes_per_s": 1e10},
    "model": {"weights": 1e5, "weight_bytes": 4e5, "build_s": 0.1},
}  # fmt: skip
"""Stands for the timed steps of a device."""


class TinySession(LiveSession):
    """A session at the tiny size with every data set, whose clock is given."""

    size = TINY

    def __init__(self, root, **options) -> None:
        super().__init__(root, "tiny", **options)
        with RunDirectory(self.root, f"clock-{self.size.name}", self._config("clock", {})) as run:
            run.write_summary(CLOCK)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def session(root) -> TinySession:
    return TinySession(root)


def values(rows) -> dict[str, float | None]:
    """What a row says by the end of its place."""
    return {row.setting.split(": ")[-1]: row.ours for row in rows}


# --- real tokens --------------------------------------------------------------------------------------------------


def test_every_system_gives_the_same_tokens_by_the_simulators_decisions(session):
    settings = saturated(TINY)
    assert [setting.system for setting in settings] == list(SYSTEMS)
    rows = checks.exact_rows(session, "live", "all at once", settings)
    assert values(rows) == {
        "requests whose tokens differ between systems": 0,
        "compilations on the clock": 0,
        "systems on which engine and simulator decide differently": 0,
    }
    assert all(row.passed for row in rows)
    runs = dict(zip(SYSTEMS, session.run(settings), strict=True))
    workload = build_live_workload(settings[0], None)
    for run in runs.values():
        assert run["output_tokens"] == workload.output_tokens.sum() > 50
        assert run["requests"] == len(workload.output_tokens) == TINY.requests
        assert run["tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])
        assert 0 < run["ttft_s"]["p50"] <= run["ttft_s"]["p99"] <= run["seconds"]
        assert sum(run["all"]["shares"].values()) == pytest.approx(100)
    assert runs["orca_max"]["full"]["mean_groups"] == LONGEST_SEQUENCES
    assert runs["static"]["full"]["mean_groups"] <= LONGEST_SEQUENCES < runs["paged"]["full"]["mean_groups"]
    assert runs["paged"]["steps"] <= runs["orca_max"]["steps"] < runs["static"]["steps"]


def test_tokens_are_the_models(session):
    """The first requests, computed densely in float64 by an implementation of its own."""
    from paxkv.models.weights import init_params
    from paxkv.sampling import SamplingParams
    from paxkv.testing.dense import DenseModel

    setting = saturated(TINY)[-1]
    session.run([setting])
    workload = build_live_workload(setting, None)
    config = dataclasses.replace(session.model.config, scan_layers=True)
    dense = DenseModel(config, init_params(config, 0))
    tokens = session.tokens(setting)
    for index, prompt in enumerate(prompt_ids(setting, workload)[:3]):
        count = int(workload.output_tokens[index])
        wanted = dense.generate(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        assert tokens[index] == [list(wanted.token_ids)]


@pytest.mark.parametrize(
    "kind", [{"num_seqs": 2}, {"num_seqs": 2, "beam": True}, {"prefix_tokens": 16}], ids=["samples", "beams", "prefix"]
)
def test_sharing_changes_no_token(session, kind):
    """Sequences of a request that share pages, and a prefix that is stored once, against Orca's plain copies."""
    dataset = "wmt16" if "prefix_tokens" in kind else "alpaca"
    orca = LiveSetting("orca_oracle", TINY, dataset, 3, **kind)
    paged = dataclasses.replace(orca, system="paged", prefix_caching="prefix_tokens" in kind)
    rows = checks.exact_rows(session, "live", "shared", [orca, paged])
    assert all(row.passed for row in rows)
    assert (len(rows) == 3) == (not kind.get("beam"))  # the simulator knows no scores
    (run,) = session.run([paged])
    assert len(session.tokens(paged)[0]) == paged.num_seqs
    assert run["prefix_hit_rate"] if paged.prefix_caching else run["all"]["sharing_saved"] > 0


def test_arrivals_are_served_on_the_clock(session):
    setting = LiveSetting("paged", TINY, "sharegpt", 6, rate=200.0)
    workload = build_live_workload(setting, None)
    (run,) = session.run([setting])
    assert run["late_compiles"] == 0
    assert run["seconds"] > workload.arrival_s[-1] > 0  # nobody is served before being there
    alone = run_live(dataclasses.replace(setting, system="orca_oracle"), session.model)
    assert alone.summary["tokens_hash"] == run["tokens_hash"]


# --- the checks see what is wrong -----------------------------------------------------------------------------------


def test_a_wrong_token_is_found(root, session):
    """One token of one request, changed in a copy of the run: the first that differs is no tie."""
    settings = saturated(TINY)[-2:]
    session.run(settings)
    other = TinySession(root)
    other.run(settings)
    victim = max(range(TINY.requests), key=lambda index: len(session.tokens(settings[0])[index][0]))

    def tokens(setting):
        found = session.tokens(setting)
        if setting is settings[0]:
            found[victim][0][-1] ^= 1
        return found

    other.tokens = tokens
    run = other._summaries[settings[0]] = json.loads(json.dumps(other._summaries[settings[0]]))
    run["request_hashes"][victim] = run["tokens_hash"] = "0"
    found = checks.compare_tokens(other, settings)
    assert found.wrong == 1
    assert f"{settings[0].system}, request {victim}" in found.text
    row = checks.exact_rows(other, "live", "x", settings)[0]
    assert row.ours == 1 and row.passed is False and found.text in row.note
    # Where float32 cannot tell the two tokens apart, it is a tie and nobody's fault.
    gap = checks.tie_gap(other, settings[1], victim, session.tokens(settings[1])[victim], tokens(settings[0])[victim])
    assert gap is None or gap > checks.TIES["cpu"]


def test_another_decision_is_found(session):
    setting = saturated(TINY)[-1]
    (run,) = session.run([setting])
    assert checks.same_decisions(run, session.predict(setting))
    assert not checks.same_decisions({**run, "steps": run["steps"] + 1}, session.predict(setting))
    assert not checks.same_decisions(run, predict(saturated(TINY)[1], UNTIMED))


# --- resuming -----------------------------------------------------------------------------------------------------


def test_a_second_session_reads_what_is_complete(root, session, monkeypatch):
    settings = saturated(TINY)[-2:]
    first = session.run(settings)
    again = TinySession(root)
    assert again.run(settings) == first
    assert "model" not in again.__dict__, "complete runs need no model"
    assert again.tokens(settings[1]) == session.tokens(settings[1])
    assert len(again) == 2 and again.workload_hashes() == {first[0]["workload_source"]: first[0]["workload_hash"]}
    # A run that was cut off has no summary, and is run again, alone.
    ran = []
    result = LiveResult({**first[1], "seconds": 1.0}, session.tokens(settings[1]), [])
    monkeypatch.setattr("experiments.live.serve.run_live", lambda setting, *rest: ran.append(setting) or result)
    cut = TinySession(root.parent / "cut")
    cut.model = None
    with cut._directory(settings[1]) as run:
        run.append_requests([{"request": 0, "tokens": [[1]]}])  # and then the machine went down
    assert cut.run(settings[1:])[0]["seconds"] == 1.0
    assert ran == settings[1:]


def test_numbers_of_two_machines_are_not_mixed(root, session):
    setting = saturated(TINY)[-1]
    session.run([setting])
    elsewhere = TinySession(root)
    elsewhere.__dict__["device"] = "cpu, 96 cores"
    assert not elsewhere._directory(setting).complete
    assert elsewhere._directory(setting).path != session._directory(setting).path


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    def fail(*arguments):
        raise ValueError("out of memory")

    monkeypatch.setattr("experiments.live.serve.run_live", fail)
    session = TinySession(tmp_path)
    with pytest.raises(RuntimeError, match=r"the run paged-tiny-sharegpt-12 failed: out of memory"):
        session.run(saturated(TINY)[-1:])
    assert not list(tmp_path.glob("paged-*"))


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_every_system_has_the_same_pool(name):
    size = SIZES[name]
    slots = {setting.system: build_live_memory(setting).num_pages for setting in saturated(size)}
    assert slots.pop("static") * size.max_model_len == LONGEST_SEQUENCES * size.max_model_len
    assert set(slots.values()) == {size.num_pages} and size.num_pages * 16 == LONGEST_SEQUENCES * size.max_model_len


def test_lengths_are_scaled_and_fit():
    setting = saturated(SIZES["desktop"])[-1]
    workload = build_live_workload(setting, None)
    full = build_live_workload(saturated(SIZES["accelerator"])[-1], None)
    total = workload.prompt_tokens + workload.output_tokens
    assert total.max() <= 512 and workload.output_tokens.min() >= 1
    assert workload.output_tokens.mean() == pytest.approx(full.output_tokens.mean() / 4, rel=0.25)
    assert "times 0.25" in workload.source
    ids = prompt_ids(setting, workload)
    assert [len(one) for one in ids] == workload.prompt_tokens.tolist()
    shared = LiveSetting("paged", SIZES["desktop"], "wmt16", 5, prefix_tokens=80)
    prompts = prompt_ids(shared, build_live_workload(shared, None))
    assert len({one[:80] for one in prompts}) == 1 and len({one[80:] for one in prompts}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "wmt16", "size": SIZES["tiny"]}, r"size 'tiny' has no scale for the data set 'wmt16'"),
        ({"requests": 0}, r"at least one request, got 0"),
        ({"rate": 0.0}, r"rate must be positive, or None for all at once, got 0"),
        ({"system": "orca_max", "prefix_caching": True}, r"only paged memory finds pages by content"),
    ],
)
def test_a_setting_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LiveSetting(**{"system": "paged", "size": TINY, "dataset": "sharegpt", "requests": 1, **change})


def test_a_checkpoint_brings_its_own_lengths():
    shape = SIZES["desktop"].shape
    size = checkpoint_size("mine", shape, 700, "abc", on_cpu=True)
    assert (size.max_model_len, size.weights, size.scale("sharegpt")) == (512, "abc", 0.25)
    assert checkpoint_size("mine", shape, 700, "abc", on_cpu=False).max_model_len == 688  # whole pages
    with pytest.raises(ValueError, match="needs sequences of 512 tokens, mine ends at 500"):
        checkpoint_size("mine", shape, 500, "abc", on_cpu=True)


def test_a_checkpoint_is_known_by_its_weights(tmp_path, repo_root):
    """The parity folder's Llama, with positions for the live lengths, through the same loader as everywhere."""
    from experiments.live.model import load_model, size_of_checkpoint

    source = repo_root / "tests" / "parity" / "llama"
    folder = tmp_path / "my model"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    weights = (source / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights)
    seen = []
    model = load_model(folder, lambda *event: seen.append(event))
    assert model.config.dtype == "float32" and seen[-1][0] == seen[-1][1] > 0
    assert model.facts()["weights"] > 0
    size = size_of_checkpoint(folder, model)
    assert size.name == "my_model" and size.shape.vocab_size == config["vocab_size"]
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert size_of_checkpoint(folder, model).weights != size.weights


# --- the clock ------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_constants_that_made_the_points():
    true = CostModel(floor_s=1e-3, weights_s=4e-3, token_s=5e-4, sequence_s=1e-4, kv_token_s=2e-7)
    points = [
        {"tokens": rows + prompt, "sequences": rows + bool(prompt), "context_tokens": rows * context + prompt}
        for rows in (1, 4, 8, 16, 32)
        for context in (10, 200)
        for prompt in (0, 64)
    ]
    for point in points:
        point["seconds"] = (
            true.floor_s
            + max(true.weights_s, true.token_s * point["tokens"])
            + true.sequence_s * point["sequences"]
            + true.kv_token_s * point["context_tokens"]
        )
    found = fit_cost(points)
    for field in dataclasses.fields(CostModel):
        assert getattr(found, field.name) == pytest.approx(getattr(true, field.name), rel=1e-6, abs=1e-12), field.name
    with pytest.raises(ValueError, match="needs four points, got 3"):
        fit_cost(points[:3])


def test_overlapping_plans_are_timed_from_end_to_end():
    def row(start, end, steps=8, decodes=4, prefills=0):
        return {"start_s": start, "end_s": end, "steps": steps, "decodes": decodes, "prefills": prefills,
                "prefill_tokens": 16 * prefills, "context_tokens": 100}  # fmt: skip

    rounds = [[row(0, 1, 1, 0, 4), row(0.5, 9), row(8, 17), row(16, 49)], [row(100, 110)]]
    prompt, decode = points_of(rounds)
    assert (prompt["prompts"], prompt["tokens"], prompt["seconds"], prompt["plans"]) == (4, 64, 1.0, 1)
    assert (decode["decodes"], decode["plans"], decode["context_tokens"]) == (4, 4, 114.0)
    assert decode["seconds"] == (1.0 + 1.25) / 2  # 8/8, 8/8, 32/8 and 10/8 seconds a step


def test_steps_of_known_content_are_timed(session):
    steps = serve_batch(TINY, session.model, Batch(3, 5, output=25, joins=1, joining_prompt=16))
    contents = [(row["decodes"], row["prefills"], row["prefill_tokens"]) for row in steps]
    assert contents[0] == (0, 3, 15)
    assert (3, 0, 0) in contents and (3, 1, 16) in contents
    assert sum(row["decodes"] * row["steps"] for row in steps) == 3 * 24
    assert all(point["seconds"] > 0 for point in points_of([steps]))


@pytest.mark.parametrize("name", ["desktop", "accelerator"])
def test_timed_batches_fit_the_pool(name):
    size = SIZES[name]
    todo = list(batches(size))
    assert {batch.rows for batch in todo} >= set(size.batches)
    for batch in todo:
        pages = batch.rows * math.ceil((batch.prompt + batch.output) / 16)
        assert pages <= size.num_pages and batch.prompt + batch.output <= size.max_model_len


# --- attention over pages ---------------------------------------------------------------------------------------------


def test_attention_is_timed_over_pages_and_over_a_contiguous_cache():
    name, paged, contiguous = measure_point(SMALL[0], ["xla"], rounds=3, seconds=0.0, seed=0)
    assert name == "xla" and len(paged) == len(contiguous) == 3 and min(paged + contiguous) > 0
    assert names_here() == ["xla"]  # on a CPU
    with pytest.raises(ValueError, match="names: must hold an implementation that can do figure_18a_8x64; got tpu"):
        measure_figure(["tpu"])


def test_attention_is_timed_once(session, monkeypatch):
    points = [{"batch": 8, "overhead": 0.25}]
    monkeypatch.setattr(attention, "measure_figure", lambda names: points)
    assert TinySession(session.root).attention == points
    monkeypatch.setattr(attention, "measure_figure", None)
    assert TinySession(session.root).attention == points


# --- chapters and the report ------------------------------------------------------------------------------------------


class PaperSession(TinySession):
    """Gives predictions for runs, so that chapters of many runs are made in no time."""

    size = dataclasses.replace(SIZES["desktop"], requests=24)
    attention = tuple(
        {"batch": point.batch, "context": point.context, "implementation": "xla", "paged_us": 15.0,
         "contiguous_us": 10.0, "overhead": 0.5, "overhead_in_the_paper": point.overhead}
        for point in paper.FIG18A
    )  # fmt: skip

    def run(self, settings):
        for setting in settings:
            self._summaries[setting] = self.predict(setting) | {
                "workload_source": setting.dataset, "workload_hash": "0", "requests": setting.requests,
                "output_tokens": 7, "prompt_tokens": 9, "num_pages": setting.size.num_pages, "page_size": 16,
                "warm_up_s": 1.0, "host_s": 0.1, "late_compiles": 0, "tokens_hash": "1", "prefix_hit_rate": 0.5,
            }  # fmt: skip
        return [self._summaries[setting] for setting in settings]


def context_of(session, tmp_path) -> Context:
    constants, points = calibrations.load()
    return Context(Runner(tmp_path / "runs", constants, processes=1), "live", None, constants, points, session)


def test_every_live_chapter_and_the_part_of_the_report(tmp_path):
    context = context_of(PaperSession(tmp_path / "live"), tmp_path)
    chapters = [module.chapter(context) for module in (study_live, fig02, fig12, fig13, fig14, fig15, fig16, fig18)]
    assert [one.id for one in chapters] == [name if name == "study_live" else f"live_{name}" for name in LIVE]
    rows = [row for one in chapters for row in one.rows]
    assert all(row.passed for row in rows if row.passed is not None)
    # What would have to be the paper's number at the paper's lengths is shown, what is exact anywhere is tested.
    assert {row.paper for row in rows if row.passed is not None} == {0.0, 7.0}
    for one in chapters:
        one.save(tmp_path / "chapters" / f"{one.id}.json")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.index('id="live-part"') < page.index('id="study-live"') < page.index('id="verdict"')
    assert [row.ours for row in chapters[-1].rows] == [0.5] * 6  # the six points of figure 18a
    speeds = {row.system: row.ours for row in chapters[0].rows if row.setting == "output tokens/s, measured"}
    assert set(speeds) == set(SYSTEMS)
    verdicts = next(table for table in chapters[0].tables if "verdict" in table.columns)
    assert [row[-1] for row in verdicts.rows][-1] == "holds"  # predictions predict themselves


def test_a_speed_below_the_expected_is_explained_or_refuted(tmp_path):
    session = PaperSession(tmp_path)
    settings = saturated(session.size)
    runs = dict(zip(SYSTEMS, session.run(settings), strict=True))

    def verdict(ratio, factor):
        fast = runs["orca_max"]["tokens_per_s"] * ratio
        return study_live.speed_verdict(
            session, settings, runs | {"paged": runs["paged"] | {"tokens_per_s": fast}}, "orca_max", factor
        )

    limit = runs["paged"]["tokens_per_s"] / runs["orca_max"]["tokens_per_s"]
    assert verdict(2.5, 2.0)[-1] == "holds"
    assert verdict(0.9 * limit, 0.95 * limit)[-1] == "refuted"  # the device could, the engine did not
    assert verdict(limit, 1.5 * limit)[-1] == "conditional"
    assert f"by the timed steps {limit:.2f}x" in verdict(limit, 1.5 * limit)[2]


def test_presets_and_models_are_checked(tmp_path):
    assert chosen([], "live") == list(LIVE)
    with pytest.raises(ValueError, match="known to the preset live"):
        chosen(["fig17"], "live")
    with pytest.raises(FileNotFoundError, match="or a path that exists, got '.*nowhere'"):
        reproduce("live", tmp_path, model=str(tmp_path / "nowhere"), console=Console(quiet=True))
    with pytest.raises(ValueError, match="the preset smoke runs no checkpoint"):
        reproduce("smoke", tmp_path, model=str(tmp_path))
    with pytest.raises(RuntimeError, match="the preset paper has no live runs"):
        _ = dataclasses.replace(context_of(None, tmp_path), preset="paper").live
