"""The studies beyond the paper: exact where counts are exact, and every chapter on runs of a few simulated seconds."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict

import numpy as np
import pytest

from experiments import calibration as calibrations
from experiments import (
    claim_judges,
    claims,
    fig12,
    fig14,
    fig16,
    fig17,
    fig18,
    knee,
    paper,
    study_chunked,
    study_health,
    study_page_size,
    study_prefix,
    study_seeds,
    study_utilization,
    text_claims,
)
from experiments.context import Context
from experiments.figure import Chapter
from experiments.finding import Finding, graded
from experiments.kept import kept
from experiments.prefix_replay import Prompt, chat_prompts, interleaved, replay, trace_prompts
from experiments.roofline import Roofline, Step
from experiments.run import execute
from experiments.setting import Setting, num_pages
from experiments.token_gaps import GapMeter, Trial, measure
from paxkv.config import OPT_13B
from paxkv.sched.plan import Chunk, StepOutcome, StepPlan, StepResult
from paxkv.sim.hardware import A100_40GB
from paxkv.sim.simulate import Window
from paxkv.workload import Conversations, read_mooncake

CALIBRATION, POINTS = calibrations.load()
VERDICTS = ("confirmed", "conditional", "refuted", "not judged")


class ShortRunner:
    """Runs every setting for at most `seconds`, its windows shrunk alike, in this process and on embedded lengths."""

    def __init__(self, root, seconds: float) -> None:
        self.root, self.seconds = str(root), seconds
        self.summaries: dict[Setting, dict] = {}

    def run(self, settings):
        return [self.summary(setting) for setting in settings]

    def summary(self, setting: Setting) -> dict:
        if setting not in self.summaries:
            share = min(1.0, self.seconds / setting.duration_s)
            windows = tuple((start * share, end * share) for start, end in setting.windows)
            short = dataclasses.replace(setting, duration_s=setting.duration_s * share, windows=windows)
            self.summaries[setting] = execute(short, CALIBRATION)[0]
        return self.summaries[setting]


class LinearRunner:
    """Latency grows in proportion to the rate and is 0.5 s/token at the knee of the setting's curve."""

    root = ""

    def __init__(self, knees) -> None:
        self.knees, self.ran = knees, []

    def run(self, settings):
        self.ran += settings
        return [{"normalised_latency_s": 0.5 * s.rate / self.knees(s)} for s in settings]


def context_of(runner, preset="smoke") -> Context:
    return Context(runner, preset, None, CALIBRATION, POINTS)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Context:
    """A smoke context of 40-second runs, shared by the tests of this module."""
    return context_of(ShortRunner(tmp_path_factory.mktemp("runs"), 40.0))


# --- the small parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "verdict"),
    [([True, True], "confirmed"), ([True, False], "conditional"), ([False], "refuted"), ([], "not judged")],
)
def test_graded(tests, verdict):
    assert graded(iter(tests)) == verdict


def test_a_finding_refuses_an_unknown_verdict():
    with pytest.raises(ValueError, match="maybe"):
        Finding(1, "maybe", "", "", "")  # type: ignore[arg-type]


def test_kept_computes_once_per_configuration(tmp_path):
    context, calls = context_of(ShortRunner(tmp_path, 1.0)), []

    def compute():
        calls.append(1)
        return {"value": len(calls)}

    assert kept(context, "thing", {"a": 1}, compute) == {"value": 1}
    assert kept(context, "thing", {"a": 1}, compute) == {"value": 1}
    assert kept(context, "thing", {"a": 2}, compute) == {"value": 2}
    real = dataclasses.replace(context, traces="somewhere")
    assert kept(real, "thing", {"a": 1}, compute) == {"value": 3}


# --- prefixes -----------------------------------------------------------------------------------------------------


def test_a_shared_system_prompt_is_stored_once_if_it_was_computed_before(short):
    after, together, without = (study_prefix.pair(short, case) for case in study_prefix.CASES)
    # 2,000 tokens are 125 pages of 16; 40 of their own are 2.5, so 3 pages each.
    assert (after.prefix_pages, after.pages) == (125, 125 + 2 * 3)
    assert after.computed_tokens == (2040, 40)
    assert (together.prefix_pages, together.pages) == (250, 256)
    assert together.computed_tokens == without.computed_tokens == (2040, 2040)
    assert without.pages == 256
    assert after.first_token_s[1] < 0.2 * without.first_token_s[1]


def test_the_tokens_behind_the_last_whole_page_are_computed_again(short):
    seen = study_prefix.pair(short, next(iter(study_prefix.CASES)), prefix=2008)
    assert seen.prefix_pages == 125
    assert seen.computed_tokens == (2048, 8 + 40)


def test_findings_of_the_pair(short):
    assert study_prefix.finding_stored_once(short).verdict == "conditional"
    assert study_prefix.finding_recomputing(short).verdict == "refuted"


def naive_hits(rows, capacity) -> int:
    """Found keys with an LRU of whole keys, touched last to first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        for key in row:
            if key not in cache:
                break
            hits += 1
        for key in reversed(row):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [12, 30, 1000])
def test_replay_agrees_with_a_naive_lru(capacity):
    draw = random.Random(3)
    chains = [tuple(range(100 * c, 100 * c + 10)) for c in range(8)]
    rows = [chains[draw.randrange(8)][: draw.randint(1, 10)] for _ in range(400)]
    rate = replay([Prompt(4 * len(row), row, row) for row in rows], 4, capacity)
    assert rate.found_pages == naive_hits(rows, capacity)
    assert rate.pages == sum(map(len, rows))
    assert rate.by_token == rate.by_page  # every prompt is whole pages here


def test_replay_of_mooncakes_traces(shared_data):
    for name, expected in study_prefix.MOONCAKE.items():
        workload = read_mooncake(shared_data / "traces" / f"{name}.jsonl.gz")
        prompts = trace_prompts(workload)
        for size in (None, 10_000):
            wanted = expected[study_prefix.MOONCAKE_BLOCKS.index(size)]
            assert round(replay(prompts, workload.hash_block, size).by_page, 4) == wanted


def test_a_request_larger_than_the_cache_does_not_fail():
    rate = replay([Prompt(40, range(10), range(10))] * 2, 4, capacity=3)
    assert rate.found_pages == 3  # what the first one could leave


def test_interleaved_serves_every_round_once_and_in_order():
    rounds = np.array([3, 1, 4, 2, 2])
    order = list(interleaved(rounds, 2, seed=5))
    assert sorted(order) == [(c, r) for c, count in enumerate(rounds) for r in range(count)]
    for conversation in range(5):
        mine = [r for c, r in order if c == conversation]
        assert mine == sorted(mine)
    assert order != sorted(order)
    # Never more than two conversations begun and not ended.
    for at in range(len(order)):
        begun = {c for c, _ in order[: at + 1]}
        ended = {c for c in begun if (c, rounds[c] - 1) in order[: at + 1]}
        assert len(begun - ended) <= 2


def talk() -> Conversations:
    """One conversation of three rounds; before them 0, 12, 20 tokens."""
    return Conversations("toy", np.array([8, 4, 6]), np.array([4, 4, 4]), np.array([0, 3]), "made up")


def test_chat_prompts_keep_their_history():
    order = [(0, 0), (0, 1), (0, 2)]
    prompts = list(chat_prompts(talk(), order, 4, context_tokens=100, history="kept"))
    assert [p.tokens for p in prompts] == [8, 16, 26]
    # A prompt's last token is computed again, a reply's last token is not stored.
    assert [len(p.wanted) for p in prompts] == [1, 3, 6]
    assert [len(p.stored) for p in prompts] == [2, 4, 7]
    assert len({p.wanted[0] for p in prompts}) == 1
    rate = replay(prompts, 4)
    assert (rate.found_pages, rate.found_tokens, rate.tokens) == (0 + 2 + 4, 24, 50)
    limited = list(chat_prompts(talk(), order, 4, context_tokens=20, history="kept"))
    assert [p.tokens for p in limited] == [8, 16]


def test_a_history_cut_at_its_head_is_not_found():
    order = [(0, 0), (0, 1), (0, 2)]
    prompts = list(chat_prompts(talk(), order, 4, context_tokens=12, history="cut"))
    assert [p.tokens for p in prompts] == [8, 12, 12]
    assert replay(prompts, 4).found_pages == 0
    heads = [p.stored[0] for p in prompts]
    assert len(set(heads)) == 3


# --- gaps between tokens, rooflines -------------------------------------------------------------------------------


def plan(decodes=(), prefills=()) -> StepPlan:
    return StepPlan(0, tuple(prefills), tuple(decodes), (), (), (), (), (), None, 8, True, 1, 0, 0, (), ())


def test_gap_meter_counts_every_gap_once():
    meter = GapMeter(Window(0.0, 100.0))
    nothing = StepOutcome((), ())
    meter(0.0, 1.0, plan(prefills=[Chunk(7, 0, 5, True)]), StepResult(), nothing)  # first token: no gap
    meter(1.0, 5.0, plan(decodes=[7]), StepResult(4), nothing)  # four gaps of 1
    meter(5.0, 8.0, plan(prefills=[Chunk(9, 0, 5, True)]), StepResult(), nothing)  # 7 waits
    meter(8.0, 9.0, plan(decodes=[7, 9]), StepResult(), nothing)  # 7: 4, 9: 1
    meter(200.0, 201.0, plan(decodes=[7]), StepResult(), nothing)  # behind the window
    assert meter.tokens == 1 + 4 + 1 + 2
    assert sorted(zip(meter._gaps, meter._counts, strict=True)) == [(1.0, 1), (1.0, 4), (4.0, 1)]
    assert meter.percentiles() == {"p50": 1.0, "p99": 4.0, "p999": 4.0}


def test_whole_prefills_stutter_and_chunks_do_not():
    window = ((10.0, 60.0),)
    setting = Setting("paged", "opt-13b", "sharegpt", 1.5, 60.0, windows=window)
    rules = ("fixed(1024)", "fixed(64)")
    found = {
        kind: measure(Trial(dataclasses.replace(setting, step_kind=kind), budget, rules), CALIBRATION, None)
        for kind, budget in (("prompts_only", 2560), ("chunked", 128))
    }
    # A whole prompt takes as long as its tokens; no chunk of 128 takes longer than reading the weights by much.
    prefill_s = 2 * OPT_13B.num_params * 1024 / CALIBRATION.flops_per_s
    assert found["prompts_only"]["gaps_s"]["p999"] > prefill_s
    assert found["chunked"]["gaps_s"]["p999"] < 0.5 * prefill_s
    assert found["chunked"]["tokens_per_s"] == pytest.approx(found["prompts_only"]["tokens_per_s"], rel=0.1)


def test_roofline_by_hand():
    line = Roofline(weights_s=10.0, token_s=0.1, kv_token_s=0.01)
    assert line.ridge_tokens == pytest.approx(100)
    assert line.compute_over_memory(Step(200)) == pytest.approx(2.0)
    assert line.compute_over_memory(Step(0, 50, 20)) == pytest.approx(5.0 / 20.0)
    assert line.largest_ratio(20) == pytest.approx(0.5)
    # With 2-byte weights the ridge is operations per byte.
    ridge = Roofline.of(OPT_13B, A100_40GB).ridge_tokens
    assert ridge == pytest.approx(A100_40GB.flops_per_s / A100_40GB.memory_bytes_per_s)


def test_finding_of_the_roofline(short):
    finding = study_chunked.finding_bounds(short)
    assert finding.verdict == "conditional"
    assert "in 21 of 21 cases" in finding.ours  # a full step of prompts, everywhere


# --- page size ----------------------------------------------------------------------------------------------------


def test_page_size_runs_are_those_of_figure_18():
    for name, dataset in (("ShareGPT", "sharegpt"), ("Alpaca", "alpaca")):
        shared = [study_page_size.setting_at(dataset, page) for page in paper.BLOCK_SIZES]
        assert shared == fig18.block_settings(name)


def run_of(page_size: int, latency: float, internal=0.0, free=0.0) -> dict:
    live = 100.0 - internal - free
    shares = {"live": live, "shared": 0.0, "reserved": 0.0, "internal": internal, "external": 0.0, "free": free}
    return {"page_size": page_size, "normalised_latency_s": latency, "windows": [{"shares": shares}]}


def test_recommended_page_is_the_smallest_near_the_best():
    runs = [run_of(8, 0.2), run_of(16, 0.109), run_of(32, 0.1), run_of(64, 0.105)]
    assert study_page_size.recommend_page(runs) == 16
    assert study_page_size.recommend_page([run_of(8, 0.2), run_of(16, 0.111), run_of(32, 0.1)]) == 32


def test_empty_share_is_of_what_is_allocated():
    assert study_page_size.empty_share(run_of(16, 0.1, internal=5.0, free=50.0)) == pytest.approx(10.0)


@pytest.mark.parametrize("max_len", [512, 1024])
def test_unserved_requests_are_those_that_the_run_refuses(short, max_len):
    setting = dataclasses.replace(study_page_size.setting_at("sharegpt", 16, max_len), duration_s=40.0)
    count = study_page_size.unserved(short, setting)
    summary, result = execute(setting, CALIBRATION)
    assert count.refused == summary["rejected"] > 0
    assert count.requests == summary["requests"]
    full, _ = execute(dataclasses.replace(setting, max_model_len=2048), CALIBRATION)
    assert full["rejected"] == 0
    assert 0 < count.cut < count.requests
    assert result.output_tokens.max() < max_len


def test_recommended_length_follows_the_rule(short, monkeypatch):
    shares = {512: 30, 1024: 1, 2048: 0}
    monkeypatch.setattr(
        study_page_size, "unserved", lambda _, s: study_page_size.Unserved(0, shares[s.max_model_len], 1000)
    )
    assert study_page_size.recommend_length(short, "sharegpt")[0] == 1024
    shares[1024] = 2
    assert study_page_size.recommend_length(short, "sharegpt")[0] == 2048


# --- seeds --------------------------------------------------------------------------------------------------------


def test_knees_by_seed_are_exact_on_straight_curves():
    truth = {("paged", 0): 1.93, ("paged", 1): 1.55, ("orca_oracle", 0): 1.0, ("orca_oracle", 1): 1.37}
    runner = LinearRunner(lambda s: truth[s.system, s.seed])
    found = study_seeds.knees(context_of(runner))
    assert found["a", "paged"] == pytest.approx([1.93, 1.55])
    assert found["a", "orca_oracle"] == pytest.approx([1.0, 1.37])  # walks beyond figure 12's last rate
    other = {s.rate for s in runner.ran if s.seed == 1 and s.system == "paged"}
    assert other == {1.5, 1.75, 1.8, 1.9, 2.0}  # from the knee of seed 0 down to the other one, and no further
    rows = study_seeds.chapter(context_of(runner)).tables[0].rows
    assert len(rows) == 3
    assert rows[-1][2:4] == pytest.approx((1.93 / 1.0, 1.55 / 1.37))
    assert rows[-1][4] is None  # smoke has two seeds


def test_a_knee_out_of_reach_has_no_spread():
    runner = LinearRunner(lambda s: 1e6 if s.seed == 1 else 1.6)
    found = study_seeds.knees(context_of(runner))
    assert found["a", "paged"] == [pytest.approx(1.6), None]
    # Nor one below the first rate: 1.0 req/s is above the level already.
    below = LinearRunner(lambda s: 0.9 if s.seed == 1 else 1.6)
    assert study_seeds.knees(context_of(below))["a", "paged"] == [pytest.approx(1.6), None]
    assert study_seeds.spread([1.0, None]) == (None, None, None)
    assert study_seeds.spread([1.0, 1.5]) == pytest.approx((1.0, 1.5, 40.0))


# --- utilisation and health ---------------------------------------------------------------------------------------


def test_a_smaller_share_has_a_smaller_pool_and_loses_nobody(short):
    table = study_utilization.chapter(short).tables[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert len(rows) == 2 * 2 * 3  # loads, rates and shares
    pages = [row["pages"] for row in rows[:3]]
    assert pages == sorted(pages) and pages[0] < 0.6 * pages[-1]
    assert [row["pages"] for row in rows] == pages * 4
    assert {row["lost"] for row in rows} == {0}


def utilization_finding(monkeypatch, latency, waits, lost):
    """Claim 9 on made-up runs: latency and waits by share; `lost` requests at 0.95 under bursts."""

    def run(setting):
        u = setting.utilization
        gone = lost if setting.arrivals == "gamma" and u == 0.95 else 0
        return {"normalised_latency_s": latency[u], "ttft_s": {"p99": waits[u]}, "preemption_rate": 0.0,
                "requests": 10, "finished": 10 - gone, "rejected": 0}  # fmt: skip

    class Runner:
        def run(self, settings):
            return [run(s) for s in settings]

    return study_utilization.finding(context_of(Runner())).verdict


def test_claim_9_follows_from_the_runs(monkeypatch):
    falling, rising = {0.80: 3.0, 0.90: 2.0, 0.95: 1.0}, {0.80: 1.0, 0.90: 2.0, 0.95: 3.0}
    assert utilization_finding(monkeypatch, falling, falling, 0) == "conditional"
    assert utilization_finding(monkeypatch, falling, falling, 2) == "confirmed"
    assert utilization_finding(monkeypatch, falling, rising, 0) == "confirmed"
    assert utilization_finding(monkeypatch, rising, falling, 0) == "refuted"


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([(85, 0.0, 0.1), (50, 0.5, 0.1)], "confirmed"),  # outside the band nothing counts
        ([(85, 0.0, 0.1), (81, 0.3, 0.1)], "conditional"),
        ([(85, 0.0, 0.9)], "refuted"),  # calm, but slow
        ([(95, 0.0, 0.1)], "not judged"),
    ],
)
def test_claim_23_follows_from_the_runs(short, monkeypatch, runs, verdict):
    setting = Setting("paged", "opt-13b", "sharegpt", 1.0, 1.0)
    made_up = [study_health.Health("made up", setting, None, *run) for run in runs]
    monkeypatch.setattr(study_health, "healths", lambda context: made_up)
    assert study_health.finding(short).verdict == verdict


# --- the paper's text ---------------------------------------------------------------------------------------------


def paper_knees():
    """The paper's rate at 0.5 s/token for every run of figures 12, 14, 16 and 17."""

    def kind(s: Setting):
        return s.system, s.model, s.dataset, s.num_seqs, s.beam, s.prefix_tokens

    known = {}
    for figure, curves in (
        (paper.FIG12, lambda p, s: fig12.panel_settings(p, s)),
        (paper.FIG14, lambda p, s: fig14.panel_settings(p, s)),
        (paper.FIG16, lambda p, s: fig16.panel_settings(p, s)),
        (paper.FIG17, lambda p, s: fig17.settings_of(s)),
    ):
        for panel in figure.panels:
            for curve in panel.curves:
                known[kind(curves(panel.key, curve.system)[0])] = curve.crossings[knee.LEVEL_S]
    return lambda s: known[kind(s)]


def test_every_text_claim_has_a_judge():
    assert set(text_claims.JUDGES) == {claim.id for claim in paper.TEXT_CLAIMS}


def test_text_claims_on_curves_with_the_papers_own_knees():
    chapter = text_claims.chapter(context_of(LinearRunner(paper_knees()), "paper"))
    rows = {claim.id: row for claim, row in zip(paper.TEXT_CLAIMS, chapter.tables[0].rows, strict=True)}
    ours, verdict = ({name: row[at] for name, row in rows.items()} for at in (-2, -1))
    assert ours["sharegpt_over_oracle"].startswith("1.76 (13B), 2.33 (66B), 1.47 (175B) at 0.5 s/token")
    assert verdict["sharegpt_over_oracle"] == "conditional"  # 175B falls short
    assert verdict["alpaca_sharing_over_oracle"] == verdict["shared_prefix"] == "holds"
    assert ours["shared_prefix"] == "1.69 and 3.54 at 0.5 s/token"
    assert verdict["chatbot"] == "refuted"
    assert verdict["over_fastertransformer"] == "refuted"  # 20.7 (175B), and these curves give it at every level
    assert verdict["headline"] == "holds"
    assert verdict["recompute_overhead"] == "conditional"
    assert verdict["kernel_overhead"] == "not judged"


def test_text_claims_on_curves_that_never_cross():
    rows = text_claims.chapter(context_of(LinearRunner(lambda s: 1e6), "paper")).tables[0].rows
    verdict = {claim.id: row[-1] for claim, row in zip(paper.TEXT_CLAIMS, rows, strict=True)}
    assert {verdict.pop("kernel_overhead"), verdict.pop("recompute_overhead")} == {"not judged", "conditional"}
    assert set(verdict.values()) == {"not judged"}


def test_smoke_judges_no_text_claim_that_needs_other_panels():
    chapter = text_claims.chapter(context_of(LinearRunner(paper_knees())))
    verdicts = [row[-1] for row in chapter.tables[0].rows]
    assert verdicts.count(text_claims.LATER) == 7
    assert len(verdicts) == len(paper.TEXT_CLAIMS)


# --- the list of claims -------------------------------------------------------------------------------------------


def test_every_claim_is_judged_or_waits_for_something():
    numbers = [claim.number for claim in claims.CLAIMS]
    assert numbers == list(range(1, 26))
    assert set(claim_judges.JUDGES) & set(claim_judges.WAITING) == set()
    assert set(claim_judges.JUDGES) | set(claim_judges.WAITING) == set(numbers)


def test_claims_that_are_arithmetic(short):
    verdicts = {number: claim_judges.JUDGES[number](short).verdict for number in (5, 6, 7)}
    assert verdicts == {5: "conditional", 6: "conditional", 7: "conditional"}
    assert "52.4 GB" in claim_judges.llama_70b(short).ours
    assert "83.9 GB" in claim_judges.llama_70b(short).ours


def test_a_local_card_serves_more_users_than_fit():
    result, pages = claim_judges.serve_local_card(8)
    longest = -(-(claim_judges.LOCAL_PROMPT + claim_judges.LOCAL_ANSWER) // 16)
    assert pages < 8 * longest  # they do not fit together
    assert not np.isnan(result.finish_s).any()
    assert not result.rejected


def test_claim_3_follows_from_the_runs(short, monkeypatch):
    batch = {"paged": 40.0, "orca_max": 10.0, "orca_pow2": 10.0, "orca_oracle": 10.0}
    monkeypatch.setattr(claim_judges.fig13, "mean_groups", lambda context, setting: batch[setting.system])
    assert claim_judges.larger_batch(short).verdict == "confirmed"
    batch["orca_oracle"] = 20.0
    assert claim_judges.larger_batch(short).verdict == "conditional"


# --- every chapter, on short runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shortened():
    """The measured studies cut to a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_chunked, "SECONDS", 60.0)
        patch.setattr(study_chunked, "WARM_UP", 10.0)
        patch.setattr(study_prefix, "CONVERSATIONS", {"smoke": 40})
        patch.setattr(study_prefix, "OPEN", {"smoke": (8,)})
        yield


@pytest.mark.parametrize(
    ("module", "tables"),
    [
        (study_page_size, {"Recommendation": 1, "Page size": 9, "Maximum length": 6}),
        (study_utilization, {"memory_utilization": 12}),
        (study_health, {"Health": 1 + 8 + 7}),
        (study_seeds, {"Rate at 0.5": 3}),
        (study_prefix, {"Two requests": 4, "Chat": 3, "Mooncake": 4}),
        (study_chunked, {"Gaps": 10, "Time to compute": 21}),
        (text_claims, {"What the text": 9}),
        (claims, {"Claims": 25}),
    ],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2] or None,
)
def test_chapter_of_short_runs(short, shortened, module, tables):
    assert all(isinstance(setting, Setting) for setting in module.settings("paper"))
    chapter = module.chapter(short)
    assert chapter.id == module.__name__.rpartition(".")[2]
    assert len({table.title for table in chapter.tables}) == len(chapter.tables)
    for start, rows in tables.items():
        table = next(t for t in chapter.tables if t.title.startswith(start))
        assert len(table.rows) == rows, table.title
    assert not chapter.rows  # nothing here is tested against the paper
    assert chapter.title or chapter.figure
    assert Chapter.from_dict(chapter.to_dict()) == chapter


def test_verdicts_of_short_runs_are_verdicts(short, shortened):
    rows = claims.chapter(short).tables[0].rows
    assert {row[3] for row in rows} <= set(VERDICTS)
    judged = {row[0] for row in rows if row[3] != "not judged"}
    assert judged <= set(claim_judges.JUDGES)
    assert {5, 6, 7, 8, 10, 11, 12, 13, 14, 25} <= judged
    pool = num_pages(study_prefix.CARD)
    assert any(f"{pool:,} pages" in t.columns[2] for t in study_prefix.chapter(short).tables)
