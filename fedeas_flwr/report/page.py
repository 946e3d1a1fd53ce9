"""A page of sentences, tables and pictures, as self-contained HTML or as Markdown with separate pictures.

Sentences, captions and cells may contain simple markup in both formats: ``**``bold``**``, code in backticks,
``<ins>``underlined``</ins>`` and ``<br>`` before a cell's second line. Everything else is plain text: other markup in
names and values is escaped, and each text is made one line.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedeas_flwr.common.text import MAX_LINE, MAX_TEXT, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedeas_flwr.report.style import LineStyle


_STYLE = """
:root { color-scheme: light dark; --ink: #22303c; --paper: white; --faint: #5a6773; --line: #dfe4e9; --soft: #f5f7f9;
  --accent: #d1495b; --link: #2f5d9b; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #dde3e9; --paper: #171d23; --faint: #a3afba;
  --line: #36424d; --soft: #222b33; --link: #8fb8ee; } }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 0 24px 64px; }
header { border-top: 6px solid var(--accent); padding: 28px 0 4px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 12px; }
h2 { font-size: 21px; margin: 44px 0 10px; padding-top: 16px; border-top: 1px solid var(--line); }
p { max-width: 76ch; margin: 8px 0; }
nav { font-size: 14px; margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 16px; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.wide { overflow-x: auto; margin: 14px 0; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; background: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td:first-child { font-weight: 600; min-width: 11em; }
td:not(:first-child) { white-space: nowrap; }
.below { color: var(--faint); font-size: 12px; white-space: normal; }
th span { white-space: nowrap; }
.swatch { margin-right: 8px; padding: 1px 2px; background: white; border-radius: 2px; }
figure { margin: 16px 0 28px; }
figure img { display: block; width: 100%; min-width: 440px; height: auto; background: white; }
figcaption { font-size: 14px; color: var(--faint); max-width: 76ch; margin-top: 6px; }
code { font-size: 0.92em; background: var(--soft); padding: 1px 4px; border-radius: 3px; }
summary { cursor: pointer; font-size: 15px; margin: 10px 0; }
@media print { h2 { break-after: avoid; } figure, tr { break-inside: avoid; } nav, summary { display: none; }
  .wide { overflow: visible; } table { font-size: 10px; } th, td { padding: 4px 6px; } figure img { min-width: 0; }
  td:not(:first-child), th span { white-space: normal; } }
@media print { details::details-content { content-visibility: visible; } }
"""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    swatches: Sequence[LineStyle] = ()
    """Line style of each row, as in the pictures."""


@dataclass(frozen=True)
class Picture:
    """A figure, its file name and its caption."""

    name: str
    figure: Figure
    caption: str

    @property
    def alt_text(self) -> str:
        """Return the text for readers who cannot see the picture: its axes and legend."""
        axes = self.figure.axes
        shown = [(place.get_ylabel(), place.get_xlabel()) for place in axes if place.get_legend()]
        titles = [" by ".join(filter(None, words)) for words in shown]
        names = [text.get_text() for place in axes if (legend := place.get_legend()) for text in legend.get_texts()]
        text = f"Picture of {'; '.join(titles)}. {'; '.join(names)}." if names else f"Picture. {self.caption}"
        return one_line(text.replace(r"$\hat{\Gamma}$", "Γ̂"), MAX_TEXT)


@dataclass(frozen=True)
class Section:
    """A part of the page under a title."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    below: Sequence[str] = ()
    """Sentences below the tables and pictures."""
    folded: bool = False
    """Whether the section is collapsed at first."""


@dataclass(frozen=True)
class Document:
    """A whole page."""

    title: str
    text: Sequence[str]
    sections: Sequence[Section] = ()


# ------------------------------------------------------------------------------------------------------------- HTML


def as_html(document: Document) -> str:
    """Return one page with its style and pictures embedded; it opens offline and loads nothing."""
    links = "".join(f'<a href="#{_anchor(s.title)}">{_text(s.title)}</a>' for s in document.sections)
    opening = "".join(f"<p>{_text(line)}</p>" for line in document.text)
    body = "\n".join(_html_section(section) for section in document.sections)
    # The empty icon keeps browsers from requesting one.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(document.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<header><h1>{_text(document.title)}</h1>{opening}<nav>{links}</nav></header>
{body}
</main>
</body>
</html>
"""


def _html_section(section: Section) -> str:
    parts = [f"<p>{_text(line)}</p>" for line in section.text]
    parts += [_scrolling(_html_table(table), f"{section.title}: table") for table in section.tables]
    for picture in section.pictures:
        code = base64.b64encode(as_svg(picture.figure)).decode()
        image = f'<img alt="{html.escape(picture.alt_text)}" src="data:image/svg+xml;base64,{code}">'
        shown = _scrolling(image, f"{section.title}: picture")
        parts.append(
            f'<figure id="figure-{picture.name}">{shown}<figcaption>{_text(picture.caption)}</figcaption></figure>'
        )
    parts += [f"<p>{_text(line)}</p>" for line in section.below]
    inside = "\n".join(parts)
    if section.folded:
        inside = f"<details><summary>Show {_text(section.title.lower())}</summary>{inside}</details>"
    return f'<section><h2 id="{_anchor(section.title)}">{_text(section.title)}</h2>\n{inside}</section>'


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_html_head(cell)}</th>" for cell in table.head)
    rows = []
    for number, row in enumerate(table.rows):
        dot = _swatch(table.swatches[number]) if table.swatches else ""
        cells = "".join(f"<td>{'' if i else dot}{_text(cell, MAX_LINE)}</td>" for i, cell in enumerate(row))
        rows.append(f"<tr>{cells}</tr>")
    body = "".join(rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _scrolling(inside: str, name: str) -> str:
    """Return a region that scrolls horizontally, also by keyboard, if it is wider than the screen."""
    return f'<div class="wide" role="region" aria-label="{html.escape(name)}" tabindex="0">{inside}</div>'


def _swatch(style: LineStyle) -> str:
    """Return a piece of a group's curve as SVG; printers omit background colours."""
    from fedeas_flwr.report.style import LINES

    line = f'stroke="{style.colour}" stroke-width="4" stroke-dasharray="{LINES[style.line] or "none"}"'
    return f'<svg class="swatch" width="24" height="10" aria-hidden="true"><path d="M0 5H24" {line}/></svg>'


def _html_head(cell: str) -> str:
    """Return a column head that may wrap, but not inside "CIFAR-10", "K = 20" or "90 %"."""
    return re.sub(r"\S+(?: = \S+)?(?: %)?", lambda found: f"<span>{_text(found[0])}</span>", cell)


def _anchor(title: str) -> str:
    return "-".join(re.findall(r"\w+", title.lower()))  # no %, which has a meaning in URLs


def _text(text: str, most: int = MAX_TEXT) -> str:
    """Escape the text, then convert its simple markup."""
    safe = html.escape(one_line(text, most))
    safe = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", safe)
    safe = re.sub(r"`(.+?)`", r"<code>\1</code>", safe)
    safe = safe.replace("&lt;ins&gt;", "<ins>").replace("&lt;/ins&gt;", "</ins>")
    return re.sub(r"&lt;br&gt;(.*)$", r'<br><span class="below">\1</span>', safe)


# --------------------------------------------------------------------------------------------------------- Markdown


def as_markdown(document: Document) -> str:
    """Return the page as Markdown that links its pictures as PNG files."""
    lines = [f"# {_markdown(document.title)}", *map(_markdown, document.text)]
    for section in document.sections:
        lines += [f"## {_markdown(section.title)}", *map(_markdown, section.text), *map(table_markdown, section.tables)]
        for picture in section.pictures:
            lines += [f"![{picture.name}]({picture.name}.png)", f"*{_markdown(picture.caption)}*"]
        lines += map(_markdown, section.below)
    return "\n\n".join(lines) + "\n"


def table_markdown(table: Table) -> str:
    """Return a Markdown table; the first column is left-aligned, the others right-aligned."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_markdown(cell, MAX_LINE).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([row(table.head), row([":--", *["--:"] * (len(table.head) - 1)]), *map(row, table.rows)])


def _markdown(text: str, most: int = MAX_TEXT) -> str:
    """Return the text as one line, in which links and HTML tags other than the simple markup are escaped."""
    return re.sub(r"<(?!/?ins>|br>)", "&lt;", one_line(text, most)).replace("](", r"]\(")


# --------------------------------------------------------------------------------------------------------- pictures


def as_svg(figure: Figure) -> bytes:
    """Return a figure as SVG with text as paths, for equal looks, and without a date, for equal bytes."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedeas", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def as_png(figure: Figure) -> bytes:
    """Return a figure as PNG at 200 dpi."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()
