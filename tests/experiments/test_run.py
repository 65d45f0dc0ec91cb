"""The runner: what it skips, what survives a kill, what it writes; and the pieces that a setting is built from."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import experiments.run as run_module
from experiments.calibration import Calibration
from experiments.run import Runner, config_of, execute, expected_cost
from experiments.setting import (
    Setting,
    build_cost,
    build_memory,
    build_requests,
    build_workload_of,
    num_pages,
    scheduler_config,
)
from paxkv.config import MODELS
from paxkv.record import config_hash
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.static import StaticMemory

# Round numbers near the calibrated ones: a new calibration must not move these tests.
CALIBRATION = Calibration(
    bare_sequence_s=2e-4,
    serving_group_s=1e-4,
    page_read_s=2.5e-9,
    flops_per_s=2e14,
    swap_in_bytes_per_s=1.2e10,
    swap_out_bytes_per_s=1.3e10,
    swap_in_copy_s=3e-6,
    swap_out_copy_s=2e-6,
    floors_s={"opt-13b": 0.01, "opt-66b": 0.03, "opt-175b": 0.06},
    static_floors_s={"opt-13b": 0.005, "opt-66b": 0.01, "opt-175b": 0.02},
)


def alpaca(system="paged", rate=2.0, duration_s=30.0, **changes) -> Setting:
    """A run of a few milliseconds."""
    return Setting(system, "opt-13b", "alpaca", rate, duration_s, **changes)


SETTINGS = (
    alpaca(),
    alpaca("orca_max"),
    alpaca("orca_oracle", seed=3),
    alpaca("static", engine="static"),
    alpaca(num_seqs=3, rate=1.0),
    alpaca(num_seqs=2, beam=True, rate=1.0, duration_s=10.0),
    Setting("paged", "opt-13b", "wmt16", 2.0, 20.0, engine="bare", prefix_tokens=80),
    Setting("orca_pow2", "opt-13b", "sharegpt", 1.0, 20.0, windows=((0.0, 5.0), (5.0, 20.0))),
)
BROKEN = Setting("static", "llama-13b", "wmt16", 1.0, 5.0)  # FasterTransformer has no batch size for it


@pytest.fixture
def executed(monkeypatch) -> list[Setting]:
    """The settings that are really simulated, in this process, in order."""
    seen: list[Setting] = []

    def counted(setting, *arguments):
        seen.append(setting)
        return execute(setting, *arguments)

    monkeypatch.setattr(run_module, "execute", counted)
    return seen


def identities(root: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, time and size of every file below ``root``."""
    stats = {path: path.stat() for path in root.rglob("*") if path.is_file()}
    return {str(path.relative_to(root)): (s.st_ino, s.st_mtime_ns, s.st_size) for path, s in stats.items()}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- running, once ------------------------------------------------------------------------------------------------


def test_complete_runs_are_read_not_repeated(tmp_path, executed):
    first = Runner(tmp_path, CALIBRATION, processes=1).run(SETTINGS)
    assert sorted(map(str, executed)) == sorted(map(str, SETTINGS))
    before = identities(tmp_path)
    assert len(before) == 3 * len(SETTINGS)  # config, environment, summary
    executed.clear()
    again = Runner(tmp_path, CALIBRATION, processes=1).run(SETTINGS)
    assert executed == []
    assert again == first
    assert identities(tmp_path) == before


def test_an_incomplete_run_is_repeated_and_nothing_else(tmp_path, executed):
    first = Runner(tmp_path, CALIBRATION, processes=1).run(SETTINGS[:3])
    before = identities(tmp_path)
    lost = next(tmp_path.glob("orca_max-*")) / "summary.json"
    lost.unlink()
    executed.clear()
    assert Runner(tmp_path, CALIBRATION, processes=1).run(SETTINGS[:3]) == first
    assert executed == [SETTINGS[1]]
    changed = {name for name, identity in identities(tmp_path).items() if before[name] != identity}
    assert str(lost.relative_to(tmp_path)) in changed
    assert all(name.startswith("orca_max-") for name in changed)


def test_a_distinct_setting_runs_once(tmp_path, executed, monkeypatch):
    asked, run_one = [], run_module._run_one
    monkeypatch.setattr(run_module, "_run_one", lambda setting, *rest: asked.append(setting) or run_one(setting, *rest))
    runner = Runner(tmp_path, CALIBRATION, processes=1)
    a, b = alpaca(), alpaca(seed=1)
    summaries = runner.run([a, b, a, alpaca(), b])
    assert len(executed) == len(asked) == len(runner) == 2
    assert summaries[0] == summaries[2] == summaries[3] != summaries[1] == summaries[4]
    assert runner.run([b, a]) == [summaries[1], summaries[0]]
    assert len(asked) == 2
    assert runner.run([]) == []


def test_long_runs_start_first(tmp_path, executed):
    settings = [alpaca(duration_s=10.0), alpaca(duration_s=30.0), alpaca(duration_s=20.0)]
    Runner(tmp_path, CALIBRATION, processes=1).run(settings)
    assert executed == sorted(settings, key=expected_cost, reverse=True)
    assert [setting.duration_s for setting in executed] == [30.0, 20.0, 10.0]


def test_more_processes_give_the_same_summaries(tmp_path):
    alone = Runner(tmp_path / "one", CALIBRATION, processes=1).run(SETTINGS)
    with Runner(tmp_path / "two", CALIBRATION, processes=2) as runner:
        spread = runner.run(SETTINGS)
    assert spread == alone
    for name in {path.parent.name for path in (tmp_path / "one").rglob("summary.json")}:
        files = [(tmp_path / root / name / "summary.json").read_bytes() for root in ("one", "two")]
        assert files[0] == files[1]
    assert runner.workload_hashes() == {s["workload_source"]: s["workload_hash"] for s in alone}


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_tells_what_runs(tmp_path, processes):
    seen = []
    settings = [alpaca(seed=seed) for seed in range(3)]
    arguments = {"processes": processes, "progress": lambda *event: seen.append(event)}
    with Runner(tmp_path, CALIBRATION, **arguments) as runner:
        runner.run(settings)
    total = sum(map(expected_cost, settings))
    assert seen[0] == (0.0, total, settings[0].name)
    assert seen[-1][0] == pytest.approx(total)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failing_run_is_named(tmp_path, processes):
    with Runner(tmp_path, CALIBRATION, processes=processes) as runner:
        with pytest.raises(RuntimeError, match=r"the run Setting\(system='static', model='llama-13b'.* failed: "):
            runner.run([alpaca(), BROKEN])
        # The others can still be had, and the failed one left nothing that looks complete.
        assert runner.run([alpaca()])[0]["finished"] > 0
    assert not list(tmp_path.glob("static-*/summary.json"))


def test_a_missing_traces_folder_is_an_error(tmp_path):
    runner = Runner(tmp_path / "runs", CALIBRATION, str(tmp_path / "nowhere"), processes=1)
    with pytest.raises(RuntimeError, match="the run Setting.*nowhere"):
        runner.run([alpaca(rate=3.25)])


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_kill_9_loses_the_runs_in_flight_only(tmp_path, repo_root, executed):
    settings = [Setting("paged", "opt-13b", "sharegpt", 1.5, 900.0, seed=seed) for seed in range(8)]
    script = tmp_path / "batch.py"
    script.write_text(
        textwrap.dedent(f"""\
            from experiments.calibration import Calibration
            from experiments.run import Runner
            from experiments.setting import Setting

            if __name__ == "__main__":
                calibration = Calibration(**{CALIBRATION.to_dict()!r})
                settings = [Setting("paged", "opt-13b", "sharegpt", 1.5, 900.0, seed=seed) for seed in range(8)]
                with Runner({str(tmp_path / "runs")!r}, calibration, processes=2, record=True) as runner:
                    runner.run(settings)
            """)
    )
    batch = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        start_new_session=True,  # so that the workers can be killed with it, by its own process group
    )
    deadline = time.monotonic() + 60
    try:
        while len(list((tmp_path / "runs").glob("*/summary.json"))) < 2:
            assert batch.poll() is None, "the batch ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(batch.pid, signal.SIGKILL)
        batch.wait()
    done = {path.parent.name for path in (tmp_path / "runs").glob("*/summary.json")}
    assert 2 <= len(done) < len(settings), "the batch was not killed in its middle"
    before = identities(tmp_path / "runs")

    # Runs that are not complete are repeated, and no file of a complete one is touched.
    runner = Runner(tmp_path / "runs", CALIBRATION, processes=1, record=True)
    summaries = runner.run(settings)
    assert len(executed) == len(settings) - len(done)
    after = identities(tmp_path / "runs")
    kept = {name: identity for name, identity in before.items() if name.split("/")[0] in done}
    assert {name: after[name] for name in kept} == kept
    assert not [name for name in after if name.endswith(".tmp")], "rows of killed runs are left over"
    # What the killed batch wrote is what a run of its own gives.
    survivor = next(s for s in settings if s not in executed)
    assert summaries[settings.index(survivor)] == json.loads(json.dumps(execute(survivor, CALIBRATION)[0]))


# --- records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        Setting("paged", "opt-13b", "sharegpt", 2.5, 60.0),
        Setting("paged", "opt-13b", "alpaca", 8.0, 15.0, num_seqs=4, preemption="swap", pool_bytes=150 * 16 * 819_200),
        Setting("paged", "opt-13b", "sharegpt", 2.5, 30.0, max_model_len=256),  # refuses the long prompts
        Setting("static", "opt-13b", "alpaca", 1.0, 30.0, engine="static"),
        Setting("orca_oracle", "opt-13b", "alpaca", 2.0, 30.0, step_kind="chunked"),
    ],
    ids=["paged", "swap", "refused", "static", "oracle"],
)
def test_rows_agree_with_the_summary(tmp_path, setting):
    (summary,) = Runner(tmp_path, CALIBRATION, processes=1, record=True).run([setting])
    folder = next(tmp_path.iterdir())
    steps, requests = rows(folder / "steps.jsonl"), rows(folder / "requests.jsonl")

    assert sum(row["steps"] for row in steps) == summary["steps"]
    assert sum(row["steps"] * row["decodes"] for row in steps) == summary["decode_tokens"]
    assert [row["step"] for row in steps][:1] == [0]
    assert all(a["step"] + a["steps"] == b["step"] for a, b in zip(steps, steps[1:], strict=False))
    assert all(a["end_s"] <= b["start_s"] for a, b in zip(steps, steps[1:], strict=False))
    assert steps[-1]["end_s"] == summary["end_s"]
    preempted = [event for row in steps for event in row["preempted"]]
    assert len(preempted) == summary["preemptions"] == sum(row["preemptions"] for row in requests)
    finish = {request: row["end_s"] for row in steps for request in row["finished"]}

    assert [row["request"] for row in requests] == list(range(summary["requests"]))
    served = [row for row in requests if row["rejected"] is None]
    assert {row["request"]: row["finish_s"] for row in served} == finish
    assert (len(served), len(requests) - len(served)) == (summary["finished"], summary["rejected"])
    refused = [row for row in requests if row["rejected"] is not None]
    assert all((row["finish_s"], row["first_token_s"], row["output_tokens"]) == (None, None, 0) for row in refused)
    latencies = [(row["finish_s"] - row["arrival_s"]) / row["output_tokens"] for row in served]
    assert summary["normalised_latency_s"] == pytest.approx(sum(latencies) / len(served), rel=1e-12)
    rate = sum(row["output_tokens"] for row in served) * setting.num_seqs / summary["end_s"]
    assert summary["output_tokens_per_s"] == pytest.approx(rate, rel=1e-12)


def test_the_record_cases_are_what_they_say():
    """The cases above exercise preemption, swapping and refusal."""
    swapping = Setting(
        "paged", "opt-13b", "alpaca", 8.0, 15.0, num_seqs=4, preemption="swap", pool_bytes=150 * 16 * 819_200
    )
    refusing = Setting("paged", "opt-13b", "sharegpt", 2.5, 30.0, max_model_len=256)
    assert execute(swapping, CALIBRATION)[0]["swapped_out_pages"] > 0
    assert execute(Setting("paged", "opt-13b", "sharegpt", 2.5, 60.0), CALIBRATION)[0]["preemptions"] > 0
    assert execute(refusing, CALIBRATION)[0]["rejected"] > 0


def test_recording_changes_no_summary(tmp_path, executed):
    plain = Runner(tmp_path, CALIBRATION, processes=1).run([alpaca()])
    assert not list(tmp_path.glob("*/*.jsonl"))
    # A run without rows does not suffice when rows are asked for; one with rows does when they are not.
    assert Runner(tmp_path, CALIBRATION, processes=1, record=True).run([alpaca()]) == plain
    assert len(list(tmp_path.glob("*/*.jsonl"))) == 2
    assert Runner(tmp_path, CALIBRATION, processes=1).run([alpaca()]) == plain
    assert len(executed) == 2


# --- what names a run ---------------------------------------------------------------------------------------------

OTHER = {
    "system": "orca_max",
    "model": "opt-66b",
    "dataset": "sharegpt",
    "rate": 2.5,
    "duration_s": 31.0,
    "engine": "bare",
    "seed": 1,
    "num_seqs": 2,
    "beam": True,
    "page_size": 32,
    "preemption": "swap",
    "step_kind": "chunked",
    "max_model_len": 1024,
    "arrivals": "gamma",
    "burstiness": 2.0,
    "prefix_tokens": 80,
    "new_probability": 0.5,
    "windows": ((1.0, 2.0),),
    "utilization": 0.9,
    "pool_bytes": 1 << 34,
}


def test_every_field_of_the_setting_is_in_the_hash():
    assert set(OTHER) == {field.name for field in dataclasses.fields(Setting)}
    base = alpaca()
    hashes = {config_hash(config_of(base, CALIBRATION, None))}
    for name, value in OTHER.items():
        assert value != getattr(base, name)
        changes = {name: value} | ({"dataset": "chat"} if name == "new_probability" else {})
        hashes.add(config_hash(config_of(dataclasses.replace(base, **changes), CALIBRATION, None)))
    assert len(hashes) == 1 + len(OTHER)


def test_every_constant_is_in_the_hash():
    def hash_of(calibration):
        return config_hash(config_of(alpaca(), calibration, None))

    hashes = {hash_of(CALIBRATION)}
    count = 1
    for field in dataclasses.fields(Calibration):
        value = getattr(CALIBRATION, field.name)
        changed = [{**value, model: 0.5} for model in value] if isinstance(value, dict) else [value * (1 + 1e-15)]
        for new in changed:
            assert new != value
            hashes.add(hash_of(dataclasses.replace(CALIBRATION, **{field.name: new})))
            count += 1
    assert len(hashes) == count == 1 + 8 + 6


def test_real_traces_are_in_the_hash_their_folder_is_not():
    hashes = [config_hash(config_of(alpaca(), CALIBRATION, traces)) for traces in (None, "/a", "/b")]
    assert hashes[0] != hashes[1] == hashes[2]


def test_names_are_readable():
    assert alpaca().name == "paged-opt-13b-alpaca-2rps"
    assert alpaca("orca_max", num_seqs=4, rate=0.75).name == "orca_max-opt-13b-alpaca-0.75rps-n4"
    assert alpaca(num_seqs=6, beam=True, page_size=128).name == "paged-opt-13b-alpaca-2rps-beam6-page128"


def test_settings_are_validated():
    with pytest.raises(ValueError, match="unknown model 'gpt-2'; known: opt-13b"):
        Setting("paged", "gpt-2", "alpaca", 1.0, 10.0)
    with pytest.raises(ValueError, match="dataset must be sharegpt, alpaca, wmt16 or chat, got 'c4'"):
        Setting("paged", "opt-13b", "c4", 1.0, 10.0)
    for dataset, probability in (("chat", None), ("alpaca", 0.5)):
        with pytest.raises(ValueError, match="new_probability goes with the chat data set"):
            Setting("paged", "opt-13b", dataset, 1.0, 10.0, new_probability=probability)


# --- the pieces of a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "pages"), [("opt-13b", 983), ("opt-66b", 603), ("opt-175b", 3753), ("llama-13b", 966)]
)
def test_pools_are_computed(model, pages):
    """Table 1 of the paper: 15.7K, 9.7K and 60.1K slots; LLaMA-13B by the same formula."""
    setting = Setting("paged", model, "wmt16", 1.0, 10.0)
    assert num_pages(setting) == pages
    assert build_memory(setting).num_pages == pages


def test_a_pool_has_as_many_slots_in_pages_of_any_size():
    for page_size in (1, 8, 32, 128):
        slots = num_pages(alpaca(page_size=page_size)) * page_size
        assert abs(slots - 983 * 16) <= max(16, page_size)


def test_the_pool_follows_utilization_and_explicit_bytes():
    less, more = (num_pages(alpaca(utilization=share)) for share in (0.90, 0.95))
    assert less < more == 983
    page_bytes = 16 * MODELS["opt-13b"].kv_bytes_per_token
    assert more - less == pytest.approx(0.05 * 42_298_834_944 / page_bytes, abs=1)
    assert num_pages(alpaca(pool_bytes=int(10.99 * page_bytes))) == 10


def test_memories():
    paged = build_memory(alpaca())
    assert isinstance(paged, PagedMemory)
    assert paged.config.num_host_pages == 20 * 2**30 // (16 * 819_200)
    assert not paged.config.prefix_caching
    shared = build_memory(Setting("paged", "llama-13b", "wmt16", 1.0, 10.0, prefix_tokens=80))
    assert isinstance(shared, PagedMemory) and shared.config.prefix_caching
    four = build_memory(Setting("paged", "opt-66b", "alpaca", 1.0, 10.0))
    assert isinstance(four, PagedMemory)
    assert four.config.num_host_pages == 4 * 20 * 2**30 // int(16 * MODELS["opt-66b"].kv_bytes_per_token)
    for estimate in ("max", "pow2", "oracle"):
        reserved = build_memory(alpaca(f"orca_{estimate}"))
        assert isinstance(reserved, ReservedMemory) and (reserved.estimate, reserved.num_pages) == (estimate, 983)
    static = build_memory(Setting("static", "opt-175b", "sharegpt", 1.0, 10.0))
    assert isinstance(static, StaticMemory) and static.num_pages == 24


def test_limits():
    assert scheduler_config(alpaca()).max_num_seqs == 2048
    assert scheduler_config(alpaca("orca_max")).max_num_seqs == 256
    assert scheduler_config(alpaca("orca_max")).max_num_batched_tokens == 2560
    assert scheduler_config(alpaca("static")).max_num_batched_tokens > 80 * 2048


def test_the_cost_of_one_device():
    cost = build_cost(alpaca(), CALIBRATION)
    params = MODELS["opt-13b"].num_params
    assert cost.floor_s == 0.01
    assert cost.weights_s == pytest.approx(params * 2 / 1.555e12)
    assert cost.token_s == pytest.approx(2 * params / 2e14)
    assert (cost.sequence_s, cost.group_s, cost.exchange_token_s) == (2e-4, 1e-4, 0.0)
    assert cost.kv_token_s == pytest.approx(819_200 / 1.555e12)
    assert cost.page_read_s == pytest.approx(40 * 40 * 2.5e-9)  # layers, heads
    assert cost.page_copy_s == pytest.approx(2 * 16 * 819_200 / 1.555e12)  # read and written
    assert cost.swap_out_page_s == pytest.approx(80 * 2e-6)  # a call for K and for V of 40 layers
    assert cost.swap_in_page_s == pytest.approx(80 * 3e-6)
    assert cost.swap_out_link_s == pytest.approx(16 * 819_200 / 1.3e10)
    assert cost.swap_in_link_s == pytest.approx(16 * 819_200 / 1.2e10)


def test_tensor_parallelism_divides_what_the_devices_share():
    cost = build_cost(Setting("paged", "opt-66b", "alpaca", 1.0, 10.0), CALIBRATION)
    shape = MODELS["opt-66b"]
    assert cost.floor_s == 0.03
    assert cost.weights_s == pytest.approx(shape.num_params * 2 / (4 * 1.555e12))
    assert cost.token_s == pytest.approx(2 * shape.num_params / (4 * 2e14))
    assert cost.kv_token_s == pytest.approx(shape.kv_bytes_per_token / (4 * 1.555e12))
    assert cost.page_read_s == pytest.approx(64 * (72 // 4) * 2.5e-9)
    # Two sums a layer; in each a device sends 3/4 of a token's activations twice, over 300 GB/s.
    assert cost.exchange_token_s == pytest.approx(2 * 64 * 2 * 3 / 4 * 9216 * 2 / 300e9)
    # Each device copies its heads' part of a page over a link of its own, in as many copies as one device would.
    page = 16 * shape.kv_bytes_per_token
    assert (cost.swap_out_page_s, cost.swap_in_page_s) == (pytest.approx(128 * 2e-6), pytest.approx(128 * 3e-6))
    assert cost.swap_out_link_s == pytest.approx(page / 4 / 1.3e10)
    assert cost.swap_in_link_s == pytest.approx(page / 4 / 1.2e10)
    eight = build_cost(Setting("paged", "opt-175b", "alpaca", 1.0, 10.0), CALIBRATION)
    assert eight.weights_s == pytest.approx(MODELS["opt-175b"].num_params * 2 / (8 * 2.039e12))


def test_engines_differ_in_overheads_only():
    serving, bare, static = (build_cost(alpaca(engine=engine), CALIBRATION) for engine in ("serving", "bare", "static"))
    assert bare == dataclasses.replace(serving, group_s=0.0)
    assert static == dataclasses.replace(bare, floor_s=0.005, sequence_s=0.0)


def test_llama_runs_in_the_engine_of_opt_13b():
    assert build_cost(Setting("paged", "llama-13b", "wmt16", 1.0, 10.0), CALIBRATION).floor_s == 0.01


def test_requests_follow_the_workload():
    setting = alpaca(num_seqs=3, rate=4.0)
    workload = build_workload_of(setting, None)
    requests = build_requests(setting, workload)
    assert [r.request_id for r in requests] == list(range(len(workload)))
    assert [r.prompt_tokens for r in requests] == workload.prompt_tokens.tolist()
    assert [r.max_tokens for r in requests] == workload.output_tokens.tolist()
    assert [r.arrival_s for r in requests] == workload.arrival_s.tolist()
    assert {(r.num_seqs, r.beam, r.prompt_ids) for r in requests} == {(3, False, None)}


@pytest.mark.parametrize("prefix", [80, 341])
def test_requests_share_the_prefix_and_nothing_else(prefix):
    setting = Setting("paged", "llama-13b", "wmt16", 4.0, 30.0, prefix_tokens=prefix)
    requests = build_requests(setting, build_workload_of(setting, None))
    shared = {r.prompt_ids[:prefix] for r in requests}
    assert len(shared) == 1 and len(set(shared.pop())) == prefix
    own = [token for r in requests for token in r.prompt_ids[prefix:]]
    assert len(set(own)) == len(own), "two requests share a token behind the prefix"
    assert not set(own) & set(requests[0].prompt_ids[:prefix])
    assert all(len(r.prompt_ids) == r.prompt_tokens > prefix for r in requests)


def test_only_paging_is_given_ids():
    setting = Setting("orca_oracle", "llama-13b", "wmt16", 4.0, 30.0, prefix_tokens=80)
    requests = build_requests(setting, build_workload_of(setting, None))
    assert all(r.prompt_ids is None and r.prompt_tokens > 80 for r in requests)


def test_a_shared_prefix_is_found_by_all_but_the_first():
    setting = Setting("paged", "llama-13b", "wmt16", 1.0, 60.0, engine="bare", prefix_tokens=341)
    requests = build_requests(setting, build_workload_of(setting, None))
    summary, _ = execute(setting, CALIBRATION)
    found = 341 // 16 * 16
    expected = (len(requests) - 1) * found / sum(r.prompt_tokens for r in requests)
    assert summary["prefix_hit_rate"] == pytest.approx(expected)


def test_the_summary_is_json_and_its_shares_add_up():
    for setting in SETTINGS:
        summary, result = execute(setting, CALIBRATION)
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        assert (summary["requests"], summary["finished"]) == (len(result.arrival_s), len(result.arrival_s))
        assert len(summary["windows"]) == max(1, len(setting.windows))
        for window in summary["windows"]:
            assert sum(window["shares"].values()) == pytest.approx(100)
            assert window["utilisation"] == pytest.approx(100 - window["shares"]["free"])


def test_a_run_that_serves_nobody_has_a_summary(tmp_path):
    (summary,) = Runner(tmp_path, CALIBRATION, processes=1).run([alpaca(max_model_len=2)])
    assert (summary["finished"], summary["rejected"]) == (0, summary["requests"])
    assert summary["normalised_latency_s"] is None and summary["windows"][0]["shares"] == {}


# --- the benchmark ------------------------------------------------------------------------------------------------


def test_the_benchmark_prints_what_it_ran(repo_root):
    """At a rate at which nothing is preempted, so that the pages appended follow from the lengths."""
    command = [sys.executable, "-m", "scripts.bench_sim", "--rate=0.5", "--duration=120", "--repeats=2"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    workload = build_workload_of(Setting("paged", "opt-13b", "sharegpt", 0.5, 120.0), None)
    prompt, total = workload.prompt_tokens, workload.prompt_tokens + workload.output_tokens
    assert (figures["workload"], figures["workload_hash"]) == ("embedded", workload.content_hash)
    assert (figures["requests"], figures["rejected"], figures["preemptions"]) == (len(workload), 0, 0)
    assert figures["output_tokens"] == workload.output_tokens.sum()
    assert figures["page_appends"] == (-(-(total - 1) // 16) + -prompt // 16).sum()  # the last token is not stored
    assert 0 < figures["plans"] < figures["steps"]
    assert 0 < figures["seconds_min"] <= figures["seconds_median"]
    for name in ("requests", "output_tokens", "steps", "plans"):
        rate = figures[f"{name.removeprefix('output_')}_per_s"]
        assert rate == pytest.approx(figures[name] / figures["seconds_median"])
    assert figures["peak_rss_bytes"] > 1e7 and figures["repeats"] == 2


@pytest.mark.parametrize("flags", [("--model=gpt-2",), ("extra",), ("--repeats=0",), ("--traces=/nowhere",)])
def test_the_benchmark_refuses_what_it_cannot_run(repo_root, flags):
    command = [sys.executable, "-m", "scripts.bench_sim", "--rate=0.5", "--duration=20", *flags]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert flags[0].split("=")[-1] in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
