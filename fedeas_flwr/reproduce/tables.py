"""The paper's tables with our numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fedeas_flwr.report import page as pages
from fedeas_flwr.reproduce import paper
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, BETAS, FULL, METHODS, Cell, cell, column
from fedeas_flwr.reproduce.paper_comparison import (
    NONE,
    budget_of,
    compared,
    derived,
    difference,
    format_cell,
    last_20_of,
    peak_of,
    show_budget,
    show_ours,
    value_of,
)
from fedeas_flwr.reproduce.results import Budget, Results, Value
from fedeas_flwr.runs.metrics import efficiency

LARGE = tuple(paper.LAST_20)
"""Methods in the rows of the two large tables."""


@dataclass(frozen=True)
class Table(pages.Table):
    """A table of a report, with the numbers in it."""

    rows: list[list[str]] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)

    def add(self, row: Sequence[str], *numbers: Value | Budget | None) -> None:
        """Append a row and record the numbers in it."""
        self.rows.append(list(row))
        self.values.extend(number for number in numbers if isinstance(number, Value))
        self.budgets.extend(number for number in numbers if isinstance(number, Budget))


# ------------------------------------------------------------------------------------------- Table 1 and the peaks

Of = Callable[[Results, str], Value]


def large_table(results: Results, columns: Sequence[str], of: Of) -> Table:
    """Return methods by columns, as in the paper's Table 1 and its table of peaks.

    Our best and second best of a complete column are bold and underlined, without Full-Balance.
    """
    values = {name: of(results, name) for name in large_cells(columns)}
    marks = _marks(values, columns)
    table = Table(["Method", *(column(place).title(results.scale) for place in columns)])
    for method in LARGE:
        names = [f"{place}/{method}" for place in columns]
        found = [format_cell(values[name], marks.get(name, "{}")) if name in values else NONE for name in names]
        table.add([METHODS[method].label, *found])
    table.values.extend(values.values())
    for method in ("fedeas", "full-balance"):
        budgets = [budget_of(results, f"{place}/{method}") for place in columns]
        shown = [show_budget(b, paper.images(method, place)) for b, place in zip(budgets, columns, strict=True)]
        table.add([f"{METHODS[method].label} total gen.", *shown], *budgets)
    table.add(["Minutes per run", *(minutes(results, large_cells([place])) for place in columns)])
    checked = [budget_of(results, f"{place}/{method}") for place in columns for method in ("uniform", "missing-only")]
    table.budgets.extend(budget for budget in checked if budget)
    return table


def minutes(results: Results, names: Iterable[str]) -> str:
    """Return the range of the minutes that the runs of some cells took, without start-up."""
    spent = [run.seconds / 60 for name in names for run in results.of(name)]
    ends = dict.fromkeys(f"{end:.1f}" for end in (min(spent), max(spent))) if spent else [NONE]
    return " to ".join(ends)


def large_cells(columns: Sequence[str]) -> list[str]:
    """Return the names of a large table's cells: all that the paper has."""
    return [f"{c}/{m}" for c in columns for m in LARGE if paper.at(paper.LAST_20, m, c) is not None]


def _marks(values: dict[str, Value], columns: Sequence[str]) -> dict[str, str]:
    marks: dict[str, str] = {}
    for place in columns:
        means = {n: v.mean for n, v in values.items() if n.startswith(f"{place}/") and not n.endswith("/full-balance")}
        if any(mean is None for mean in means.values()):
            continue
        best, second = sorted(means, key=lambda name: -(means[name] or 0.0))[:2]
        marks |= {best: "**{}**", second: "<ins>{}</ins>"}
    return marks


def column_table(results: Results, place: str) -> Table:
    """Return one column with a row per method: last-20 and peak accuracy, the seeds, the images, the minutes."""
    ours = ["Ours, last-20 %", "Seeds", "Paper", "Difference", "Ours, peak %", "Paper", "Difference"]
    table = Table(["Method", *ours, "Images", "Minutes"])
    for name in large_cells([place]):
        last, best, budget = last_20_of(results, name), peak_of(results, name), budget_of(results, name)
        peak, _, *peaks = compared(best)
        method = name.partition("/")[2]
        images = show_budget(budget) if budget else f"{NONE} (paper {paper.images(method, place):,})"
        row = [METHODS[method].label, *compared(last), peak, *peaks, images, minutes(results, [name])]
        table.add(row, last, best, budget)
    return table


# ----------------------------------------------------------------------------------- β sweep, ablation, Γ̂ (K = 20)


def beta_table(results: Results) -> Table:
    """Return the sweep of β with the efficiency η, as in the supplement's F."""
    table = Table(["Method", "Last-20 avg.", "Total gen.", "ΔFedAvg", "η", "Minutes"])
    base = last_20_of(results, f"{BETA_SWEEP_COLUMN}/fedavg")
    for method, (_, _, published_gain, published_eta) in paper.BETA_SWEEP.items():
        name = f"{BETA_SWEEP_COLUMN}/{method}"
        last, budget = last_20_of(results, name), budget_of(results, name)
        images = budget.images[0] if budget else 0
        gain = difference(last, base) if images else None
        gains = derived(last, "ΔFedAvg", gain, published_gain)
        etas = derived(last, "η", None if gain is None else efficiency(gain, images), published_eta, 3)
        total = show_budget(budget, paper.images(method, BETA_SWEEP_COLUMN))
        shown = [format_cell(last), total, format_cell(gains), format_cell(etas), minutes(results, [name])]
        table.add([_with_beta(results, name), *shown], last, gains, etas, budget)
    return table


def _with_beta(results: Results, name: str) -> str:
    """Return a row's label with its β at this scale."""
    label, config = cell(name).method.label, cell(name).config(results.scale, 1)
    return f"{label} β = {config.beta:g}" if config.policy in ("fedeas", "uniform") else label


def ablation_table(results: Results) -> Table:
    """Return FedEAS without the entropy factor and without the square root, as in the paper's Table 2."""
    factors = {"fedeas-b8": ("yes", "√n̄"), "without-entropy": ("no", "√n̄"), "linear": ("yes", "n̄")}
    table = Table(["Variant", "Entropy", "Size factor", "Gen.", "Accuracy", "Minutes"])
    for method, about in factors.items():
        name = f"{BETA_SWEEP_COLUMN}/{method}"
        last, budget = last_20_of(results, name), budget_of(results, name)
        label = f"{METHODS[method].label} (β = {cell(name).config(results.scale, 1).beta:g})"
        shown = [show_budget(budget, paper.images(method, BETA_SWEEP_COLUMN)), format_cell(last)]
        table.add([label, *about, *shown, minutes(results, [name])], last, budget)
    return table


def gamma_table(results: Results) -> Table:
    """Return Γ̂ by policy as in the supplement's A, in the paper's form and over the trainable parameters alone."""
    methods = list(paper.GAMMA_HAT)
    table = Table(["", *(METHODS[method].label for method in methods)])
    last = {m: last_20_of(results, f"{BETA_SWEEP_COLUMN}/{m}") for m in methods}
    budgets = {m: budget_of(results, f"{BETA_SWEEP_COLUMN}/{m}") for m in methods}
    table.add(["Last-20 avg. (%)", *(format_cell(last[m]) for m in methods)], *last.values())
    shown = [show_budget(budgets[m], paper.images(m, BETA_SWEEP_COLUMN)) for m in methods]
    table.add(["Total gen.", *shown], *budgets.values())
    for form, words in (("all-state", "with BatchNorm's counters"), ("trainable", "trainable parameters")):
        found = {m: _gamma_hat(results, f"{BETA_SWEEP_COLUMN}/{m}", form) for m in methods}
        less = {m: _reduction(found[m], found["fedavg"]) for m in methods}
        if form == "trainable" and not any(value.ours for value in found.values()):
            continue  # neither our runs nor the paper measured this form
        table.add([f"Γ̂ (med.), {words}", *(_show_gamma(found[m]) for m in methods)], *found.values())
        table.add(["Γ̂ reduction (%)", *(format_cell(less[m]) for m in methods)], *less.values())
    return table


def _gamma_hat(results: Results, name: str, form: str) -> Value:
    published = paper.GAMMA_HAT[name.partition("/")[2]][0] if form == "all-state" else None
    return value_of(results, name, f"Γ̂, {form}", lambda run: run.gamma_hat, published, form=form)


def _reduction(value: Value, base: Value) -> Value:
    less = None
    if value.mean is not None and base.mean and value.cell != base.cell:
        less = 100 * (1 - value.mean / base.mean)
    published = paper.GAMMA_HAT[value.cell.partition("/")[2]][1] if value.paper is not None else None
    return derived(value, f"{value.measure}, reduction %", less, published, 1)


def _show_gamma(value: Value) -> str:
    ours = NONE if value.mean is None else f"{value.mean:.3g}"
    return f"{ours}<br>paper {value.paper:.3g}" if value.paper is not None else ours


def cell_table(results: Results, cells: Iterable[Cell]) -> Table:
    """Return some cells, one per row."""
    table = Table(["Cell", "Ours, last-20 %", "Seeds", "Paper", "Difference", "Peak %", "Images"])
    for one in cells:
        last, best, budget = last_20_of(results, one.name), peak_of(results, one.name), budget_of(results, one.name)
        table.add([one.name, *compared(last), show_ours(best), show_budget(budget)], last, best, budget)
    return table


def swept_methods(policy: str) -> list[str]:
    """Return the names of a policy's methods in the sweep of β."""
    return [policy if beta == FULL["beta"] else f"{policy}-b{beta}" for beta in BETAS]
