"""Figure 12: latency against request rate under basic sampling, three models, two workloads, five systems."""

from __future__ import annotations

from experiments.paper.curves import LatencyFigure, LatencyPanel, Ratio, curve
from experiments.paper.systems import Source


def _ratios(level: float, *, oracle: float, max_: float, static: float) -> tuple[Ratio, ...]:
    return Ratio(level, "orca_oracle", oracle), Ratio(level, "orca_max", max_), Ratio(level, "static", static)


FIG12 = LatencyFigure(
    id="fig12",
    title="Single-sequence generation on ShareGPT and Alpaca",
    source=Source("section 6.2, figure 12; rate lists from the artifact's scripts", "B"),
    panels=(
        LatencyPanel(
            key="a",
            title="OPT-13B, 1 GPU, ShareGPT",
            model="OPT-13B",
            dataset="ShareGPT",
            curves=(
                curve(
                    "static",
                    ".01:.024 .05:.043 .1:.127 .15:.255 .2:.281 .25:.637 .3:1.54+",
                    {0.1: 0.084, 0.2: 0.129, 0.5: 0.231},
                    ".01 .05 .1 .15 .2 .25 .3 .35",
                ),
                curve(
                    "orca_max",
                    ".2:.030 .3:.031 .4:.060 .5:.082",
                    {0.1: 0.501, 0.2: 0.507, 0.5: 0.525},
                    ".2 .4 .5 .75",
                    off_plot=0.59,
                ),
                curve(
                    "orca_pow2",
                    ".25:.030 .5:.040 .6:.040 .75:.117",
                    {0.1: 0.717, 0.2: 0.755, 0.5: 0.774},
                    ".25 .5 .75 .9",
                    off_plot=0.84,
                ),
                curve(
                    "orca_oracle",
                    ".25:.030 .5:.033 .75:.041 .9:.085 1.0:.192 1.1:.502",
                    {0.1: 0.914, 0.2: 1.002, 0.5: 1.099},
                    ".5 .75 1 1.25 1.5",
                    off_plot=1.15,
                ),
                curve(
                    "paged",
                    "1.0:.037 1.25:.040 1.5:.042 1.75:.113 1.8:.131 1.9:.240 2.0:1.12+",
                    {0.1: 1.701, 0.2: 1.864, 0.5: 1.929},
                    "1 1.25 1.5 1.75 1.9 2",
                ),
            ),
            ratios=(
                *_ratios(0.1, oracle=1.86, max_=3.39, static=20.3),
                *_ratios(0.2, oracle=1.86, max_=3.68, static=14.5),
                *_ratios(0.5, oracle=1.75, max_=3.68, static=8.4),
            ),
        ),
        LatencyPanel(
            key="b",
            title="OPT-66B, 4 GPUs, ShareGPT",
            model="OPT-66B",
            dataset="ShareGPT",
            curves=(
                curve(
                    "static",
                    ".01:.038 .05:.102 .08:.330 .1:.502",
                    {0.1: 0.049, 0.2: 0.063, 0.5: 0.100},
                    ".01 .05 .08 .1 .12 .15 .2",
                    off_plot=0.113,
                ),
                curve("orca_max", ".1:.061 .2:.272", {0.1: 0.118, 0.2: 0.166, 0.5: 0.203}, ".1 .2 .3", off_plot=0.218),
                curve(
                    "orca_pow2",
                    ".1:.055 .2:.083 .25:.247 .3:.922",
                    {0.1: 0.205, 0.2: 0.236, 0.5: 0.269},
                    ".1 .2 .25 .35",
                ),
                curve(
                    "orca_oracle",
                    ".2:.061 .3:.131 .4:.386",
                    {0.1: 0.256, 0.2: 0.327, 0.5: 0.403},
                    ".2 .3 .4 .5",
                    off_plot=0.43,
                ),
                curve(
                    "paged",
                    ".4:.058 .6:.058 .8:.103 .9:.211 1.0:.948",
                    {0.1: 0.787, 0.2: 0.890, 0.5: 0.939},
                    ".4 .6 .8 .9 1.0",
                ),
            ),
            ratios=(
                *_ratios(0.1, oracle=3.08, max_=6.65, static=16.1),
                *_ratios(0.2, oracle=2.72, max_=5.36, static=14.2),
                *_ratios(0.5, oracle=2.33, max_=4.62, static=9.4),
            ),
        ),
        LatencyPanel(
            key="c",
            title="OPT-175B, 8 GPUs, ShareGPT",
            model="OPT-175B",
            dataset="ShareGPT",
            curves=(
                curve(
                    "static",
                    ".01:.056 .05:.177 .1:.386 .15:.766 .2:.850 .3:1.39+",
                    {0.2: 0.055, 0.5: 0.115},
                    ".01 .05 .1 .15 .2 .3",
                ),
                curve(
                    "orca_max",
                    ".25:.088 .5:.090 .75:.116 1.0:.689",
                    {0.2: 0.787, 0.5: 0.918},
                    ".25 .5 .75 1 1.25",
                ),
                curve(
                    "orca_pow2",
                    ".5:.086 .75:.090 1.0:.128 1.25:.346",
                    {0.2: 1.082, 0.5: 1.277},
                    ".5 .75 1 1.25 1.5",
                ),
                curve(
                    "orca_oracle",
                    ".8:.091 1.0:.096 1.2:.102 1.4:.319 1.6:.383 1.8:1.47+",
                    {0.2: 1.291, 0.5: 1.622},
                    ".8 1 1.2 1.4 1.6 1.8",
                ),
                curve(
                    "paged",
                    "1.5:.113 1.75:.120 2.0:.136 2.25:.253 2.5:.738 2.6:.967",
                    {0.2: 2.137, 0.5: 2.377},
                    "1.5 1.75 2 2.25 2.5 3",
                ),
            ),
            ratios=(
                *_ratios(0.2, oracle=1.66, max_=2.72, static=38.5),
                *_ratios(0.5, oracle=1.47, max_=2.59, static=20.7),
            ),
        ),
        LatencyPanel(
            key="d",
            title="OPT-13B, 1 GPU, Alpaca",
            model="OPT-13B",
            dataset="Alpaca",
            curves=(
                curve(
                    "static",
                    ".1:.033 .5:.097 1:.172 1.5:.247 2:.362 2.5:.488 2.75:.597 3:1.07+",
                    {0.1: 0.521, 0.5: 2.527},
                    ".1 .5 1 1.25 1.5 1.75 2 2.25 2.5 2.75 3",
                ),
                curve("orca_max", "2:.031 3:.049 4:.578", {0.1: 3.096, 0.5: 3.852}, "2 3 4 5"),
                curve(
                    "orca_pow2",
                    "7.5:.034 10:.036 12.5:.040 15:.068 16:.163",
                    {0.1: 15.34, 0.5: 16.11},
                    "7.5 10 12.5 15 16 17 18",
                    off_plot=16.4,
                ),
                curve(
                    "orca_oracle",
                    "15:.042 17.5:.046 20:.066 21:.158",
                    {0.1: 20.37, 0.5: 21.08},
                    "15 17.5 20 21 22.5 24",
                    off_plot=21.3,
                ),
                curve(
                    "paged",
                    "20:.052 22.5:.065 25:.072 27.5:.104 28:.208",
                    {0.1: 27.18, 0.5: 28.05},
                    "20 22.5 25 27.5 29 31.5",
                    off_plot=28.2,
                ),
            ),
            ratios=(
                *_ratios(0.1, oracle=1.33, max_=8.78, static=52.2),
                *_ratios(0.5, oracle=1.33, max_=7.28, static=11.1),
            ),
        ),
        LatencyPanel(
            key="e",
            title="OPT-66B, 4 GPUs, Alpaca",
            model="OPT-66B",
            dataset="Alpaca",
            curves=(
                curve(
                    "static",
                    ".1:.057 1.25:.487 1.5:.721",
                    {0.1: 0.215, 0.5: 1.264},
                    ".1 .5 1 1.25 1.5 1.75 2 2.5",
                ),
                curve(
                    "orca_max",
                    ".05:.053 .1:.051 1:.145 1.25:.408",
                    {0.1: 0.572, 0.5: 1.252},
                    ".05 .1 .15 .25",
                    off_plot=1.27,
                ),
                curve("orca_pow2", "3:.058 5:.061 6:.091", {0.1: 6.006, 0.5: 6.293}, "3 5 6 7", off_plot=6.99),
                curve("orca_oracle", "5:.061 6:.062 8:.067 10:.122 11:.882", {0.1: 9.193, 0.5: 10.50}, "6 8 10 11 12"),
                curve(
                    "paged",
                    "11:.069 13:.077 15:.082 17.5:.093 18:.115 18.5:.204 19:.894",
                    {0.1: 17.65, 0.5: 18.71},
                    "11 13 15 17.5 18.5 19 20",
                ),
            ),
            ratios=(
                *_ratios(0.1, oracle=1.92, max_=30.9, static=82.3),
                *_ratios(0.5, oracle=1.78, max_=14.95, static=14.8),
            ),
        ),
        LatencyPanel(
            key="f",
            title="OPT-175B, 8 GPUs, Alpaca",
            model="OPT-175B",
            dataset="Alpaca",
            curves=(
                curve(
                    "static",
                    ".1:.085 .5:.327 1:.560 1.5:.769 2:.850",
                    {0.2: 0.290, 0.5: 0.872},
                    ".1 .5 1 1.5 2 5",
                ),
                curve(
                    "orca_max",
                    "1.25:.088 2.5:.090 4:.105 5:.228",
                    {0.2: 4.770, 0.5: 5.105},
                    "1.25 2.5 4 5 7",
                    off_plot=5.5,
                ),
                curve(
                    "orca_pow2",
                    "10:.118 15:.144 16:.198 17:.312",
                    {0.2: 16.02, 0.5: 17.11},
                    "10 15 16 17 19",
                    off_plot=17.7,
                ),
                curve(
                    "orca_oracle",
                    "15:.141 17.5:.181 19:.253",
                    {0.2: 17.90, 0.5: 19.17},
                    "15 17.5 19 20 22",
                    off_plot=19.8,
                ),
                curve(
                    "paged",
                    "15:.139 17.5:.175 19:.239 20:.380 21:1.08+",
                    {0.2: 18.09, 0.5: 20.17},
                    "15 17.5 19 20 22",
                ),
            ),
            ratios=(
                *_ratios(0.2, oracle=1.01, max_=3.79, static=62.4),
                *_ratios(0.5, oracle=1.05, max_=3.95, static=23.1),
            ),
        ),
    ),
)
