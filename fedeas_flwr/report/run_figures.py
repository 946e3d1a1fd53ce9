"""Draw the metrics of runs on given axes; the caller adds the legend."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from fedeas_flwr.common.text import shortened
from fedeas_flwr.report.groups import CLIENT_WORK, FloatArray, Group, score_of
from fedeas_flwr.report.style import INK, MATH_LABELS, WIDTHS, LineStyle, tidy, within
from fedeas_flwr.runs.metrics import STARTUP, WALL_CLOCK

MAX_CLASSES_NAMED = 20
MAX_CELLS_NUMBERED = 300
_PHASES = {
    STARTUP: ("start-up", "#d9dee3"),
    "clients": ("waiting for clients", "#9aa5b1"),
    "aggregate": ("averaging and checks", "#3a8dde"),
    "end_wait": (MATH_LABELS[1], "#4f9d69"),
    "generating": ("generating", "#d1495b"),
    "training": ("training", INK),
}


def draw_accuracy(axes: Axes, groups: Sequence[Group]) -> None:
    """Draw accuracy, mean ± one standard deviation over seeds, and the last-20 mean at the right."""
    for group in groups:
        curve = 100 * group.curve("accuracy")
        score = group.spread("last_20")
        assert score is not None  # every round has an accuracy
        images = f" ({group.images_shown} images)" if group.images else ""
        width = WIDTHS.get(group.config.policy, 1.6)
        _draw_curve(axes, curve, group.style, width, f"{group.name}: {score.show(100)} %{images}")
        rounds = curve.shape[1]
        window = (max(1, rounds - 19), rounds)
        low, high = 100 * (score.mean - (score.sd or 0)), 100 * (score.mean + (score.sd or 0))
        axes.fill_between(window, low, high, color=group.style.colour, alpha=0.25, lw=0)
        axes.hlines(100 * score.mean, *window, color=group.style.colour, ls=(0, (2, 1.5)), lw=1.2)
    axes.set(xlabel="round", ylabel="test accuracy (%)")
    _rounds_axis(axes)
    within(axes, 100)


def draw_measure(axes: Axes, groups: Sequence[Group], measure: str, label: str, scale: float = 1.0) -> None:
    """Draw a metric of the rounds between 0 and ``scale``, for the groups that have it."""
    for group in groups:
        curve = scale * group.curve(measure)
        if not np.isnan(curve).all():
            _draw_curve(axes, curve, group.style, 1.6, group.name)
    axes.set_xlabel("round")
    axes.set_ylabel(label, parse_math=label in MATH_LABELS)
    _rounds_axis(axes)
    within(axes, scale)


def _draw_curve(axes: Axes, curve: FloatArray, style: LineStyle, width: float, label: str) -> None:
    """Draw the mean as a line (one round as a marker), and a band where at least two seeds have a value."""
    there = (~np.isnan(curve)).sum(axis=0)
    known = np.flatnonzero(there)
    rounds = known + 1
    mean = np.nanmean(curve[:, known], axis=0)
    alone = style.marker if len(rounds) == 1 else None
    axes.plot(rounds, mean, color=style.colour, ls=style.line, lw=width, marker=alone, label=label)
    several = there[known] > 1
    if several.any():
        spread = np.zeros_like(mean)
        spread[several] = np.nanstd(curve[:, known[several]], axis=0, ddof=1)
        band, where = (mean - spread, mean + spread), several.tolist()
        axes.fill_between(rounds, *band, where=where, color=style.colour, alpha=0.15, lw=0)


def _rounds_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    tidy(axes)


def draw_classes(axes: Axes, groups: Sequence[Group], classes: Sequence[str], baseline: Group | None) -> None:
    """Draw the accuracy of every class, sorted by the baseline; a bar joins the groups of a class."""
    first = baseline or groups[0]
    order = np.argsort(np.asarray(first.per_class))
    places, values = np.arange(len(order)), [100 * np.asarray(group.per_class)[order] for group in groups]
    if len(order) <= MAX_CLASSES_NAMED:
        # fmin and fmax ignore NaN, without a warning for a class that was never tested.
        lowest, highest = np.fmin.reduce(values, axis=0), np.fmax.reduce(values, axis=0)
        axes.vlines(places, lowest, highest, color="#d5dae0", lw=6, zorder=1)
        for group, row in zip(groups, values, strict=True):
            axes.plot(places, row, group.style.marker, ms=7, color=group.style.colour, label=group.name, zorder=2)
        _name_classes(axes, [classes[label] for label in order])
    else:
        for group, row in zip(groups, values, strict=True):
            axes.plot(places, row, color=group.style.colour, ls=group.style.line, lw=1.3, label=group.name)
        axes.set_xticks([])
    label = textwrap.fill(f"class, worst first for: {first.name}", 95, break_on_hyphens=False)
    axes.set(xlabel=label, ylabel=f"accuracy (%), {score_of(groups)}")
    tidy(axes, grid="y")
    within(axes, 100)


def _name_classes(axes: Axes, names: Sequence[str]) -> None:
    """Label the class axis; rotate the names if they would overlap."""
    slanting: dict[str, Any] = (
        {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(names) * max(map(len, names)) > 40 else {}
    )
    axes.set_xticks(range(len(names)), [shortened(name, 24) for name in names], **slanting)


def draw_cost(axes: Axes, groups: Sequence[Group]) -> None:
    """Draw last-20 accuracy against the number of generated images; small markers are single seeds."""
    most = max(group.images for group in groups)
    fewest = min((group.images for group in groups if group.images), default=0.0)
    if fewest and most > 20 * fewest:
        axes.set_xscale("symlog", linthresh=fewest)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for group in groups:
        score = group.spread("last_20")
        assert score is not None
        spread, marker = None if score.sd is None else 100 * score.sd, group.style.marker
        style: dict[str, Any] = {"ms": 9, "capsize": 4, "color": group.style.colour, "label": group.name}
        axes.errorbar(group.images, 100 * score.mean, spread, fmt=marker, **style)
        if len(score.values) > 1:
            images = [member.summary["total_generated"] for member in group.members]
            axes.plot(
                images, [100 * v for v in score.values], marker, ms=4, mfc="none", color=group.style.colour, alpha=0.7
            )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="total images generated", ylabel=f"accuracy (%), {score_of(groups)}")
    axes.margins(0.08)
    tidy(axes)
    within(axes, 100)


def draw_seconds(axes: Axes, groups: Sequence[Group]) -> None:
    """Draw two bars per group: the wall-clock time by phase, and the summed work of the clients."""
    places = np.arange(len(groups), dtype=float)
    for phases, shift in (((STARTUP, *WALL_CLOCK), -0.2), (CLIENT_WORK, 0.2)):
        left = np.zeros(len(groups))
        for phase in phases:
            seconds = np.array([group.seconds(phase) for group in groups])
            name, colour = _PHASES[phase]
            axes.barh(places + shift, seconds, 0.36, left=left, color=colour, label=name)
            left += seconds
    axes.set_yticks(places, [textwrap.fill(group.name, 30, break_on_hyphens=False) for group in groups])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set(xlabel="seconds; upper bar: wall-clock time, lower bar: summed work of the clients")
    tidy(axes, grid="x")


def draw_heat_map(
    axes: Axes, values: npt.NDArray[np.int64], classes: Sequence[str], title: str, tint: str, top: int | None = None
) -> None:
    """Draw a client × class heat map, with numbers if it has few cells."""
    top = max(int(values.max()) if top is None else top, 1)
    shown = np.ma.masked_equal(values, 0)  # zero is white, not the palest colour
    axes.imshow(shown, cmap=tint, aspect="auto", vmin=0, vmax=top, interpolation="nearest")
    axes.set(xlabel="class", ylabel="client")
    axes.set_title(textwrap.fill(title, 48, break_on_hyphens=False), fontsize=10)
    if len(classes) <= MAX_CLASSES_NAMED:
        _name_classes(axes, classes)
    if values.shape[0] <= MAX_CLASSES_NAMED:
        axes.set_yticks(range(values.shape[0]))
    axes.tick_params(length=0)
    axes.spines[:].set_color("#d5dae0")
    if values.size > MAX_CELLS_NUMBERED:
        return
    for (row, column), value in np.ndenumerate(values):
        if value:
            colour = "white" if value > 0.55 * top else INK
            axes.text(column, row, f"{value}", ha="center", va="center", fontsize=7, color=colour)
