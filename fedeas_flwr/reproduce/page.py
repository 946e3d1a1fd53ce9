"""The paper's tables and figures as a page, and its tables inside another document."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedeas_flwr.config import ConfigError
from fedeas_flwr.paths import atomic_write
from fedeas_flwr.report import page as pages
from fedeas_flwr.reproduce.sections import Section
from fedeas_flwr.sizes import counted

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

    def document(self) -> pages.Document:
        """The page as it is written."""
        return pages.Document(self.title, self.notes, [_section(section, self.fill) for section in self.sections])


def write_page(page: Page, folder: Path) -> tuple[Path, Path]:
    """Write index.md and index.html."""
    markdown, whole, document = folder / "index.md", folder / "index.html", page.document()
    atomic_write(markdown, pages.as_markdown(document).encode())
    atomic_write(whole, pages.as_html(document).encode())
    return markdown, whole


def _section(section: Section, fill: str) -> pages.Section:
    """A table has its caption above it, a figure below."""
    text = [line for line in (section.note, *missing_lines(section, fill)) if line]
    if section.figure is not None:
        return pages.Section(
            section.title, text, pictures=[pages.Picture(section.name, section.figure, section.caption)]
        )
    captions = [section.caption] if section.caption else []
    return pages.Section(section.title, [*captions, *text], [section.table.shown()] if section.table else [])


def missing_lines(section: Section, fill: str) -> list[str]:
    """Say which runs a section lacks, and the command that does them."""
    if not section.missing:
        return []
    names = ", ".join(section.missing[:MOST_NAMED])
    more = f" and {len(section.missing) - MOST_NAMED} more" if len(section.missing) > MOST_NAMED else ""
    return [
        f"Missing, {counted(len(section.missing), 'run')}: {names}{more}.",
        f"To do them: `{fill.format(section.name)}`",
    ]


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
