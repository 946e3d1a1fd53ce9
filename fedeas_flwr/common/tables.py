"""Print tables that fit the terminal without truncating cells, and format rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedeas_flwr.common.text import MAX_LINE, one_line

_WIDE = 160
_GAP = 2
_WORD = 20
"""Maximum length of a word, in characters, that is never broken."""


def table_width(console: Console) -> int:
    """Return the maximum width of a table: the terminal's, or in a file or pipe at least `_WIDE` characters."""
    return console.width if console.is_terminal else max(console.width, _WIDE)


def print_table(
    console: Console,
    head: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    fold: Collection[str],
    right: Collection[str] = (),
) -> None:
    """Print a `folding_table`; lines that are wider than the terminal wrap."""
    console.print(folding_table(table_width(console), head, rows, fold=fold, right=right), crop=False)


def folding_table(
    width: int,
    head: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    fold: Collection[str],
    right: Collection[str] = (),
) -> Table:
    """Return a table of a given width that truncates nothing but texts of more than `MAX_LINE` characters.

    To fit, the widest of the columns to ``fold`` wrap, between words or inside a long one; other columns never do. If
    that is not enough, the table is wider. Users copy names, paths and keys, and a truncated number is a wrong number,
    so an ellipsis would make them useless.
    """
    table = Table(box=None, pad_edge=False)
    cells = [
        [cell if isinstance(cell, Text) else Text(one_line(cell, MAX_LINE)) for cell in row] for row in (head, *rows)
    ]
    columns = [[cell.plain for cell in column] for column in zip(*cells, strict=True)]
    widths = [max(cell_len(line) for text in column for line in text.split("\n")) for column in columns]
    words = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in columns]
    least = [min(words[i], _WORD) if name in fold else widths[i] for i, name in enumerate(head)]
    while sum(widths) + _GAP * len(widths) > width and (wide := [i for i, w in enumerate(widths) if w > least[i]]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    for name, title, each in zip(head, cells[0], widths, strict=True):
        side = "right" if name in right else "left"
        table.add_column(title, overflow="fold", min_width=each, max_width=each, justify=side)  # type: ignore[arg-type]
    for row in cells[1:]:
        table.add_row(*row)
    return table


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the keys of all rows as columns; missing values are empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
