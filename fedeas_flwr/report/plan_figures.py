"""Draw a plan as the paper's Figs. 1(a), 2(a), 2(b) and 5(b), from label counts only."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from fedeas_flwr.allocation import IntArray, fill_to
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.planning import curves
from fedeas_flwr.planning.beta_selection import SHARES, BetaChoice, show
from fedeas_flwr.planning.budget_path import BudgetPath
from fedeas_flwr.report.style import COLOURS, INK, annotate, label_of, legend_above, tidy

PATH_POINTS = 240
MAX_BARS_NAMED = 30
REMOVED = "imbalance removed, 1 − I(B) / I(0)"


def draw_plan(path: BudgetPath, beta: float, folder: Path, choice: BetaChoice | None = None) -> list[Path]:
    """Draw the effect of the plan's β as demand, concentration, reduction and beta-selection.png; return the files.

    Of a choice of β, the limits and the window are drawn and the grid is marked.
    """
    drawn = plan_figures(path, beta, choice)
    for name, figure in drawn.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        atomic_write(folder / name, buffer.getvalue())
    return [folder / name for name in drawn]


def plan_figures(path: BudgetPath, beta: float, choice: BetaChoice | None = None) -> dict[str, Figure]:
    """Return the figures of `draw_plan` by file name."""
    generated = fill_to(path.counts, path.levels(beta), path.strict_mean)
    if not generated.any():
        raise ValueError(f"figures: nothing would be generated at β = {beta:g}, so there is nothing to draw")
    betas = [point.beta for point, _ in choice.grid] if choice and choice.grid else curves.marked_betas(beta)
    betas = sorted({*betas, beta} - {0.0})
    drawings: dict[str, Callable[[Axes], None]] = {
        "demand.png": lambda axes: draw_demand(axes, path, generated, beta),
        "concentration.png": lambda axes: draw_concentration(axes, path, generated, beta),
        "reduction.png": lambda axes: draw_reduction(axes, curves.reduction(path, betas), path.policy, beta),
        "beta-selection.png": lambda axes: draw_selection(axes, path, betas, beta, choice),
    }
    figures = {name: Figure(figsize=(6.4, 4.2), layout="constrained", dpi=160) for name in drawings}
    for name, draw in drawings.items():
        draw(figures[name].subplots())
    return figures


# Fig. 1(a)
def draw_demand(axes: Axes, path: BudgetPath, generated: IntArray, beta: float) -> None:
    """Draw each client's budget in front of its demand for full balance (hatched), both from 0."""
    needed, given = curves.demand(path.counts, generated)
    clients = np.arange(len(needed))
    label = f"full balance, {needed.sum():,} images"
    axes.bar(clients, needed, 0.8, fc="white", ec=COLOURS["none"], hatch="////", lw=0.8, label=label)
    name = f"{label_of(path.policy)} (β = {beta:g}), {given.sum():,} images"
    axes.bar(clients, given, 0.8, color=_colour(path.policy), label=name)
    axes.set_ylim(0, 1.05 * max(1, int(needed.max()), int(given.max())))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="client", ylabel="images to generate")
    if len(clients) <= MAX_BARS_NAMED:
        axes.set_xticks(clients)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes, grid="y")
    axes.margins(x=0.01)
    legend_above(axes)


# Fig. 2(a)
def draw_concentration(axes: Axes, path: BudgetPath, generated: IntArray, beta: float) -> None:
    """Draw the cumulative shares of imbalance and budget, most imbalanced clients first."""
    held, received = curves.concentration(path.counts, generated)
    clients = np.arange(len(held))
    axes.plot(clients, held, "-o", ms=4, color=INK, label="imbalance score held")
    name = f"{label_of(path.policy)} budget received (β = {beta:g})"
    axes.plot(clients, received, "-s", ms=4, color=_colour(path.policy), label=name)
    quarter = max(1, len(path.counts) // 4)
    axes.axvline(quarter, color=INK, ls=":", lw=1)
    who = f"the {quarter} most imbalanced" if quarter > 1 else "the most imbalanced"
    text = f"{who}:\n{held[quarter]:.1%} of the score, {received[quarter]:.1%} of the budget"
    if quarter < len(path.counts):  # otherwise it is 100 %
        place = (quarter, min(held[quarter], received[quarter]))
        annotate(axes, text, place, (10, -34), fontsize=9, color=INK)
    axes.set(xlabel="clients, most imbalanced first", ylabel="cumulative share", ylim=(0, 1.03))
    axes.set_xlim(0, len(path.counts))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(axes)
    legend_above(axes)


# Fig. 2(b)
def draw_reduction(axes: Axes, found: curves.Reduction, policy: str, beta: float) -> None:
    """Compare policies at the same number of images; the arrow is the gap to Uniform at the plan's β."""
    # Waterfill and greedy almost coincide: a wide pale line under a thin dashed one shows both.
    styles: dict[str, dict[str, Any]] = {
        policy: {"lw": 1.8, "marker": "o"},
        "uniform": {"lw": 1.8, "marker": "s"},
        "greedy": {"lw": 1.4, "ls": (0, (5, 3))},
        "waterfill": {"lw": 4.5, "alpha": 0.35},
    }
    for name, style in styles.items():
        if name in found.curves:
            images, removed = zip(*found.curves[name], strict=True)
            under = 1 if name == "waterfill" else 2
            axes.plot(images, removed, color=_colour(name), label=label_of(name), markevery=[], zorder=under, **style)
    for name, points in found.marks.items():
        images, removed = zip(*points, strict=True)
        axes.plot(images, removed, styles[name]["marker"], color=_colour(name), zorder=3)
    lines = [np.array(curve).T for curve in found.curves.values()]
    for marked, (made, _) in zip(found.betas, found.marks[policy], strict=True):
        above = max(float(np.interp(made, *line)) for line in lines)
        if made:  # no label at the origin
            _name_beta(axes, marked, (made, above), bold=marked == beta)
    if beta in found.betas:
        _draw_gap(axes, found, policy, found.betas.index(beta))
    axes.set(xlabel="total images generated", ylabel=REMOVED)
    axes.set_xlim(left=0)
    highest, lowest = max(line[1].max() for line in lines), min(line[1].min() for line in lines)
    axes.set_ylim(min(0.0, lowest), 1.12 * highest)  # labels of β are above the highest curve
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tidy(axes)
    legend_above(axes)


def _draw_gap(axes: Axes, found: curves.Reduction, policy: str, i: int) -> None:
    (images, high), (_, low) = found.marks[policy][i], found.marks["uniform"][i]
    if high <= low:
        return
    axes.annotate("", (images, high), (images, low), arrowprops={"arrowstyle": "<->", "color": INK})
    text = f"+{100 * (high - low):.1f} points\nat {images:,}"
    annotate(axes, text, (images, low), (4, -9), fontsize=9, va="top", color=INK)


def _name_beta(axes: Axes, beta: float, point: tuple[float, float], bold: bool) -> Annotation:
    """Label β above and to the left of the highest curve: all curves rise, so it overlaps none."""
    style: dict[str, Any] = {"ha": "right", "fontsize": 9, "color": INK, "fontweight": "bold" if bold else "normal"}
    text = annotate(axes, f"β = {beta:g}", point, (-8, 10), zorder=5, **style)
    text.set_path_effects([withStroke(linewidth=3, foreground="white")])  # readable on top of a line
    return text


def _off_the_limits(axes: Axes, names: Sequence[Annotation]) -> None:
    """Move labels that overlap a limit's line to the lower right of their point, away from the curve."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # the layout sets text positions
    limits = [line.get_window_extent() for line in axes.lines if line.get_linestyle() == "--"]
    for text in names:
        if any(text.get_window_extent().overlaps(limit) for limit in limits):
            text.set(position=(8, -14), ha="left")


# Fig. 5(b)
def draw_selection(axes: Axes, path: BudgetPath, betas: list[float], beta: float, choice: BetaChoice | None) -> None:
    """Draw the removed share against the synthetic share for increasing β, with the limits and the allowed region."""
    colour = _colour(path.policy)
    last = max([*betas, beta])
    line = [path.at(float(b)) for b in np.linspace(0, 1.08 * last, PATH_POINTS)]
    shares, removed = [p.synthetic for p in line], [p.removed for p in line]
    axes.plot(shares, removed, color=colour, lw=1.8, label=f"{label_of(path.policy)}, increasing β")
    axes.set_xlim(0, 1.04 * shares[-1] or 1)
    axes.set_ylim(0, 1.1 * max(removed) or 1)
    if choice:
        _draw_limits(axes, path, choice)
    names = []
    for point in map(path.at, betas):
        fits = choice is None or any(low <= point.beta <= high for low, high in choice.windows)
        face = colour if fits else "white"
        axes.plot(point.synthetic, point.removed, "o", ms=7, mfc=face, mec=colour, mew=1.6, zorder=4)
        if point.images:
            names.append(_name_beta(axes, point.beta, (point.synthetic, point.removed), bold=point.beta == beta))
    axes.set(xlabel="synthetic share of the training data", ylabel=REMOVED)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    tidy(axes)
    legend_above(axes)
    _off_the_limits(axes, names)


def _draw_limits(axes: Axes, path: BudgetPath, choice: BetaChoice) -> None:
    (_, right), (_, top) = axes.get_xlim(), axes.get_ylim()
    least = choice.limits.min_removed or 0.0
    ceiling = right
    if choice.limits.min_removed is not None:
        axes.axhline(least, color=INK, ls="--", lw=1)
        annotate(axes, f"at least {100 * least:g} %", (0, least), (4, 4), fontsize=9)
    for name in choice.limits.ceilings():
        share = _as_synthetic_share(path, choice, name)
        ceiling = min(ceiling, share)
        if share < right:
            axes.axvline(share, color=INK, ls="--", lw=1)
            limit = choice.limits.given()[name]
            most = f"{100 * limit:.12g} %" if name in SHARES else f"{limit:,.12g} {name.removeprefix('max_')}"
            annotate(axes, f"at most {most}", (share, 0), (4, 5), rotation=90, fontsize=9)
    colour, allowed = COLOURS["full-balance"], show(choice.windows, choice.end)
    axes.fill_between([0, ceiling], least, top, color=colour, alpha=0.18, lw=0, label=allowed)


def _as_synthetic_share(path: BudgetPath, choice: BetaChoice, name: str) -> float:
    """Return an upper limit as a synthetic share."""
    limit = choice.limits.given()[name]
    if name == "max_synthetic":
        return limit
    if name == "max_seconds" and choice.speed:
        limit = choice.speed.batch * (limit // choice.speed.seconds_a_batch)
    return limit / max(1.0, float(path.counts.sum()) + limit)


def _colour(policy: str) -> str:
    return COLOURS.get(policy, COLOURS["fedeas"])
