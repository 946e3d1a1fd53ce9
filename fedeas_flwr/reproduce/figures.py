"""The paper's figures, drawn from label counts and from runs, with the paper's values next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from fedeas_flwr.allocation import IntArray, budget, fill_to, full_balance, normalised_entropy
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.planning import curves
from fedeas_flwr.planning.beta_selection import Limits, choose
from fedeas_flwr.planning.budget_path import BudgetPath
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.policies.registry import allocate
from fedeas_flwr.report.plan_figures import draw_concentration, draw_demand, draw_reduction, draw_selection
from fedeas_flwr.report.style import COLOURS, INK, LABELS, annotate, legend_above, tidy
from fedeas_flwr.reproduce import paper
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN, cell, column
from fedeas_flwr.reproduce.paper_comparison import last_20_of
from fedeas_flwr.reproduce.results import Measured, Results, Value
from fedeas_flwr.reproduce.tables import swept_methods
from fedeas_flwr.runs.metrics import score_name

POLICIES = ("fedavg", "uniform", "missing-only", "fedeas")
CONDITIONS = Limits(min_removed=0.5, max_synthetic=0.25)
"""The paper's two conditions on β: remove half of the imbalance, with at most a quarter of synthetic images."""


@dataclass(frozen=True)
class Setting:
    """The federation of the paper's figures, at some scale."""

    results: Results
    config: RunConfig
    path: BudgetPath
    betas: list[float]

    @property
    def beta(self) -> float:
        """Return FedEAS's default β here."""
        return self.config.beta

    @property
    def score(self) -> str:
        """Return the label of last-20 accuracy, which is the mean of all rounds if there are at most 20."""
        return f"accuracy (%), {score_name([self.config.rounds])}"

    @property
    def generated(self) -> IntArray:
        """Return the images that FedEAS generates, [K, C]."""
        return fill_to(self.path.counts, self.path.levels(self.beta))

    def last_20(self, method: str) -> Value:
        """Return a method's last-20 accuracy, ours and the paper's."""
        return last_20_of(self.results, f"{BETA_SWEEP_COLUMN}/{method}")


def setting_of(results: Results) -> Setting:
    """Return the federation of the figures."""
    config = cell(f"{BETA_SWEEP_COLUMN}/fedeas").config(results.scale, 1)
    betas = [cell(f"{BETA_SWEEP_COLUMN}/{method}").config(results.scale, 1).beta for method in swept_methods("fedeas")]
    return Setting(results, config, BudgetPath(planned_counts(config)), betas)


def _pair(first: str, second: str) -> tuple[Figure, Axes, Axes]:
    """Return two axes side by side, small enough that their text can be read on half a slide."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained", dpi=200)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.04})
    for axes, letter, title in ((left, "a", first), (right, "b", second)):
        axes.set_title(f"({letter}) {title}", loc="left", fontsize=12)
    return figure, left, right


def _level_titles(figure: Figure, message: str = "") -> Figure:
    """Put both titles at the same height, above the higher legend, and the message above them."""
    if message:
        figure.set_layout_engine("constrained", h_pad=0.09)
        figure.suptitle(message, fontsize=12, fontweight="bold", color=INK)
    figure.draw_without_rendering()
    legends = [legend.get_window_extent().height for axes in figure.axes if (legend := axes.get_legend())]
    for axes in figure.axes:
        axes.set_title(axes.get_title(loc="left"), loc="left", pad=8 + 72 * max(legends, default=0.0) / figure.dpi)
    return figure


def draw_motivation(setting: Setting) -> Figure:
    """Draw Fig. 1: each client's images for full balance, and the accuracy of one total in different places."""
    total = int(setting.generated.sum())
    figure, left, right = _pair("Images to generate per client", f"Accuracy with {total:,} images in all")
    draw_demand(left, setting.path, setting.generated, setting.beta)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    values = [setting.last_20(method) for method in POLICIES]
    _draw_bars(right, values)
    right.set_ylabel(setting.score)
    names = ["FedAvg,\nno images", *(LABELS[method].replace("-", "-\n") for method in POLICIES[1:])]
    right.set_xticks(range(len(names)), names)
    share = total / max(1, int(full_balance(setting.path.counts).sum()))
    message = f"FedEAS generates {100 * share:.0f} % of the images of full balance"
    fedavg, fedeas = values[0].mean, values[-1].mean
    if fedavg is not None and fedeas is not None:
        message += f": {fedeas - fedavg:+.1f} points over FedAvg"
    return _level_titles(figure, message)


def _draw_bars(axes: Axes, values: Sequence[Value]) -> None:
    """Draw ours as bars with the standard deviation over seeds, the paper's as diamonds."""
    for place, value in enumerate(values):
        colour = COLOURS["none" if value.cell.endswith("/fedavg") else value.cell.partition("/")[2]]
        if value.mean is not None:
            axes.bar(place, value.mean, 0.56, color=colour, yerr=value.sd or None, capsize=4, ecolor=INK)
            _write_on_bar(axes, place, value.mean, value.sd or 0.0)
        else:
            axes.annotate("not run yet", (place, 1), ha="center", fontsize=10, color=INK, rotation=90, va="bottom")
        if value.paper is not None:
            axes.plot(place + 0.5, value.paper, "D", ms=7, mfc="white", mec=INK, mew=1.4, zorder=4)
            annotate(axes, f"{value.paper:.1f}", (place + 0.5, value.paper), (0, -17), ha="center", fontsize=9)
    comparable = all(value.comparable for value in values)
    name = "the paper's" if comparable else "the paper's, on CIFAR-10"
    axes.plot([], [], "D", ms=7, mfc="white", mec=INK, mew=1.4, label=name)
    axes.bar([0], [0], color=COLOURS["fedeas"], label=f"ours, {_show_seeds(values)}")
    axes.set_ylim(0, 100 if max([v.mean or 0 for v in values]) > 85 else 92)
    axes.set_xlim(-0.5, len(values) - 0.2)
    tidy(axes, grid="y")
    legend_above(axes)


def _show_seeds(values: Sequence[Value]) -> str:
    """Return how many seeds the bars are means of, such as 1 seed or 1 to 3 seeds."""
    numbers = sorted({len(value.seeds) for value in values if value.seeds}) or [0]
    return counted(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"


def _write_on_bar(axes: Axes, place: int, mean: float, sd: float) -> None:
    """Write a bar's value above it, or inside the bar if its end is near the axis's end."""
    low = mean + sd > 85
    height, offset = (mean - sd, (0, -14)) if low else (mean + sd, (0, 4))
    text = annotate(axes, f"{mean:.1f}", (place, height), offset, ha="center", fontsize=11, color=INK)
    text.set_path_effects([withStroke(linewidth=3, foreground="white")] if low else [])


def draw_surrogate(setting: Setting) -> Figure:
    """Draw Fig. 2: how concentrated the imbalance is, and how fast it is removed."""
    figure, left, right = _pair("Imbalance concentration", "Imbalance reduction")
    draw_concentration(left, setting.path, setting.generated, setting.beta)
    draw_reduction(right, curves.reduction(setting.path, setting.betas), "fedeas", setting.beta)
    return _level_titles(figure)


def draw_overview(setting: Setting) -> Figure:
    """Draw Fig. 3 on real counts: entropy, budget, and where four policies put images at one client."""
    counts = setting.path.counts
    figure = Figure(figsize=(12.8, 7.2), layout="constrained", dpi=150)
    grid = figure.add_gridspec(2, 4, height_ratios=[1, 1.1])
    entropies, levels = normalised_entropy(counts), budget(counts, setting.beta)
    sizes = counts.sum(axis=1)
    # Of the larger half of the clients, the one with the most generated images relative to its largest class.
    shares = np.where(sizes >= np.median(sizes), setting.generated.sum(axis=1) / counts.max(axis=1), 0.0)
    one = int(np.argmax(shares))
    clients = np.arange(len(counts))
    for place, values, title, label in (
        (grid[0, :2], entropies, "1. Each client's label balance", "normalised entropy H̃"),
        (grid[0, 2:], levels, f"2. Its budget per class, √n̄ (1 − H̃) β with β = {setting.beta:g}", "budget b (images)"),
    ):
        axes = figure.add_subplot(place)
        colours = [COLOURS["fedeas"] if k == one else "#e3a5ad" for k in clients]
        axes.bar(clients, values, 0.8, color=colours)
        axes.set(xlabel="client", ylabel=label)
        axes.set_title(title, loc="left", fontsize=12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes, grid="y")
    _draw_one_client(figure, grid, setting, one)
    return figure


def _draw_one_client(figure: Figure, grid: Any, setting: Setting, one: int) -> None:
    counts = setting.path.counts
    top = 1.06 * (int(counts[one].max()) + int(allocate(counts, "uniform", beta=setting.beta)[one].max()))
    for place, policy in enumerate(("full-balance", "uniform", "missing-only", "fedeas")):
        axes = figure.add_subplot(grid[1, place])
        made = allocate(counts, policy, beta=setting.beta)[one]
        classes = np.arange(len(made))
        axes.bar(classes, counts[one], 0.8, color=COLOURS["none"], label="real")
        axes.bar(classes, made, 0.8, bottom=counts[one], color=COLOURS[policy], label="generated")
        axes.set_ylim(0, top)
        axes.set_title(f"{LABELS[policy]}: {made.sum():,} images", loc="left", fontsize=11)
        axes.set_xlabel("class")
        axes.set_xticks(classes[:: max(1, len(classes) // 10)])
        if policy == "fedeas":
            level = int(budget(counts, setting.beta)[one])
            axes.axhline(level, color=INK, ls="--", lw=1)
            annotate(axes, f"b = {level}", (len(made) - 0.5, level), (0, 4), ha="right")
        if place == 0:
            axes.set_ylabel(f"3. Images at client {one}")
        tidy(axes, grid="y")
        if policy != "full-balance":  # its bars fill the whole axes
            axes.legend(frameon=False, fontsize=9, loc="upper right" if counts[one].argmax() < 5 else "upper left")


def draw_convergence(setting: Setting) -> Figure:
    """Draw Fig. 4: accuracy by round, FedEAS and Missing-only with one budget, and when each reaches the threshold."""
    places = (BETA_SWEEP_COLUMN, DEFAULT_COLUMN)
    titles = [column(place).title("full") for place in places]
    if setting.results.scale != "full":
        configs = [cell(f"{place}/fedeas").config("smoke", 1) for place in places]
        titles = [f"digits, K = {c.clients}, α = {c.alpha:g}" for c in configs]
    figure, *both = _pair(*titles)
    for axes, place in zip(both, places, strict=True):
        _draw_curves(axes, setting, place)
    return _level_titles(figure, _rounds_message(setting, places))


def _rounds_message(setting: Setting, places: Sequence[str]) -> str:
    """Return the mean first round at the threshold, of both methods, or nothing if one has none."""
    found = []
    for method in ("fedeas", "missing-only"):
        firsts = [_first_rounds(setting.results.of(f"{place}/{method}"), setting.config.threshold) for place in places]
        if not all(firsts):
            return ""
        found += [f"{np.mean(rounds):.0f}" for rounds in firsts]
    few, many = (cell(f"{place}/fedeas").config(setting.results.scale, 1).clients for place in places)
    return (
        f"FedEAS reaches {100 * setting.config.threshold:.0f} % in round {found[0]} ({few} clients) and {found[1]} "
        f"({many}); Missing-only in {found[2]} and {found[3]}"
    )


def _first_rounds(runs: Sequence[Measured], threshold: float) -> list[int]:
    return [first for run in runs if (first := run.first_round_at(threshold)) is not None]


def _draw_curves(axes: Axes, setting: Setting, place: str) -> None:
    threshold = setting.config.threshold
    axes.axhline(100 * threshold, color=INK, ls="--", lw=1)
    for turn, method in enumerate(("missing-only", "fedeas")):
        runs = setting.results.of(f"{place}/{method}")
        colour, published = COLOURS[method], paper.ROUNDS_TO_70[place][method]
        note = f"; the paper's: {published}" if setting.results.scale == "full" else ""
        if not runs:
            axes.plot([], [], color=colour, ls=":", label=f"{LABELS[method]}: not run yet{note}")
            continue
        reached = _draw_band(axes, runs, colour, threshold, turn)
        axes.lines[-1].set_label(f"{LABELS[method]}: {reached}{note}")
    axes.set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, setting.config.rounds))
    axes.set_ylim(0, 100 if threshold > 0.7 else 82)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)
    legend_above(axes, f"First round at {100 * threshold:.0f} %:")
    if not any(setting.results.of(f"{place}/{method}") for method in ("missing-only", "fedeas")):
        _say_not_run(axes)


def _say_not_run(axes: Axes) -> None:
    axes.text(0.5, 0.55, "not run yet", transform=axes.transAxes, ha="center", fontsize=12, color=INK)


def _draw_band(axes: Axes, runs: Sequence[Measured], colour: str, threshold: float, turn: int) -> str:
    """Draw the mean over seeds, their range, and a dotted line at the first round at the threshold; return that round.

    The dots of the second ``turn`` lie between those of the first, so that both show if the rounds are the same.
    """
    found = 100 * np.array([run.accuracies for run in runs])
    rounds, mean = np.arange(1, found.shape[1] + 1), found.mean(axis=0)
    if len(runs) > 1:
        axes.fill_between(rounds, found.min(axis=0), found.max(axis=0), color=colour, alpha=0.18, lw=0)
    firsts = _first_rounds(runs, threshold)
    if firsts:
        axes.axvline(float(np.mean(firsts)), color=colour, ls=(3.0 * turn, (2, 4)), lw=1.6)
    axes.plot(rounds, mean, color=colour, lw=1.9)
    return ", ".join(map(str, firsts)) if firsts else "never"


def draw_sensitivity(setting: Setting) -> Figure:
    """Draw Fig. 5: accuracy as the budget grows, FedEAS and Uniform; and which β the two conditions allow."""
    figure, left, right = _pair("Accuracy at matched budgets", "Budget parameter selection")
    totals = [setting.path.at(beta).images for beta in setting.betas]
    values = {policy: [setting.last_20(method) for method in swept_methods(policy)] for policy in ("fedeas", "uniform")}
    for policy, marker in (("fedeas", "o"), ("uniform", "s")):
        _draw_budgets(left, values[policy], totals, LABELS[policy], COLOURS[policy], marker)
    left.set(xlabel="images generated in all", ylabel=setting.score)
    left.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    left.set_xlim(left=0)
    tidy(left)
    if left.has_data():
        legend_above(left)
    else:
        _say_not_run(left)
    choice = choose(setting.path, CONDITIONS, setting.betas)
    draw_selection(right, setting.path, setting.betas, setting.beta, choice)
    pairs = [(a.mean, b.mean) for a, b in zip(*values.values(), strict=True)]
    both = [(ours, other) for ours, other in pairs if ours is not None and other is not None]
    if not both:
        return _level_titles(figure)
    message = f"FedEAS is above Uniform at {sum(ours > other for ours, other in both)} of {len(both)} matched budgets"
    fitting = [f"{point.beta:g}" for point, broken in choice.grid if not broken]
    return _level_titles(figure, message + (f"; β = {', '.join(fitting)} meets both conditions" if fitting else ""))


def _draw_budgets(
    axes: Axes, values: Sequence[Value], totals: Sequence[int], name: str, colour: str, marker: str
) -> None:
    # A β without runs leaves a gap; one seed has no standard deviation.
    means = [np.nan if value.mean is None else value.mean for value in values]
    deviations = [np.nan if value.sd is None else value.sd for value in values]
    if not np.isnan(means).all():
        axes.plot(totals, means, color=colour, marker=marker, lw=1.9, label=f"{name}, ours")
        axes.errorbar(totals, means, deviations, fmt="none", ecolor=colour, capsize=4)
    if all(value.comparable for value in values):
        published, label = [value.paper or np.nan for value in values], f"{name}, the paper's"
        axes.plot(totals, published, marker, ls="--", mfc="white", color=colour, alpha=0.75, label=label)


# Theorem 1: h(r) = ((1 − r) / (1 + r))²,  |h′(r)| = 4 (1 − r) / (1 + r)³
def draw_closed_form() -> Figure:
    """Draw the supplement's B: the heterogeneity left between two clients of one class each, by generation ratio."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=150)
    axes = figure.subplots()
    ratio = np.linspace(0, 1, 201)
    axes.plot(ratio, residual(ratio), color=COLOURS["fedeas"], lw=2.2, label="h(r) = ((1 − r) / (1 + r))²")
    for r in (0.1, 0.25, 0.5):
        axes.plot(r, residual(r), "o", color=COLOURS["fedeas"])
        annotate(axes, f"r = {r:g}: {residual(r):.0%} left", (r, residual(r)), (9, 5), fontsize=10, color=INK)
    axes.plot(ratio, 1 - 4 * ratio, color=INK, ls=":", lw=1.2, label="slope at r = 0: −4")
    axes.set(xlabel="generation ratio r = m / n", ylabel="heterogeneity left, h(r)", xlim=(0, 1.01), ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(axes)
    axes.legend(frameon=False, loc="upper right")
    return figure


def residual(ratio: Any) -> Any:
    """Return h(r), the share of the heterogeneity that is left at a generation ratio."""
    return ((1 - ratio) / (1 + ratio)) ** 2
