"""One page of tables and figures, as Markdown beside its pictures and as HTML that holds them."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedeas_flwr.config import ConfigError
from fedeas_flwr.paths import atomic_write
from fedeas_flwr.reproduce.items import Section
from fedeas_flwr.reproduce.tables import Table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; border-bottom: 1px solid #dde2e7; text-align: right; vertical-align: top }
th { border-bottom: 2px solid #22303c } th:first-child, td:first-child { text-align: left }
td .below { color: #6b7785; font-size: 11px } img { max-width: 100%; height: auto }
.scroll { overflow-x: auto } .note { color: #6b7785 } code { background: #f2f4f6; padding: .1rem .3rem }
"""
MOST_NAMED = 12
"""Missing runs that a section names; of more it gives the number."""


@dataclass(frozen=True)
class Page:
    """What is shown."""

    title: str
    notes: list[str]
    sections: list[Section]
    fill: str
    """The command that does the missing runs of a section, with ``{}`` for the section's name."""


def write_page(page: Page, folder: Path) -> tuple[Path, Path]:
    """Write index.md and index.html."""
    markdown, document = folder / "index.md", folder / "index.html"
    atomic_write(markdown, as_markdown(page).encode())
    atomic_write(document, as_html(page).encode())
    return markdown, document


# -------------------------------------------------------------------------------------------------------- Markdown


def table_markdown(table: Table) -> str:
    """Write a table; first column to the left, the others to the right."""
    lines = [_row(table.head), _row([":--", *["--:"] * (len(table.head) - 1)]), *map(_row, table.rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_markdown(page: Page) -> str:
    """Write the page with links to its pictures."""
    parts = [f"# {page.title}", *page.notes]
    for section in page.sections:
        parts += [f"## {section.title}", section.caption, section.note]
        parts += [table_markdown(section.table)] if section.table else []
        parts += [f"![{section.title}]({section.picture.name})"] if section.picture else []
        parts += missing_lines(section, page.fill)
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def missing_lines(section: Section, fill: str) -> list[str]:
    """Say which runs a section lacks, and the command that does them."""
    if not section.missing:
        return []
    names = ", ".join(section.missing[:MOST_NAMED])
    more = f" and {len(section.missing) - MOST_NAMED} more" if len(section.missing) > MOST_NAMED else ""
    return [f"Missing, {len(section.missing)} runs: {names}{more}.", f"To do them: `{fill.format(section.name)}`"]


# ------------------------------------------------------------------------------------------------------------ HTML


def as_html(page: Page) -> str:
    """Write the page as one file that needs no other."""
    parts = [f"<h1>{html.escape(page.title)}</h1>", *(f"<p>{_inline(note)}</p>" for note in page.notes)]
    for section in page.sections:
        parts += [f'<h2 id="{section.name}">{html.escape(section.title)}</h2>', f"<p>{_inline(section.caption)}</p>"]
        parts += [f'<p class="note">{_inline(section.note)}</p>'] if section.note else []
        parts += [_table_html(section.table)] if section.table else []
        if section.picture:
            data = base64.b64encode(section.picture.read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">')
        parts += [f'<p class="note">{_inline(line)}</p>' for line in missing_lines(section, page.fill)]
    head = f'<meta charset="utf-8"><title>{html.escape(page.title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _table_html(table: Table) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _inline(text: str) -> str:
    """Turn the little Markdown that cells and captions have into HTML; anything else in them is text."""
    safe = html.escape(text, quote=False)
    safe = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", safe)
    safe = re.sub(r"`(.+?)`", r"<code>\1</code>", safe)
    safe = safe.replace("&lt;ins&gt;", "<ins>").replace("&lt;/ins&gt;", "</ins>")
    return re.sub(r"&lt;br&gt;(.*)$", r'<br><span class="below">\1</span>', safe)


# --------------------------------------------------------------------------------- tables inside another document

_BLOCK = re.compile(r"(<!-- reproduce ([^\n]*?) -->\n).*?(<!-- end -->)", re.S)


def blocks(text: str) -> list[list[str]]:
    """List what a document asks for: the words between ``<!-- reproduce`` and ``-->``."""
    return [found.group(2).split() for found in _BLOCK.finditer(text)]


def with_blocks(text: str, contents: Sequence[str]) -> str:
    """Put contents between each ``<!-- reproduce … -->`` and ``<!-- end -->``, in their order."""
    left = iter(contents)
    return _BLOCK.sub(lambda found: f"{found.group(1)}\n{next(left)}\n{found.group(3)}", text)


def check_blocks(path: Path, text: str) -> None:
    """Refuse a document that has no place for a table."""
    if not blocks(text):
        raise ConfigError(f"{path} has no lines '<!-- reproduce table1 COLUMN -->' and '<!-- end -->' to write between")
