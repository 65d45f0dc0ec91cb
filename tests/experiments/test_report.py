"""The report of a small made-up run: everything is on the page, twice the same bytes, and bad files are named."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from experiments import paper
from experiments.figure import (
    Chapter,
    Figure,
    Panel,
    Series,
    Table,
    VerdictRow,
    judge,
    judge_printed,
    judge_range,
)
from experiments.plots.overview import write_overview
from experiments.plots.paper_series import paper_series
from experiments.report import ReportError, Score, load_run, markdown_table, write_report
from experiments.report.load import natural
from experiments.report.parts import strip, verdict_rows
from experiments.report.score import in_tolerances

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "circle", "line", "rect", "use"}


class Page(HTMLParser):
    """Parses a page and checks that elements nest; collects text, ids and what would leave the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.outside, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        for name in ("src", "href", "xlink:href", "action"):
            if name in values:
                (self.links if values[name].startswith("#") else self.outside).append(values[name])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def chapters() -> tuple[Chapter, ...]:
    """One chapter per kind of panel, a hit, a miss with a note, a miss without, a rate never reached, a shown row."""
    panel = paper.FIG12.panel("a")
    curves = [series for curve in panel.curves for series in paper_series(curve)]
    curves += [Series(paper.label(c.system), "paxkv", c.grid(), [0.1] * len(c.grid()), c.system) for c in panel.curves]
    curves.append(Series("0.5 s/token", "paper", (0, 2), (0.5, 0.5), style="guide"))
    latency = Panel("(a) 13B <ShareGPT>", "rate (req/s)", "s/token", "line", curves, ylim=(0, 1))
    names = ("Max", "paged")
    piles = [
        Series(f"{part} ({source})", source, (0, 1), (40.0, 60.0), part)
        for source in ("paper", "paxkv")
        for part in ("token_states", "reservation")
    ]
    bars = [Series("paper", "paper", (0, 1), (1, 2), "paged"), Series("paxkv", "paxkv", (0, 1), (1, None), "paged")]
    blocks = paper.FIG18B["Alpaca"].values
    log = [Series("Alpaca", "paper", paper.BLOCK_SIZES, blocks, "Alpaca")]
    hist = [Series("prompt", source, (0, 10, 20), (5, 1), "prompt") for source in ("paper", "paxkv")]

    def figure(name: str, *panels: Panel) -> Figure:
        return Figure(name, f"Title of {name} & more", "A claim.", f"run --only={name}", panels, ("A caption note.",))

    return (
        Chapter(
            "fig02",
            figure("fig02", Panel("", "", "%", "stacked", piles, xticklabels=names)),
            [judge("fig02", "orca_max", "internal", "real", 57.3, 57.6, 0.6, "absolute")],
        ),
        Chapter("fig11", figure("fig11", Panel("", "tokens", "count", "hist", hist))),
        Chapter(
            "fig12",
            figure("fig12", latency, Panel("b", "x", "y", "bar", bars, xticklabels=names)),
            [
                judge("fig12", "paged", "a, rate at 0.5", "real", 1.929, 1.95, 0.1, kind="calibrated"),
                judge("fig12", "orca_max", "a, rate at 0.5", "real", 0.525, 0.7, 0.1, note="Read on a coarse <grid>."),
                judge("fig12", "static", "a, rate at 0.5", "real", 0.231, None, 0.1),
                judge("fig12", "paged/orca_max", "a, ratio", "real", 3.68, 3.6, 0.15),
                judge("fig12", "paged", "a, true crossing", "real", 1.929, 1.99, 0.1, tested=False),
            ],
        ),
        Chapter(
            "fig18",
            figure("fig18", Panel("b", "block", "s/token", "line", log, xscale="log2", yscale="log")),
            [judge("fig18", "paged", "block 16", "real", 0.594, 0.8, 1.5, "factor")],
        ),
        Chapter(
            "claims",
            title="Claims",
            tables=[
                Table("Verdicts", ("claim", "verdict", "ours"), [("waste <60%>", "confirmed", 79.6)], "A table note.")
            ],
        ),
    )


@pytest.fixture
def workdir(tmp_path):
    made = chapters()
    for chapter in made:
        chapter.save(tmp_path / "chapters" / f"{chapter.id}.json")
    rows = [row.to_dict() for chapter in made for row in chapter.rows]
    meta = {"preset": "smoke", "command": "scripts/reproduce.sh", "chapters": [chapter.id for chapter in made]}
    files = {
        "verdict.json": {"rows": rows, "meta": meta},
        "calibration.json": [{"name": "bare step", "constants": {"a_ms": 1.5}}, {"name": "prefill", "worst": 0.02}],
        "environment.json": {"env": {"python": "3.13"}, "workloads": {"sharegpt": {"hash": "abc123" * 8}}},
    }
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    return tmp_path


def test_the_page_holds_every_row_note_and_command(workdir):
    text = write_report(workdir).read_text(encoding="utf-8")
    page = Page(text)
    for row in load_run(workdir).rows:
        assert verdict_rows([row]).split("<tbody>")[1].split("</tbody>")[0] in text
    for words in (
        "Read on a coarse <grid>.",
        "No note: this miss is not explained yet.",
        "not reached",
        "Title of fig02 & more",
        "A caption note.",
        "A table note.",
        "79.6",
        "bare step",
        "a_ms",
        "abc123" * 8,
        "run --only=fig18",
        "scripts/reproduce.sh",
        "3 of 5",
        "1 of 1",
    ):
        assert words in page.text or words in text, words
    assert "incomplete" not in page.text
    # Misses stand before the first figure.
    assert text.index('id="misses"') < text.index("Read on a coarse") < text.index('id="fig02"')


def test_the_page_stands_alone_and_its_links_lead_somewhere(workdir):
    text = write_report(workdir).read_text(encoding="utf-8")
    page = Page(text)
    assert page.outside == [] and "@import" not in text and "url(http" not in text
    assert len(page.ids) == len(set(page.ids)), "an id stands twice"
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert text.count('role="img"') >= 4 and "<desc" in text  # every picture has words
    assert len(text) < 400_000


def test_two_writes_are_byte_identical(workdir):
    first = write_report(workdir).read_bytes()
    assert write_report(workdir, "again.html").read_bytes() == first
    assert not list(workdir.glob("*.part"))


def test_an_incomplete_run_says_what_is_missing(workdir):
    (workdir / "chapters/fig18.json").unlink()
    page = Page(write_report(workdir).read_text(encoding="utf-8"))
    assert {link[1:] for link in page.links} <= set(page.ids) and "fig18" in page.ids
    for name in ("calibration.json", "environment.json", "verdict.json"):
        (workdir / name).unlink()
    text = Page(write_report(workdir).read_text(encoding="utf-8")).text
    assert "This run is incomplete" in text
    for name in ("calibration.json", "environment.json", "verdict.json", "chapters/fig18.json", "chapters/fig19.json"):
        assert name in text
    assert "Title of fig12" in text and "chapters/fig12.json" not in text


def test_a_verdict_older_than_its_chapter_is_told(workdir):
    chapter = Chapter.load(workdir / "chapters/fig02.json")
    row = judge("fig02", "orca_max", "internal", "real", 57.3, 57.4, 0.6, "absolute")
    Chapter("fig02", chapter.figure, [row]).save(workdir / "chapters/fig02.json")
    assert any("verdict.json lacks 1 row" in sentence for sentence in load_run(workdir).missing)


def test_a_note_added_to_the_verdict_is_no_difference(workdir):
    values = json.loads((workdir / "verdict.json").read_text())
    values["rows"][0]["note"] = "explained later"
    (workdir / "verdict.json").write_text(json.dumps(values))
    assert load_run(workdir).missing == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("verdict.json", '{"rows": [', "verdict.json: not JSON"),
        ("verdict.json", "[]", "verdict.json: must hold a JSON object"),
        ("verdict.json", '{"rows": {}}', "verdict.json: must be"),
        ("verdict.json", '{"rows": [{"figure": "fig02"}]}', "verdict.json: row 0 is not a verdict row"),
        ("chapters/fig02.json", "", "fig02.json: not JSON"),
        ("chapters/fig02.json", '{"id": "fig03"}', "fig02.json: holds the chapter 'fig03'"),
        ("chapters/fig02.json", '{"id": "fig02", "rows": [{"colour": 1}]}', "fig02.json: not a chapter.*colour"),
        ("chapters/fig02.json", '{"figure": null}', "fig02.json: not a chapter"),
        ("calibration.json", "{}", "calibration.json: must hold a JSON array"),
        ("calibration.json", "[1]", "calibration.json: must be a list of objects"),
        ("environment.json", "\x00", "environment.json: not JSON"),
    ],
)
def test_a_corrupt_file_is_named(workdir, name, content, message):
    (workdir / name).write_text(content)
    with pytest.raises(ReportError, match=message):
        write_report(workdir)
    assert not (workdir / "report.html").exists()


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match="holds no run"):
        write_report(tmp_path)
    with pytest.raises(ReportError, match="not a directory"):
        write_report(tmp_path / "nowhere")


def test_chapters_survive_json(workdir):
    for chapter in chapters():
        assert Chapter.load(workdir / "chapters" / f"{chapter.id}.json") == chapter


def test_row_keys_are_the_agreed_ones():
    row = judge("fig12", "paged", "a", "real", 2.0, 2.1, 0.1)
    assert list(row.to_dict()) == [
        *("figure", "system", "setting", "workload", "paper", "ours", "rel_err"),
        *("tolerance", "tolerance_kind", "pass", "kind", "note"),
    ]
    assert VerdictRow.from_dict(row.to_dict()) == row


@pytest.mark.parametrize(
    ("paper_value", "ours", "tolerance", "kind", "error", "passed"),
    [
        (2.0, 2.2, 0.1, "relative", 0.1, True),
        (2.0, 2.21, 0.1, "relative", 0.105, False),
        (2.0, 1.8, 0.1, "relative", -0.1, True),
        (0.0, 0.5, 0.6, "absolute", None, True),
        (0.0, 0.0, 0.6, "absolute", 0.0, True),
        (1.0, 1.61, 0.6, "absolute", 0.61, False),
        (0.6, 0.4, 1.5, "factor", -1 / 3, True),
        (0.6, 0.39, 1.5, "factor", -0.35, False),
        (0.6, 0.0, 1.5, "factor", -1.0, False),
        (2.0, None, 0.1, "relative", None, False),
        (2.0, float("nan"), 0.1, "relative", None, False),
        (None, 2.0, 0.1, "relative", None, None),
    ],
)
def test_judging(paper_value, ours, tolerance, kind, error, passed):
    row = judge("f", "s", "", "", paper_value, ours, tolerance, kind)
    assert row.passed is passed
    assert row.rel_err == (None if error is None else pytest.approx(error))
    distance = in_tolerances(row)
    if distance is not None:
        assert (abs(distance) <= 1 + 1e-9) is passed


def test_judging_a_range_and_printed_digits():
    assert judge_range("f", "s", "", "", 16.2, 30.5, 16.2).passed
    outside = judge_range("f", "s", "", "", 16.2, 30.5, 33.55)
    assert outside.passed is False and outside.rel_err == pytest.approx(0.1)
    assert "16.2 to 30.5" in verdict_rows([outside])
    assert judge_printed("f", "s", "", "", 161.31, 161.3104).passed
    assert not judge_printed("f", "s", "", "", 161.31, 161.32).passed
    assert judge_printed("f", "s", "", "", 7.0, 6.99, 2).passed is False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: judge("f", "s", "", "", 1, 1, -0.1), "not negative"),
        (lambda: judge("f", "s", "", "", 1, 1, 0.5, "factor"), "at least 1"),
        (lambda: judge("f", "s", "", "", 1, 1, 0.1, "about"), "tolerance_kind must be one of"),
        (lambda: judge_range("f", "s", "", "", 2, 1, 1), "low <= high"),
        (lambda: Series("a", "ours", (1,), (1,)), "source must be one of"),
        (lambda: Series("a", "paper", (1, 2, 3), (1,)), "one y per x"),
        (lambda: Panel("a", "", "", "line", [Series("a", "paper", (1, 2), (1,))]), "1 more x"),
        (lambda: Panel("a", "", "", "pie", []), "kind must be one of"),
        (lambda: Table("a", ("x", "y"), [(1,)]), "2 columns"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_scores_count_and_the_strip_marks_each_tested_row():
    rows = load_rows()
    score = Score(rows)
    assert (score.within, len(score.misses), score.shown, score.unexplained) == (4, 2, 1, 1)
    assert strip(score).count("<circle") == 4 and strip(score).count("<path") == 2
    assert Score(()).median_error is None and Score(()).worst_error is None


def load_rows() -> tuple[VerdictRow, ...]:
    return tuple(row for chapter in chapters() for row in chapter.rows)


def test_the_readme_table_has_a_line_per_tested_figure(workdir):
    lines = markdown_table(load_run(workdir)).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["fig02", "fig12", "fig18", "**all**"]
    assert "| 2 of 4 |" in lines[3] and "1 of 2" in lines[3]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("name", ["overview.svg", "overview.png"])
def test_the_overview_is_drawn_from_the_verdict_alone(workdir, tmp_path, name):
    first = write_overview(workdir / "verdict.json", tmp_path / name).read_bytes()
    assert write_overview(workdir / "verdict.json", tmp_path / f"again-{name}").read_bytes() == first
    if name.endswith("svg"):
        assert b"4 of 6 numbers of the paper within tolerance" in first


def test_the_overview_refuses_what_it_cannot_draw(workdir, tmp_path):
    with pytest.raises(ReportError, match="no such file"):
        write_overview(tmp_path / "none.json", tmp_path / "a.svg")
    with pytest.raises(ReportError, match=r"\.svg or \.png"):
        write_overview(workdir / "verdict.json", tmp_path / "a.gif")
    (workdir / "verdict.json").write_text('{"rows": []}')
    with pytest.raises(ReportError, match="no tested row"):
        write_overview(workdir / "verdict.json", tmp_path / "a.svg")


def test_figures_are_ordered_as_in_the_paper():
    names = ["sensitivity", "fig19", "claims", "fig2", "fig12"]
    assert sorted(names, key=natural) == ["fig2", "fig12", "fig19", "claims", "sensitivity"]
