"""The paper's tables and figures as one page, and places for tables in another document."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.text import counted
from fedeas_flwr.report import page as pages
from fedeas_flwr.reproduce.inline_numbers import NUMBER
from fedeas_flwr.reproduce.sections import Section

MAX_NAMED = 12
"""Maximum number of missing runs that a section names; it counts the others."""


def write_page(document: pages.Document, folder: Path) -> tuple[Path, Path]:
    """Write index.md and index.html."""
    markdown, whole = folder / "index.md", folder / "index.html"
    atomic_write(markdown, pages.as_markdown(document).encode())
    atomic_write(whole, pages.as_html(document).encode())
    return markdown, whole


def page_section(section: Section) -> pages.Section:
    """Return a section for the page: a table has its caption above it, a figure below."""
    text = [line for line in (section.note, *missing_lines(section)) if line]
    if section.figure is not None:
        return pages.Section(
            section.title, text, pictures=[pages.Picture(section.name, section.figure, section.caption)]
        )
    captions = [section.caption] if section.caption else []
    return pages.Section(section.title, [*captions, *text], [section.table] if section.table else [])


def missing_lines(section: Section) -> list[str]:
    """Return lines that name a section's missing runs and the command that does them."""
    if not section.missing:
        return []
    names = ", ".join(section.missing[:MAX_NAMED])
    more = f" and {len(section.missing) - MAX_NAMED} more" if len(section.missing) > MAX_NAMED else ""
    return [
        f"Missing, {counted(len(section.missing), 'run')}: {names}{more}.",
        f"To do them: `{section.command}`",
        *([section.command_note] if section.command_note else []),
    ]


# --------------------------------------------------------------------------------- tables inside another document

_MARK = re.compile(r"<!-- (?:reproduce\b(?P<words>(?:(?!-->).)*)-->[ \t]*(?P<newline>\r?\n|\Z)|end -->)")


@dataclass(frozen=True)
class Block:
    """A place for tables in a document: the text between ``<!-- reproduce WORDS -->`` and ``<!-- end -->``."""

    where: str
    """File and line, for messages."""
    words: list[str]
    newline: str
    """End of its first line, and of every line to be written."""
    start: int
    end: int


def find_blocks(path: Path, text: str) -> list[Block]:
    """Return a document's places for tables.

    Raises
    ------
    ConfigError
        One line if there is neither a place nor a number to write, or for a place without an end of its own, since
        filling it would overwrite other text.
    """
    found = []
    marks = list(_MARK.finditer(text))
    for mark, following in itertools.zip_longest(marks, marks[1:]):
        if mark["words"] is None:
            continue
        line = text.count("\n", 0, mark.start()) + 1
        where = f"{path}, line {line}"
        if following is None or following["words"] is not None:
            raise ConfigError(f"{where}: '{mark[0].strip()}' has no '<!-- end -->' of its own")
        found.append(Block(where, mark["words"].split(), mark["newline"], mark.end(), following.start()))
    if not found and not NUMBER.search(text):
        raise ConfigError(f"{path} has no lines '<!-- reproduce table1 COLUMN -->' and '<!-- end -->' to write between")
    return found


def with_blocks(text: str, blocks: Sequence[Block], contents: Sequence[str]) -> str:
    """Return a text with contents in its places, in their order."""
    for block, content in reversed(list(zip(blocks, contents, strict=True))):
        lines = f"\n{content}\n".replace("\n", block.newline)
        text = f"{text[: block.start]}{lines}{text[block.end :]}"
    return text
