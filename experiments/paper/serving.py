"""Figures 14 (parallel and beam), 16 (shared prefix) and 17 (chatbot), and the grid on which a curve is read."""

from __future__ import annotations

from experiments.paper.basic_sampling import FIG12
from experiments.paper.curves import LatencyFigure, LatencyPanel, Ratio, curve
from experiments.paper.frozen import FrozenMap
from experiments.paper.systems import Source


def _panel14(key: str, title: str, over_oracle: float, **lists: tuple[float, float, str]) -> LatencyPanel:
    """A panel of figure 14: per system the rate at 0.5 and at 0.1 s/token and the artifact's rates; no drawn points."""
    curves = tuple(curve(system, "", {0.5: knee, 0.1: low}, rates) for system, (knee, low, rates) in lists.items())
    return LatencyPanel(key, title, "OPT-13B", "Alpaca", curves, (Ratio(0.5, "orca_oracle", over_oracle),))


FIG14 = LatencyFigure(
    id="fig14",
    title="Parallel generation and beam search, OPT-13B on Alpaca",
    source=Source("section 6.3, figure 14; rate lists from the artifact's scripts", "B"),
    panels=(
        _panel14(
            "a",
            "parallel generation, 2 outputs",
            1.43,
            orca_max=(1.52, 1.30, "1 1.5 2 2.5"),
            orca_pow2=(9.03, 8.08, "6 7 8 9 10 12"),
            orca_oracle=(12.66, 11.70, "10 11 12 13 14"),
            paged=(18.11, 17.65, "12.5 15 18 19 20"),
        ),
        _panel14(
            "b",
            "parallel generation, 4 outputs",
            1.47,
            orca_max=(0.51, 0.28, ".1 .25 .5 .75 1"),
            orca_pow2=(4.70, 3.75, "2 3 4 5 6"),
            orca_oracle=(7.01, 6.14, "4 5 6 7 8 9"),
            paged=(10.33, 10.02, "6 8 10 11 12"),
        ),
        _panel14(
            "c",
            "parallel generation, 6 outputs",
            1.54,
            orca_max=(0.50, 0.27, ".1 .25 .5 .75 1"),
            orca_pow2=(3.03, 2.14, "1 2 2.5 3 4 4.5"),
            orca_oracle=(4.63, 4.01, "2 3 4 5 6"),
            paged=(7.11, 7.00, "4 5 6 7 8 9"),
        ),
        _panel14(
            "d",
            "beam search, width 2",
            1.81,
            orca_max=(1.27, 1.00, ".5 1 1.25 1.5 2"),
            orca_pow2=(7.02, 6.14, "3 5 6 7 8 9"),
            orca_oracle=(9.40, 8.46, "6 8 9 10 11"),
            paged=(17.01, 15.95, "10 12.5 15 16 17.5 19"),
        ),
        _panel14(
            "e",
            "beam search, width 4",
            1.92,
            orca_max=(0.36, 0.18, ".1 .25 .5 .75 1"),
            orca_pow2=(3.25, 2.44, "1 2 3 3.5 4 4.5"),
            orca_oracle=(5.01, 4.16, "3 4 4.5 5 6"),
            paged=(9.59, 8.57, "6 8 9 10 11"),
        ),
        _panel14(
            "f",
            "beam search, width 6",
            2.22,
            orca_max=(0.29, 0.16, ".1 .25 .5 .75 1"),
            orca_pow2=(1.91, 1.54, ".5 1.5 2 2.5 3"),
            orca_oracle=(3.16, 2.61, "1 2 3 3.5 4 4.5"),
            paged=(7.02, 6.23, "4 6 6.5 7 8 8.5"),
        ),
    ),
)

FIG16 = LatencyFigure(
    id="fig16",
    title="A prefix shared by all prompts: translation with examples, LLaMA-13B",
    source=Source("section 6.4, figure 16; rate lists from the artifact's scripts", "B"),
    panels=(
        LatencyPanel(
            key="a",
            title="1-shot prefix, 80 tokens",
            model="LLaMA-13B",
            dataset="WMT16 En-De",
            curves=(
                curve(
                    "orca_oracle",
                    "1:.026 24:.045 26:.050 28:.058 29:.070 30:.405 31:1.21+",
                    {0.5: 30.12},
                    "1 24 26 28 29 30 31 32",
                ),
                curve("paged", "1:.027 24:.041 32:.048 40:.061 48:.105 50:.227 51:.530 52:1.21+", {0.5: 50.90}),
            ),
            ratios=(Ratio(0.5, "orca_oracle", 1.69),),
        ),
        LatencyPanel(
            key="b",
            title="5-shot prefix, 341 tokens",
            model="LLaMA-13B",
            dataset="WMT16 En-De",
            curves=(
                curve(
                    "orca_oracle",
                    "1:.029 4:.034 8:.046 9:.051 10:.058 11:.075 12:.396",
                    {0.5: 12.05},
                    "1 4 8 9 10 11 12 13",
                ),
                curve(
                    "paged",
                    "1:.027 24:.044 36:.072 38:.086 40:.106 41:.156 42:.242 43:.627 44:1.17+",
                    {0.5: 42.67},
                ),
            ),
            ratios=(Ratio(0.5, "orca_oracle", 3.54),),
        ),
    ),
)
PREFIX_TOKENS = FrozenMap.of({"a": 80, "b": 341})
"""Tokens in the shared prefix of figure 16 (its caption), by panel."""

_CHAT_ORCA = ".1 .2 .3 .35 .4 .45 .5 .55 .6 .65 .7"

FIG17 = LatencyFigure(
    id="fig17",
    title="Chatbot, OPT-13B",
    source=Source("section 6.5, figure 17; rate lists from the artifact's scripts", "B"),
    panels=(
        LatencyPanel(
            key="a",
            title="ShareGPT conversations, prompts cut to 1024 tokens",
            model="OPT-13B",
            dataset="ShareGPT turns",
            curves=(
                curve("orca_max", "", {0.1: 0.453, 0.5: 0.552}, _CHAT_ORCA),
                curve("orca_pow2", "", {0.1: 0.462, 0.5: 0.566}, _CHAT_ORCA),
                curve(
                    "orca_oracle",
                    ".1:.031 .3:.035 .4:.044 .45:.069 .55:.241 .6:.837",
                    {0.1: 0.468, 0.5: 0.572},
                    _CHAT_ORCA,
                ),
                curve(
                    "paged",
                    ".1:.031 .3:.034 .4:.036 .55:.053 .6:.071 .7:.108 .8:.200 .85:.428",
                    {0.1: 0.678, 0.5: 0.853},
                    ".1 .2 .3 .4 .5 .55 .6 .7 .8 .85 .9 .95 1 1.1",
                    off_plot=0.89,
                ),
            ),
            # The paper gives the range over the three Orcas, 1.49 to 1.54; each end belongs to the rate beside it.
            ratios=(Ratio(0.5, "orca_oracle", 1.49), Ratio(0.5, "orca_max", 1.54)),
        ),
    ),
)

LATENCY_FIGURES = FrozenMap.of({figure.id: figure for figure in (FIG12, FIG14, FIG16, FIG17)})


def reading_grid(figure: str, panel: str, system: str, beyond: int = 1) -> tuple[float, ...]:
    """The request rates at which a system of a latency figure is simulated to be read as the paper's curve was.

    The drawn rates, then `beyond` further ones from the artifact's list (or by repeating the last step where the list
    ends). Figure 14 and two Orcas of figure 17 have no drawn points: there the artifact's list stands in for them.

    Raises:
        KeyError: no such figure, panel or system; the message lists what there is.
    """
    if figure not in LATENCY_FIGURES:
        raise KeyError(f"no latency figure {figure!r}; there are {', '.join(LATENCY_FIGURES)}")
    return LATENCY_FIGURES[figure].panel(panel).curve(system).grid(beyond)
