"""The commands `fedeas keys` and `fedeas strategies`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from fedeas_flwr.commands.output import FormatOption
from fedeas_flwr.common.tables import print_table, table_width
from fedeas_flwr.config_keys import run_keys

_FOUR_COLUMNS = 120
"""Minimum terminal width, in characters, for four columns of which one holds sentences."""


def keys(output: FormatOption = "table") -> None:
    """List every run-config key: default, allowed values (n: integer, x: any number) and meaning."""
    head: tuple[str, ...] = ("key", "default", "allowed", "meaning")
    rows: list[tuple[Any, ...]] = [(key.name, key.default, key.allowed, key.meaning) for key in run_keys()]
    if output == "table":
        rows = [(key.name, json.dumps(key.default), key.allowed_shown(), key.meaning) for key in run_keys()]
        if table_width(Console()) < _FOUR_COLUMNS:
            head, rows = ("key", "default", "meaning, allowed"), [(*row[:2], f"{row[3]}\n{row[2]}") for row in rows]
    _print_rows(head, rows, output, fold=head[1:])


def strategies(output: FormatOption = "table") -> None:
    """List every strategy: what it does, its keys, what a client discloses, and its cost."""
    from fedeas_flwr.strategies.registry import TABLE_HEAD, table_rows

    _, summary, keys, *others = TABLE_HEAD
    _print_rows(TABLE_HEAD, table_rows(), output, fold=[summary, *others], listed=keys)


def _print_rows(
    head: Sequence[str], rows: Sequence[Sequence[Any]], output: str, fold: Sequence[str], listed: str = ""
) -> None:
    """Print rows as a table or JSON; in the column ``listed``, every name gets its own line and is not broken."""
    if output == "json":
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=1, ensure_ascii=False))
        return
    lines = [
        [cell.replace(", ", ",\n") if name == listed else cell for name, cell in zip(head, row, strict=True)]
        for row in rows
    ]
    print_table(Console(), head, lines, fold=fold)
