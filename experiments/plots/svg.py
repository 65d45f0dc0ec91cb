"""A Matplotlib figure as one `<svg>` element to put into a page: small, titled, and the same bytes every time."""

from __future__ import annotations

import html
import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

from experiments.figure import Figure
from experiments.plots.draw import draw

RC = {
    # Text stays text: readable by machines, and a tenth of the size of outlines.
    "svg.fonttype": "none",
    "svg.hashsalt": "paxkv",
    "font.family": "DejaVu Sans",  # ships with Matplotlib, so the layout does not depend on the machine's fonts
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#66707a",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "grid.linewidth": 0.6,
    "xtick.color": "#44505c",
    "ytick.color": "#44505c",
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "path.simplify": True,
    "text.parse_math": False,
}
PAGE_FONT = "'DejaVu Sans', Verdana, sans-serif"


def figure_svg(figure: Figure) -> str:
    """The figure drawn, as an `<svg>` element whose ids begin with the figure's id."""
    with rc_context(RC):
        return inline_svg(draw(figure), figure.id, figure.title, describe(figure))


def describe(figure: Figure) -> str:
    """The figure in words, for readers who cannot see it."""
    parts = [figure.claim]
    for panel in figure.panels:
        names = sorted({series.label for series in panel.series})
        parts.append(f"Panel {panel.title or figure.title}: {panel.ylabel} against {panel.xlabel}; {', '.join(names)}.")
    return " ".join(parts)


def inline_svg(canvas: Canvas, prefix: str, title: str, description: str) -> str:
    """Saves without date or creator, drops the header and unused ids, and adds title and description."""
    out = io.StringIO()
    with rc_context(RC):
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several figures share a page: an id that nothing refers to goes, the others get the figure's prefix.
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)([^)"]+)', lambda m: f"{m[1]}{prefix}-{m[2]}", text)
    # The document-wide style that Matplotlib writes would reach every other picture of the page.
    text = re.sub(r"\s*<style[^>]*>.*?</style>", "", text, count=1, flags=re.DOTALL)
    text = text.replace("'DejaVu Sans'", PAGE_FONT).replace(", 'Bitstream Vera Sans'", "")
    text = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", text)
    # A hundredth of a point is below what a screen or a printer shows.
    text = re.sub(r' (?:d|x|y|width|height)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height|version|xmlns(:xlink)?)="[^"]*"', "", opening.replace("\n", " "))
    width = round(canvas.get_figwidth() * 96)
    names = (
        f'<title id="{prefix}-title">{html.escape(title)}</title>'
        f'<desc id="{prefix}-desc">{html.escape(description)}</desc>'
    )
    return (
        f'{opening} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img"'
        f' aria-labelledby="{prefix}-title {prefix}-desc" style="max-width:{width}px;stroke-linejoin:round">'
        f"{names}{rest.strip()}"
    )
