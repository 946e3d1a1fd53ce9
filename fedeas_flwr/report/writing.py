"""Write a report as files (one HTML page, or Markdown with its pictures), and compare runs on a terminal or in one
figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.tables import print_table, table_width
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.policies.built_in import FillToBudget
from fedeas_flwr.policies.registry import POLICIES
from fedeas_flwr.report.document import make_document, result_tables
from fedeas_flwr.report.groups import Group, score_of
from fedeas_flwr.report.page import as_html, as_markdown, as_png, as_svg
from fedeas_flwr.report.paired import PairedRuns
from fedeas_flwr.report.run_figures import draw_accuracy, draw_heat_map
from fedeas_flwr.report.style import INK, label_of

_WIDE = 108
"""Width of the full table in characters."""


def write_report(
    groups: Sequence[Group],
    left_out: Sequence[str],
    page: Path | None = None,
    folder: Path | None = None,
    paired: PairedRuns | None = None,
) -> list[Path]:
    """Write a report as one page, as a folder with report.md and every picture as SVG and PNG, or both.

    Return the files to open.
    """
    if page is None and folder is None:
        return []
    document, written = make_document(groups, left_out, paired), []
    if page:
        atomic_write(page, as_html(document).encode())
        written.append(page)
    if folder:
        for picture in (picture for section in document.sections for picture in section.pictures):
            atomic_write(folder / f"{picture.name}.svg", as_svg(picture.figure))
            atomic_write(folder / f"{picture.name}.png", as_png(picture.figure))
        atomic_write(folder / "report.md", as_markdown(document).encode())
        written.append(folder / "report.md")
    return written


def print_comparison(groups: Sequence[Group], console: Console, paired: PairedRuns | None = None) -> None:
    """Print the report's tables of results, on a narrow terminal without seeds and η, and of paired differences."""
    left_out = ("seeds", "η") if table_width(console) < _WIDE else ()
    for found in result_tables(groups):
        places = [place for place, head in enumerate(found.head) if head not in left_out]
        head, *rows = ([row[place] for place in places] for row in (found.head, *found.rows))
        print_table(console, head, rows, fold=head, right=head[1:])
    if paired:
        table = paired.table()
        console.print()
        print_table(console, table.head, table.rows, fold=table.head, right=table.head[1:])


def comparison_figure(groups: Sequence[Group]) -> Figure:
    """Draw the counts and the allocation of the first policy with budgets as heat maps next to the accuracy curves."""
    planned = next(group for group in groups if isinstance(POLICIES.get(group.config.policy), FillToBudget)).config
    counts = planned_counts(planned)
    generated, classes = planned_allocation(planned, counts), dataset_info(planned.dataset).classes
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.45])
    draw_heat_map(left, counts, classes, f"Real samples ({counts.sum():,})", "Greys")
    title = f"{label_of(planned.policy)} generates ({generated.sum():,}, β = {planned.beta:g})"
    draw_heat_map(middle, generated, classes, title, "Reds")
    draw_accuracy(right, groups)
    right.set_title(f"Test accuracy (dashed: {score_of(groups)})", fontsize=10)
    right.legend(loc="lower right", fontsize=9)
    scores = {group.config.policy: group.spread("last_20") for group in groups}
    if (without := scores.get("none")) and (filled := scores[planned.policy]):
        scores_shown = f"{filled.show(100)} % instead of {without.show(100)} %"
        message = f"{generated.sum():,} generated images: mean accuracy {scores_shown}"
        figure.suptitle(message, fontsize=12, fontweight="bold", color=INK)
    return figure
