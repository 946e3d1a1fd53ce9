"""Cells of a table in a terminal may come from outside."""

from __future__ import annotations

import io

from rich.console import Console

from fedeas_flwr.common.tables import print_table


def test_cells_from_outside_do_not_control_the_terminal() -> None:
    out = io.StringIO()
    rows = [("evil\nrun finished\x1b[2J", "y" * 5000)]
    print_table(Console(file=out, width=10_000), ("a", "b\x1b"), rows, fold=["a"])
    head, row = out.getvalue().splitlines()
    assert "\x1b" not in head + row and row.startswith("evil run finished�[2J") and row.count("y") == 599
