"""The data sets of the figures: the paper's own numbers, on the real traces and on the embedded statistics.

A test named ``*_real`` needs the traces; its twin on embedded data never skips.
"""

from __future__ import annotations

import gzip
import importlib.resources
import json

import numpy as np
import pytest

from paxkv.workload import (
    Lengths,
    WorkloadError,
    chat_workload,
    embedded_conversations,
    embedded_lengths,
    load_conversations,
    load_lengths,
    real_conversations,
    real_lengths,
    summary,
)
from paxkv.workload import embedded as embedded_module
from paxkv.workload.summary import ks_distance, rank_correlation

NAMES = ("sharegpt", "alpaca", "wmt16", "sharegpt_turns")
ROWS = {"sharegpt": 79_725, "alpaca": 52_002, "wmt16": 2_994, "sharegpt_turns": 33_549}
# Figure 11's legend: mean prompt and output.
FIGURE_11 = {"sharegpt": ("161.31", "337.99"), "alpaca": ("19.31", "58.45")}
# p10, p50, p90, p99 of prompts and outputs, and both means, of the real traces with the default filter.
TRACE_FACTS = {
    "sharegpt": ((9, 35, 506, 1460), (45, 271, 754, 1280), 161.18, 338.00, 0.214),
    "alpaca": ((10, 16, 30, 74), (7, 43, 125, 268), 19.31, 58.45, -0.225),
    "wmt16": ((11, 25, 48, 72), (15, 32, 63, 95), 27.60, 36.00, 0.951),
    "sharegpt_turns": ((16, 557, 1024, 1024), (41, 257, 610, 1016), 556.57, 296.82, 0.146),
}
# Figure 12's data set as the paper's figure 11 draws it: Alpaca's histograms, bins of 3.921875 tokens from 6 and of
# 11.4765625 tokens from 1.
ALPACA_PROMPTS = [
    *(2883, 14295, 13722, 7974, 4754, 2703, 1641, 1057, 667, 479, 337, 271, 130, 176, 149, 125, 90, 72, 68, 65, 44),
    *(41, 36, 35, 29, 12, 21, 20, 11, 16, 8, 10, 7, 7, 9, 5, 1, 1, 2, 3, 2, 1, 2),
]
ALPACA_OUTPUTS = [
    *(11390, 8196, 4453, 3100, 3441, 3351, 3696, 3005, 2795, 1972, 1679, 1074, 823, 537, 478, 287, 255, 190, 209, 156),
    *(150, 109, 102, 87, 60, 61, 37, 56, 26, 25, 17, 23, 21, 20, 14, 11, 10, 13, 6, 4, 2, 5, 3, 6, 6, 4, 2, 6, 4, 5),
    *(1, 2, 3),
]


@pytest.fixture(scope="session")
def traces(shared_data):
    return shared_data / "traces"


def check_figure_11(load) -> None:
    for name, (prompt, output) in FIGURE_11.items():
        lengths = load(name, max_total_tokens=2048)
        assert f"{lengths.prompt.mean():.2f}" == prompt
        assert f"{lengths.output.mean():.2f}" == output


def test_figure_11_real(traces):
    check_figure_11(lambda name, **options: real_lengths(name, traces, **options))


def test_figure_11_embedded():
    check_figure_11(embedded_lengths)


def check_alpaca_histograms(lengths: Lengths) -> None:
    def histogram(values, first, width, bins):
        return np.histogram(values, first + width * np.arange(bins + 1))[0].tolist()

    assert histogram(lengths.prompt, 6, 3.921875, len(ALPACA_PROMPTS)) == ALPACA_PROMPTS
    assert histogram(lengths.output, 1, 11.4765625, len(ALPACA_OUTPUTS)) == ALPACA_OUTPUTS


def test_alpaca_is_the_figure_bin_by_bin_real(traces):
    check_alpaca_histograms(real_lengths("alpaca", traces))


def test_alpaca_is_the_figure_bin_by_bin_embedded():
    check_alpaca_histograms(embedded_lengths("alpaca"))


def check_facts(name: str, lengths: Lengths, tolerance: float) -> None:
    prompts, outputs, prompt_mean, output_mean, correlation = TRACE_FACTS[name]
    assert len(lengths) == ROWS[name]
    assert lengths.name == name
    for values, facts in ((lengths.prompt, prompts), (lengths.output, outputs)):
        # The share of pairs below each fact, not the value: that is what a KS distance bounds.
        for fact, share in zip(facts, (0.1, 0.5, 0.9, 0.99), strict=True):
            below, within = np.mean(values < fact), np.mean(values <= fact)
            assert below - tolerance <= share <= within + tolerance
    assert lengths.prompt.mean() == pytest.approx(prompt_mean, rel=tolerance / 2, abs=0.005)
    assert lengths.output.mean() == pytest.approx(output_mean, rel=tolerance / 2, abs=0.005)
    assert rank_correlation(lengths.prompt, lengths.output) == pytest.approx(correlation, abs=0.001 + 1.5 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_facts_real(name, traces):
    check_facts(name, real_lengths(name, traces), tolerance=0.0005)


@pytest.mark.parametrize("name", NAMES)
def test_facts_embedded(name):
    check_facts(name, embedded_lengths(name), tolerance=0.02)


def test_sharegpt_keeps_how_prompts_and_outputs_go_together():
    """Mean output by band of prompts: facts of the trace that a product of marginals would miss."""
    lengths = embedded_lengths("sharegpt")
    facts = {(1, 15): (232, 0.255), (16, 63): (354, 0.374), (64, 255): (404, 0.197), (256, 1023): (410, 0.138)}
    for (least, most), (output, share) in (facts | {(1024, 2048): (284, 0.036)}).items():
        band = (lengths.prompt >= least) & (lengths.prompt <= most)
        assert lengths.output[band].mean() == pytest.approx(output, rel=0.02)
        assert band.mean() == pytest.approx(share, abs=0.001)
    total = lengths.prompt + lengths.output
    assert total.max() == 2047
    for share, value in zip((5, 10, 25, 50, 75, 90, 95, 99), (50, 91, 201, 369, 679, 1118, 1423, 1873), strict=True):
        assert np.percentile(total, share) == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_embedded_is_near_real(name, traces):
    real, ours = real_lengths(name, traces), embedded_lengths(name)
    found = summary.compare(real, ours)
    assert len(real) == len(ours)
    assert max(found["ks_prompt"], found["ks_output"], found["ks_sum"]) <= 0.01
    assert found["rank_first"] == pytest.approx(found["rank_second"], abs=0.02)
    assert found["prompt_mean_first"] == pytest.approx(found["prompt_mean_second"], rel=0.005)
    assert found["output_mean_first"] == pytest.approx(found["output_mean_second"], rel=0.005)


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 1.0])
def test_embedded_chat_is_near_real(probability, traces):
    """Chat workloads of about all conversations, so that sampling noise stays below the tolerance."""
    rate = 0.95 * 9_269 / max(probability, 0.28) / 3600
    real, ours = (
        chat_workload(load_conversations(folder), rate, 3600, new_probability=probability) for folder in (traces, None)
    )
    assert ks_distance(real.prompt_tokens, ours.prompt_tokens) <= 0.02
    assert ks_distance(real.output_tokens, ours.output_tokens) <= 0.02
    assert real.prompt_tokens.mean() == pytest.approx(ours.prompt_tokens.mean(), rel=0.02)
    assert real.output_tokens.mean() == pytest.approx(ours.output_tokens.mean(), rel=0.02)


def check_conversations(conversations, tolerance: float) -> None:
    assert len(conversations) == 9_269
    assert conversations.rounds.sum() == 33_549
    assert (np.median(conversations.rounds), conversations.rounds.max()) == (3, 63)
    requests = conversations.as_requests(max_output_tokens=1024)
    assert requests.prompt.mean() == pytest.approx(556.57, rel=tolerance, abs=0.005)
    assert requests.output.mean() == pytest.approx(296.95, rel=tolerance, abs=0.005)
    assert np.mean(requests.prompt == 1024) == pytest.approx(0.3203, abs=0.0001 + tolerance)


def test_conversations_real(traces):
    check_conversations(real_conversations(traces), tolerance=0)


def test_conversations_embedded():
    check_conversations(embedded_conversations(), tolerance=0.01)


def test_rebuilding_inverts_describing():
    """On seeded pairs: marginals exactly, the joint table exactly where no pair is at the edge."""
    rng = np.random.RandomState(5)
    prompt = rng.geometric(0.02, 5000)
    output = np.minimum(prompt // 2 + rng.geometric(0.03, 5000), 400)
    described = json.loads(json.dumps(summary.describe_pairs(Lengths("d", prompt, output, "test"))))
    rebuilt = embedded_module.expand_pairs("d", described)
    np.testing.assert_array_equal(np.sort(rebuilt.prompt), np.sort(prompt))
    np.testing.assert_array_equal(np.sort(rebuilt.output), np.sort(output))
    assert rank_correlation(rebuilt.prompt, rebuilt.output) == pytest.approx(rank_correlation(prompt, output), abs=0.01)
    assert ks_distance(rebuilt.prompt + rebuilt.output, prompt + output) <= 0.01


def test_the_edge_is_kept_apart():
    prompt = np.array([10, 20, 30, 90, 50] * 20)
    output = np.array([50, 60, 10, 10, 40] * 20)
    described = summary.describe_pairs(Lengths("d", prompt, output, "test"), edge_total=100)
    assert described["edge"] == {"total": 100, "prompts": [90] * 20}
    rebuilt = embedded_module.expand_pairs("d", described)
    total = rebuilt.prompt + rebuilt.output
    assert (total.max(), (total == 100).sum()) == (100, 20)
    assert set(rebuilt.prompt[total == 100]) == {90}


def test_distances():
    assert ks_distance(np.array([1, 2, 3]), np.array([3, 2, 1, 1, 2, 3])) == 0
    assert ks_distance(np.array([1, 2]), np.array([3, 4])) == 1
    assert ks_distance(np.array([1, 1, 1, 2]), np.array([1, 2, 2, 2])) == 0.5
    assert rank_correlation(np.array([1, 2, 3]), np.array([10, 20, 21])) == pytest.approx(1)
    # ties share their mean rank: 1.5, 1.5, 3 against 1, 2, 3
    assert rank_correlation(np.array([5, 5, 9]), np.array([1, 2, 3])) == pytest.approx(0.8660254)


def test_the_embedded_file_is_small_and_plain():
    file = importlib.resources.files("paxkv.workload") / "data" / "lengths.json"
    data = file.read_bytes()
    assert len(data) < 50_000
    assert set(json.loads(data)) == set(NAMES)


def test_sources_and_choices(tmp_path):
    assert load_lengths("wmt16").source == "embedded:wmt16"
    with gzip.open(tmp_path / "wmt16_ende_llama2.csv.gz", "wt") as file:
        file.write("source,target\n5,6\n7,2041\n7,2040\n")
    real = load_lengths("wmt16", tmp_path)
    assert real.source == "real:wmt16_ende_llama2.csv.gz"
    assert (real.prompt.tolist(), real.output.tolist()) == ([5, 7], [6, 2040])
    assert len(load_lengths("wmt16", tmp_path, max_total_tokens=2048)) == 3
    assert embedded_lengths("sharegpt") == embedded_lengths("sharegpt")
    assert len(embedded_lengths("sharegpt", max_total_tokens=2048)) == 79_731
    with pytest.raises(WorkloadError, match="holds pairs with prompt \\+ output <= 2048, got max_total_tokens=4096"):
        embedded_lengths("sharegpt", max_total_tokens=4096)
    for load in (embedded_lengths, lambda name: real_lengths(name, tmp_path)):
        with pytest.raises(WorkloadError, match="must be one of sharegpt, alpaca, wmt16, sharegpt_turns, got 'gpt'"):
            load("gpt")
    with pytest.raises(WorkloadError, match="sharegpt_sosp23_lengths.csv.gz: the file must be readable: No such file"):
        real_lengths("sharegpt", tmp_path)


def test_conversation_files_are_checked(tmp_path):
    path = tmp_path / "sharegpt_turns.csv.gz"
    good = "conv,turn,human_opt,gpt_opt\n4,0,0,9\n4,1,3,0\n9,0,5,5\n"
    path.write_bytes(gzip.compress(good.encode()))
    conversations = real_conversations(tmp_path)
    assert (conversations.offsets.tolist(), conversations.human.tolist()) == ([0, 2, 3], [0, 3, 5])
    path.write_bytes(gzip.compress(good.replace("4,1,3", "4,2,3").encode()))
    with pytest.raises(WorkloadError, match="csv.gz, line 3: turns .* count from 0, expected turn 1, got 2"):
        real_conversations(tmp_path)
    path.write_bytes(gzip.compress(good.replace("4,1,3", "4,1,-3").encode()))
    with pytest.raises(WorkloadError, match="csv.gz, line 3: human_opt must be a whole number in 0 .*, got '-3'"):
        real_conversations(tmp_path)
