"""Runs side by side: a table, and a picture of where the images went and what they bought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedeas_flwr.allocation import allocate
from fedeas_flwr.config import RunConfig
from fedeas_flwr.local_data import planned_counts
from fedeas_flwr.report.style import COLOURS, INK, LABELS, tidy
from fedeas_flwr.runs import RunDirectory


def comparison_table(runs: Sequence[RunDirectory]) -> Table:
    """Accuracy, images and seconds of each run."""
    table = Table("policy", "last-20 %", "peak %", "images", "seconds", "backend", title=None)
    for column in table.columns[1:5]:
        column.justify = "right"
    for run in runs:
        summary, config = run.summary(), run.config()
        seconds = summary["seconds"]
        spent = seconds["clients"] + seconds["aggregate"] + seconds["evaluate"]
        table.add_row(
            LABELS.get(config.policy, config.policy),
            f"{100 * summary['last_20']:.1f}",
            f"{100 * summary['peak']:.1f}",
            f"{summary['total_generated']:,}",
            f"{spent:.0f}",
            config.backend,
        )
    return table


def allocation_of(config: RunConfig) -> npt.NDArray[np.int64]:
    """What a run's clients generate, [K, C], computed anew from the partition."""
    return allocate(
        planned_counts(config, config.clients),
        config.policy,
        beta=config.beta,
        gamma=config.gamma,
        strict_mean=not config.printed_rule,
        total=config.total or None,
    )


def comparison_figure(runs: Sequence[RunDirectory], path: Path) -> None:
    """Draw the counts and FedEAS's allocation as client × class heat maps beside the accuracy curves."""
    planned = next(run for run in runs if run.config().policy == "fedeas").config()
    counts, generated = planned_counts(planned, planned.clients), allocation_of(planned)
    figure = Figure(figsize=(13, 4.2), layout="constrained", dpi=150)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.45])
    _heat_map(left, counts, f"Real samples ({counts.sum():,})", "Greys")
    _heat_map(middle, generated, f"FedEAS generates ({generated.sum():,}, β = {planned.beta:g})", "Reds")
    for run in runs:
        config, summary = run.config(), run.summary()
        curve = [100 * r["accuracy"] for r in run.rounds()]
        score = f"{100 * summary['last_20']:.1f} % ({summary['total_generated']:,})"
        label = f"{LABELS.get(config.policy, config.policy)}: {score}"
        width = 2.6 if config.policy == "fedeas" else 1.6
        right.plot(range(1, len(curve) + 1), curve, color=COLOURS.get(config.policy, INK), lw=width, label=label)
    right.set(
        xlabel="round", ylabel="test accuracy (%)", title="Accuracy: mean of the last 20 rounds (images generated)"
    )
    right.set_ylim(top=100)
    right.xaxis.get_major_locator().set_params(integer=True)
    tidy(right)
    right.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _heat_map(axes: Axes, values: npt.NDArray[np.int64], title: str, colours: str) -> None:
    top = max(int(values.max()), 1)
    axes.imshow(values, cmap=colours, aspect="auto", vmin=0, vmax=top)
    axes.set(xlabel="class", ylabel="client", title=title)
    axes.set_xticks(range(values.shape[1]))
    axes.set_yticks(range(values.shape[0]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        if value:
            colour = "white" if value > 0.55 * top else INK
            axes.text(column, row, f"{value}", ha="center", va="center", fontsize=7, color=colour)
