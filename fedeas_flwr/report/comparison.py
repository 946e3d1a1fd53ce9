"""Runs at a glance: a table for a terminal, and one picture of where the images went and what they bought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from fedeas_flwr.local_data import planned_counts
from fedeas_flwr.paths import atomic_write
from fedeas_flwr.report.allocations import allocation_of
from fedeas_flwr.report.document import results
from fedeas_flwr.report.groups import Group
from fedeas_flwr.report.page import as_png
from fedeas_flwr.report.run_figures import draw_accuracy, draw_heat_map


def comparison_table(groups: Sequence[Group]) -> Table:
    """The report's table of results."""
    found = results(groups)
    table = Table(*found.head, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found.rows:
        table.add_row(*map(Text, row))
    return table


def comparison_figure(groups: Sequence[Group], path: Path) -> None:
    """Draw the counts and FedEAS's allocation as client × class heat maps beside the accuracy curves."""
    planned = next(group for group in groups if group.config.policy == "fedeas").config
    counts, generated = planned_counts(planned, planned.clients), allocation_of(planned)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.45])
    draw_heat_map(left, counts, f"Real samples ({counts.sum():,})", "Greys")
    draw_heat_map(middle, generated, f"FedEAS generates ({generated.sum():,}, β = {planned.beta:g})", "Reds")
    draw_accuracy(right, groups)
    right.set_title("Accuracy: mean of the last 20 rounds", fontsize=10)
    atomic_write(path, as_png(figure))
