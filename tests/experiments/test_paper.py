"""The paper's numbers against each other: curves against crossings, ratios against rates, parts against sums."""

from __future__ import annotations

import math
import pickle

import pytest

from experiments import paper

CURVES = [
    pytest.param(figure, panel, curve, id=f"{figure.id}{panel.key}-{curve.system}")
    for figure in paper.LATENCY_FIGURES.values()
    for panel in figure.panels
    for curve in panel.curves
]
PANELS = [
    pytest.param(panel, id=f"{figure.id}{panel.key}")
    for figure in paper.LATENCY_FIGURES.values()
    for panel in figure.panels
]


@pytest.mark.parametrize(("figure", "panel", "curve"), CURVES)
def test_drawn_points_give_the_tabulated_rates(figure, panel, curve):
    """Where the crossing lies between drawn points, reading those points gives the rate in the table, to 1%."""
    for level, rate in curve.crossings.items():
        read = paper.read_knee(curve.rates, curve.latencies, level)
        if read is None:
            # Then the crossing lies on the line to a point that is not drawn, or no points are known at all.
            assert not curve.points or rate >= curve.rates[-1]
        else:
            assert read == pytest.approx(rate, rel=0.01)


def test_most_crossings_are_between_drawn_points():
    """The test above must not pass because it has nothing to read."""
    readable = [
        paper.read_knee(curve.values[2].rates, curve.values[2].latencies, level)
        for curve in CURVES
        for level in curve.values[2].crossings
        if curve.values[2].points
    ]
    assert len(readable) > 70 and sum(value is not None for value in readable) > 55


@pytest.mark.parametrize("panel", PANELS)
def test_ratios_recompute_from_the_rates(panel):
    for ratio in panel.ratios:
        rates = [panel.curve(system).crossings[ratio.level] for system in ("paged", ratio.over)]
        assert rates[0] / rates[1] == pytest.approx(ratio.value, rel=0.01)
        assert panel.ratio(ratio.level, ratio.over) == ratio.value


@pytest.mark.parametrize(("figure", "panel", "curve"), CURVES)
def test_reading_grid_covers_the_drawing_and_goes_beyond(figure, panel, curve):
    grid = paper.reading_grid(figure.id, panel.key, curve.system)
    assert list(grid) == sorted(set(grid)) and grid[0] > 0
    drawn = curve.rates or curve.artifact
    assert grid[:-1] == drawn
    # A rate lies beyond every crossing of the paper, so ours is readable when it agrees.
    assert grid[-1] > max(curve.crossings.values())
    assert paper.reading_grid(figure.id, panel.key, curve.system, beyond=3)[: len(grid)] == grid


@pytest.mark.parametrize(
    ("figure", "panel", "system", "tail"),
    [
        ("fig12", "a", "orca_max", (0.4, 0.5, 0.75)),  # the artifact's next rate
        ("fig12", "a", "paged", (1.9, 2.0, 2.1)),  # its list ends where the drawing does: one more step
        ("fig12", "c", "paged", (2.5, 2.6, 3.0)),
        ("fig12", "e", "orca_max", (1.0, 1.25, 1.5)),  # its list ends far below the drawing
        ("fig14", "f", "paged", (8.0, 8.5, 9.0)),  # no drawn points: the list and one more step
        ("fig16", "b", "paged", (43.0, 44.0, 45.0)),
        ("fig17", "a", "orca_pow2", (0.65, 0.7, 0.75)),
    ],
)
def test_reading_grid_takes_the_next_rate_or_repeats_the_last_step(figure, panel, system, tail):
    assert paper.reading_grid(figure, panel, system)[-3:] == tail


def test_reading_grid_names_what_there_is():
    with pytest.raises(KeyError, match="fig12, fig14, fig16, fig17"):
        paper.reading_grid("fig13", "a", "paged")
    with pytest.raises(KeyError, match="no panel 'z'"):
        paper.reading_grid("fig12", "z", "paged")
    with pytest.raises(KeyError, match="no system 'static'"):
        paper.reading_grid("fig14", "a", "static")


def test_the_line_that_leaves_the_plot_runs_through_the_crossing():
    leaving = paper.FIG12.panel("a").curve("orca_max").leaving
    assert leaving[0] == (0.5, 0.082)
    assert paper.read_knee([rate for rate, _ in leaving], [y for _, y in leaving], 0.5) == pytest.approx(0.525)
    # It leaves the taller canvas of the paper where the table says: after passing the limit.
    assert leaving[1][0] < 0.59 and leaving[1][1] == paper.PLOT_LIMIT
    assert paper.FIG12.panel("a").curve("paged").leaving == ()


class TestReadKnee:
    def test_reads_between_two_points(self):
        assert paper.read_knee([1, 2, 3], [0.1, 0.2, 1.2], 0.5) == pytest.approx(2.3)

    def test_takes_the_first_crossing(self):
        assert paper.read_knee([1, 2, 3, 4], [0.1, 0.9, 0.1, 0.9], 0.5) == pytest.approx(1.5)

    def test_a_point_on_the_level_is_the_crossing(self):
        assert paper.read_knee([1, 2, 3], [0.1, 0.5, 0.6], 0.5) == 2

    @pytest.mark.parametrize("latencies", [[0.1, 0.2, 0.3], [0.5, 0.6, 0.7], [0.9, 0.8, 0.7]])
    def test_without_a_crossing_from_below_there_is_none(self, latencies):
        assert paper.read_knee([1, 2, 3], latencies, 0.5) is None

    @pytest.mark.parametrize(
        ("rates", "latencies", "message"),
        [
            ([1, 2], [0.1], "one latency per rate"),
            ([1, math.nan], [0.1, 0.2], "finite"),
            ([1, 2], [0.1, math.inf], "finite"),
            ([2, 1], [0.1, 0.6], "increase"),
        ],
    )
    def test_bad_curves_are_refused(self, rates, latencies, message):
        with pytest.raises(ValueError, match=message):
            paper.read_knee(rates, latencies, 0.5)

    def test_the_grid_moves_the_reading(self):
        """One clock, two grids: what the paper's coarse rates do to Orca (Max) in panel a."""
        fine = paper.read_knee([0.5, 0.6, 0.65, 0.75], [0.082, 0.09, 0.6, 4.3], 0.5)
        coarse = paper.read_knee([0.5, 0.75], [0.082, 4.3], 0.5)
        assert fine > 0.63 and coarse == pytest.approx(0.525, abs=0.001)


def test_figure_2_bars_add_up_to_the_pool():
    for bar in paper.FIG02:
        assert sum(bar.parts) == pytest.approx(100, abs=0.15)
    split = paper.FIG02_PAGED
    assert split.token_states + split.slack == pytest.approx(split.allocated)
    assert split.free == pytest.approx(2.09)


def test_figure_1_iteration_times_fit_one_line():
    """26.0 ms and 0.42 ms per sequence, the points that calibrate the bare step, within 3%."""
    for batch, rate in zip(paper.FIG01.batch, paper.FIG01.tokens_per_second, strict=True):
        assert batch / rate == pytest.approx(0.0260 + 0.00042 * batch, rel=0.03)


def test_figure_13_claims_follow_from_its_bars():
    sharegpt = paper.FIG13[0]
    for system, times in paper.BATCHED_CLAIMS[sharegpt.dataset].items():
        assert sharegpt.paged / sharegpt.of(system) == pytest.approx(times, abs=0.06)
    assert paper.FIG13[1].of("orca_max") == 7.0
    with pytest.raises(KeyError):
        sharegpt.of("static")


def test_figure_11_ratios_are_the_ones_in_the_text():
    sharegpt, alpaca = paper.FIG11
    assert round(sharegpt.prompt / alpaca.prompt, 1) == 8.4
    assert round(sharegpt.output / alpaca.output, 1) == 5.8


def test_figure_15_grows_with_the_width():
    for method in paper.FIG15:
        values = [method.at(width) for width in (2, 4, 6)]
        assert values == sorted(values) and method.sharegpt[0] < method.sharegpt[1]


def test_figure_18_overheads_and_best_blocks():
    at_32 = [row.overhead for row in paper.FIG18A if row.batch == 32]
    assert 0.185 < min(at_32) and max(at_32) < 0.265
    for dataset, curve in paper.FIG18B.items():
        assert curve.best in paper.FIG18B_CLAIMED_BEST[dataset]


def test_figure_19_swaps_add_up_and_ratios_recompute():
    for block in paper.BLOCK_SIZES:
        both = paper.FIG19A["swap_in_out"].at(block)
        assert paper.FIG19A["swap_in"].at(block) + paper.FIG19A["swap_out"].at(block) == pytest.approx(both, rel=0.005)
        assert paper.FIG19A["recompute"].at(block) / both == pytest.approx(paper.FIG19A_RATIO.at(block), abs=0.011)


def test_systems_have_one_name_each():
    assert paper.label("paged") == "paged" and paper.label("paged", "paper") == "vLLM (paper)"
    assert paper.label("static") == "FasterTransformer"
    assert {curve.values[2].system for curve in CURVES} == set(paper.SYSTEMS)
    assert len({claim.id for claim in paper.TEXT_CLAIMS}) == len(paper.TEXT_CLAIMS)


def test_the_data_cannot_be_changed():
    with pytest.raises(TypeError):
        paper.FIG12.panel("a").curve("paged").crossings[0.5] = 3.0
    with pytest.raises(AttributeError):
        paper.FIG01.batch = ()


def test_the_data_can_be_sent_to_another_process():
    figure = pickle.loads(pickle.dumps(paper.FIG12))
    assert figure == paper.FIG12 and hash(figure) == hash(paper.FIG12)
    assert figure.panel("a").curve("paged").crossings[0.5] == 1.929
