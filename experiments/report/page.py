"""Puts the page together: how close each figure came, the misses, the figures, then everything needed to check them."""

from __future__ import annotations

import os
from pathlib import Path

from experiments.figure import Chapter
from experiments.plots.svg import figure_svg
from experiments.report.load import Run, load_run
from experiments.report.parts import (
    anchor,
    chip,
    counts,
    drawn_numbers,
    esc,
    records,
    strip,
    system_name,
    table,
    tree,
    value_table,
    verdict_rows,
)
from experiments.report.score import Score, number, paper_text, percent, scores, tolerance_text

TITLE = "PagedAttention, figure by figure"
LIVE_PART = "Live on this machine"
SIMULATED = (
    "Each data figure of the PagedAttention paper (Kwon et al., SOSP 2023) beside what paxkv's scheduler gives on a "
    "simulated clock. Few points calibrate it and are marked; every other one is a prediction."
)
MEASURED = (
    "The systems of the PagedAttention paper (Kwon et al., SOSP 2023) through paxkv's real engine on one machine, "
    "beside what its simulator predicts for it. Lengths and pool are scaled to the device, so numbers of the paper "
    "are shown and not tested."
)


def is_live(chapter: Chapter) -> bool:
    """Whether a chapter tells of the real engine; those stand in a part of their own."""
    return "live" in chapter.id.split("_")


def write_report(workdir: Path | str, out: Path | str = "report.html") -> Path:
    """Writes the page of a run directory and returns its path; the same directory gives the same bytes.

    Args:
        workdir: the run directory; only its chapters, verdict, calibration and environment are read.
        out: name of the page, inside `workdir` unless absolute.

    Raises:
        ReportError: nothing to report, or a corrupt file.
    """
    run = load_run(workdir)
    path = Path(workdir) / out
    part = path.with_name(path.name + ".part")
    part.write_text(render(run), encoding="utf-8")
    os.replace(part, path)
    return path


def render(run: Run) -> str:
    """The whole page: no request leaves it, style and script stand inside."""
    here = Path(__file__).parent
    style = (here / "style.css").read_text(encoding="utf-8")
    script = (here / "filter.js").read_text(encoding="utf-8")
    by_figure = scores(run.rows)
    sections = [_score_card(run, by_figure), _misses(run)]
    told = [chapter for chapter in run.chapters if not is_live(chapter)]
    sections += [_chapter(chapter, by_figure.get(chapter.id, Score(()))) for chapter in told]
    sections += _live_part(run, by_figure)
    sections += [_verdict(run), _calibration(run), _environment(run), _commands(run)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>paxkv: {TITLE}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light">'
        f"<style>{style}</style></head><body>{_header(run)}{_nav(run)}<main>{''.join(sections)}</main>"
        "<footer>Written by <code>python -m experiments.report</code> from the files of one run directory. "
        f"The paper's numbers were read from its text and decoded from its drawings.</footer><script>{script}</script>"
        "</body></html>\n"
    )


def _live_part(run: Run, by_figure: dict[str, Score]) -> list[str]:
    live = [chapter for chapter in run.chapters if is_live(chapter)]
    live.sort(key=lambda chapter: "fig" in chapter.id)  # how the systems compare comes first
    if not live:
        return []
    lead = f'<section class="part" id="live-part"><h2>{LIVE_PART}</h2><p class="note">{esc(MEASURED)}</p></section>'
    return [lead, *(_chapter(chapter, by_figure.get(chapter.id, Score(()))) for chapter in live)]


def _header(run: Run) -> str:
    total = Score(run.rows)
    predicted, calibrated = total.of("predicted"), total.of("calibrated")
    share = f"{predicted.within} of {len(predicted.tested)}"
    told = f"{len(total.misses) - total.unexplained} of them explained" if total.misses else "nothing to explain"
    boxes = [
        ("within", share, "predictions within tolerance"),
        ("miss" if total.misses else "within", str(len(total.misses)), f"misses, {told}"),
        ("", percent(predicted.median_error), "median error of the predictions"),
        ("", f"{calibrated.within} of {len(calibrated.tested)}", "calibrated rows within tolerance"),
        ("", str(total.shown), "rows shown beside the paper, not tested"),
    ]
    cards = "".join(f'<li class="{kind}"><b>{esc(value)}</b>{esc(text)}</li>' for kind, value, text in boxes)
    meta = {key: value for key, value in run.meta.items() if key != "command" and not isinstance(value, (dict, list))}
    facts = " · ".join(f"{esc(key.replace('_', ' '))}: {tree(value)}" for key, value in meta.items())
    lead = MEASURED if run.chapters and all(map(is_live, run.chapters)) else SIMULATED
    missing = ""
    if run.missing:
        items = "".join(f"<li>{esc(sentence)}</li>" for sentence in run.missing)
        missing = f'<div class="warning" id="missing"><b>This run is incomplete.</b> Missing:<ul>{items}</ul></div>'
    return (
        f'<header><h1>{TITLE}</h1><p class="lead">{esc(lead)}</p>'
        f'<ul class="big">{cards}</ul><p class="lead">{facts}</p>{missing}'
        "</header>"
    )


def _nav(run: Run) -> str:
    links = [("score", "How close"), ("misses", "Misses")]
    links += [(anchor(chapter.id), chapter.id) for chapter in run.chapters]
    links += [("verdict", "All rows"), ("calibration", "Calibration"), ("environment", "Environment")]
    links += [("commands", "Commands")]
    inner = " ".join(f'<a href="#{name}">{esc(text)}</a>' for name, text in links)
    return f'<nav aria-label="Sections">{inner}</nav>'


def _score_card(run: Run, by_figure: dict[str, Score]) -> str:
    rows = []
    chapters = {chapter.id for chapter in run.chapters}
    for figure, score in by_figure.items():
        link = f'<a href="#{anchor(figure)}"><b>{esc(figure)}</b></a>'
        if figure not in chapters:  # rows without their chapter: links to the figure lead here
            link = f'<b id="{anchor(figure)}">{esc(figure)}</b>'
        errors = [
            f'<span class="num">{percent(value)}</span>' if score.tested else ""
            for value in (score.median_error, score.worst_error)
        ]
        picture = strip(score) if score.tested else ""
        rows.append([link, esc(run.title(figure)), counts(score), picture, *errors])
    return (
        '<section id="score"><h2>How close each figure came</h2>'
        '<p class="note">Each mark is one number of the paper against ours, in units of its tolerance: the centre line'
        " is the paper's value, the green band the tolerance, the ends twice the tolerance or more. A dot is within (a"
        " ring: a calibrated row), a cross is a miss.</p>"
        + table(("figure", "what", "rows", "distance from the paper", "median error", "worst error"), rows)
        + "</section>"
    )


def _misses(run: Run) -> str:
    misses = Score(run.rows).misses
    items = []
    for row in misses:
        ours = number(row.ours) if row.ours is not None else "not reached"
        error = f", {percent(row.rel_err, signed=True)}" if row.rel_err is not None else ""
        why = esc(row.note) if row.note.strip() else "<b>No note: this miss is not explained yet.</b>"
        items.append(
            f'<li>{chip("miss", "miss")} <a href="#{anchor(row.figure)}">{esc(row.figure)}</a>'
            f" <b>{esc(system_name(row.system))}</b>, {esc(row.setting)}: paper {paper_text(row)}, ours {ours}{error}"
            f" (tolerance: {esc(tolerance_text(row))}; {esc(row.kind)}; {esc(row.workload)})"
            f'<p class="why">{why}</p></li>'
        )
    body = f'<ul class="misses">{"".join(items)}</ul>' if items else "<p>Every tested row is within its tolerance.</p>"
    return f'<section id="misses"><h2>Misses</h2>{body}</section>'


def _chapter(chapter: Chapter, score: Score) -> str:
    figure = chapter.figure
    title = figure.title if figure else chapter.title or chapter.id
    parts = [f'<section class="chapter" id="{anchor(chapter.id)}"><h2>{esc(chapter.id)}: {esc(title)}</h2>']
    if figure:
        parts.append(f'<p class="claim">{esc(figure.claim)}</p>')
    if score.rows:
        errors = ""
        if score.median_error is not None:
            errors = f" median error {percent(score.median_error)}, worst {percent(score.worst_error)}"
        parts.append(f"<p>{counts(score)}{errors}</p>")
    if figure:
        caption = " ".join(esc(note) for note in figure.notes)
        caption = f"<figcaption>{caption}</figcaption>" if caption else ""
        picture = figure_svg(figure) if figure.panels else ""
        parts.append(f"<figure>{picture}{caption}</figure>")
    if chapter.rows:
        label = f"{len(chapter.rows)} rows: paper, ours, tolerance"
        parts.append(f"<details><summary>{label}</summary>{verdict_rows(chapter.rows, figure=False)}</details>")
    parts.append(drawn_numbers(chapter))
    parts += [value_table(one) for one in chapter.tables]
    if figure and figure.command:
        parts.append(f"<pre>{esc(figure.command)}</pre>")
    return "".join(parts) + "</section>"


def _verdict(run: Run) -> str:
    figures = list(dict.fromkeys(row.figure for row in run.rows))
    kinds = ("predicted", "calibrated")
    selects = "".join(
        f'<label>{name} <select name="{name}"><option value="">all</option>'
        + "".join(f'<option value="{esc(value)}">{esc(value)}</option>' for value in values)
        + "</select></label>"
        for name, values in (("status", ("miss", "within", "shown")), ("figure", figures), ("kind", kinds))
    )
    return (
        '<section id="verdict"><h2>All rows</h2>'
        f'<div class="filter" hidden>{selects}<span id="verdict-count" aria-live="polite"></span></div>'
        f"{verdict_rows(run.rows, filterable=True)}</section>"
    )


def _calibration(run: Run) -> str:
    body = records(run.calibration) if run.calibration else "<p>No calibration points were recorded.</p>"
    return (
        '<section id="calibration"><h2>Calibration points</h2><p class="note">The clock\'s constants were fitted once,'
        f" on these points; no row marked predicted was used.</p>{body}</section>"
    )


def _environment(run: Run) -> str:
    body = tree(run.environment) if run.environment else "<p>No environment was recorded.</p>"
    return f'<section id="environment"><h2>Environment and workloads</h2>{body}</section>'


def _commands(run: Run) -> str:
    lines = [str(run.meta["command"])] if run.meta.get("command") else []
    lines += [chapter.figure.command for chapter in run.chapters if chapter.figure and chapter.figure.command]
    text = "\n".join(dict.fromkeys(lines))
    body = f"<pre>{esc(text)}</pre>" if text else "<p>No command was recorded.</p>"
    return f'<section id="commands"><h2>Commands that make this again</h2>{body}</section>'
