r"""Figure 1 (right): memory and throughput against batch size, OPT-13B on one A100-40GB.

Claim: existing systems run out of memory at 8 requests of the maximum length; paging fits about 40 and decodes
three times faster (paper section 1).

    python -m experiments.reproduce --only=fig01     (seconds; no simulation of arrivals)

Expected: memory and tokens/s within 5% of every plotted point. The throughput points calibrate the bare step; the
memory of existing systems is predicted from the sizing formula, the paged one from the mean request of the figure.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, judge
from experiments.setting import Setting, build_cost
from paxkv.config import OPT_13B

TOLERANCE = 0.05
GB = 1e9
BARE = Setting("paged", "opt-13b", "sharegpt", 1.0, 1.0, engine="bare")


def settings(preset: Preset) -> list[Setting]:
    return []


def chapter(context: Context) -> Chapter:
    figure, rows = paper.FIG01, []
    cost = build_cost(BARE, context.calibration)
    weights = OPT_13B.num_params * OPT_13B.weight_bytes
    per_request = OPT_13B.max_positions * OPT_13B.kv_bytes_per_token
    paged = [(float(batch), float(gb)) for batch, gb in figure.paged_memory]
    # The figure does not print its mean length: it follows from the first and last point of its memory curve.
    mean_bytes = GB * (paged[-1][1] - paged[0][1]) / (paged[-1][0] - paged[0][0])
    mean_tokens = mean_bytes / OPT_13B.kv_bytes_per_token

    def tokens_per_s(batch: float) -> float:
        context_s = (cost.kv_token_s + cost.page_read_s / BARE.page_size) * batch * mean_tokens
        compute = max(cost.weights_s, cost.token_s * batch)
        return batch / (cost.floor_s + compute + cost.sequence_s * batch + context_s)

    batches = [float(batch) for batch in figure.batch]
    ours = [tokens_per_s(batch) for batch in batches]
    for batch, printed, value in zip(batches, figure.tokens_per_second, ours, strict=True):
        rows.append(
            judge("fig01", "paged", f"tokens/s at batch {batch:g}", "batch of mean length", printed, value,
                  TOLERANCE, kind="calibrated", note="figure 1 fixes the bare step")
        )  # fmt: skip
    existing = [(float(batch), float(gb)) for batch, gb in (figure.existing_start, figure.existing_end)]
    for batch, printed in existing:
        value = (weights + batch * per_request) / GB
        rows.append(
            judge("fig01", "orca_max", f"GB at batch {batch:g}", "requests of 2048 tokens", printed, value, TOLERANCE)
        )
    base = paged[0][1] * GB - paged[0][0] * mean_bytes - weights
    for batch, printed in paged:
        value = (weights + base + batch * mean_bytes) / GB
        rows.append(
            judge("fig01", "paged", f"GB at batch {batch:g}", f"mean of {mean_tokens:.0f} tokens", printed, value,
                  TOLERANCE, kind="calibrated", note="mean length and workspace follow from this curve's ends")
        )  # fmt: skip
    panels = (
        Panel("Memory", "batch (requests)", "GB", "line", (
            Series("existing systems (paper)", "paper", *zip(*existing, strict=True), system="orca_max"),
            Series("existing systems (paxkv)", "paxkv", (0, 8), tuple((weights + b * per_request) / GB for b in (0, 8)),
                   system="orca_max"),
            Series("paged (paper)", "paper", *zip(*paged, strict=True), system="paged"),
            Series("paged (paxkv)", "paxkv", tuple(b for b, _ in paged),
                   tuple((weights + base + b * mean_bytes) / GB for b, _ in paged), system="paged"),
        )),
        Panel("Throughput", "batch (requests)", "tokens/s", "line", (
            Series("paper", "paper", tuple(batches), tuple(figure.tokens_per_second), system="paged"),
            Series("paxkv", "paxkv", tuple(batches), tuple(ours), system="paged"),
        )),
    )  # fmt: skip
    drawing = Figure(
        "fig01",
        "Memory and throughput against batch (figure 1, right)",
        "Paging fits about five times the requests into the same memory, and throughput follows the batch.",
        "python -m experiments.reproduce --only=fig01",
        panels,
    )
    return Chapter("fig01", drawing, tuple(rows))
