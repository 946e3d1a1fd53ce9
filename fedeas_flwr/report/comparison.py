"""Runs at a glance: a table for a terminal, and one picture of where the images went and what they bought."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import Console

from fedeas_flwr.data import dataset_info
from fedeas_flwr.policies import POLICIES, FillToBudget
from fedeas_flwr.report.document import results
from fedeas_flwr.report.groups import Group, rounds_meant
from fedeas_flwr.report.run_figures import draw_accuracy, draw_heat_map
from fedeas_flwr.report.style import LABELS
from fedeas_flwr.run_plan import planned_allocation, planned_counts
from fedeas_flwr.sizes import counted
from fedeas_flwr.terminal import print_table, table_width

_WIDE = 108
"""Characters that the whole table needs."""


def print_comparison(groups: Sequence[Group], console: Console) -> None:
    """Print the report's table of results, on a narrow terminal without the columns that can be worked out."""
    found = results(groups)
    left_out = ("seeds", "η") if table_width(console) < _WIDE else ()
    places = [place for place, head in enumerate(found.head) if head not in left_out]
    head, *rows = ([row[place] for place in places] for row in (found.head, *found.rows))
    print_table(console, head, rows, fold=head, right=head[1:])


def comparison_figure(groups: Sequence[Group]) -> Figure:
    """Draw the counts and the allocation of the first policy with budgets as heat maps next to the accuracy curves."""
    planned = next(group for group in groups if isinstance(POLICIES[group.config.policy], FillToBudget)).config
    counts = planned_counts(planned, planned.clients)
    generated, classes = planned_allocation(planned, counts), dataset_info(planned.dataset).classes
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.45])
    draw_heat_map(left, counts, classes, f"Real samples ({counts.sum():,})", "Greys")
    title = f"{LABELS[planned.policy]} generates ({generated.sum():,}, β = {planned.beta:g})"
    draw_heat_map(middle, generated, classes, title, "Reds")
    draw_accuracy(right, groups)
    right.set_title(f"Accuracy: mean of the last {counted(rounds_meant(groups), 'round')}", fontsize=10)
    figure.legend(loc="outside lower right", ncols=len(groups), frameon=False)
    return figure
