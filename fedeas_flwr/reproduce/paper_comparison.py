"""A number of the paper next to ours, and how both are written.

Text for tables is Markdown with ``<br>`` and ``<ins>`` (underlined); page.py also turns it into HTML.
"""

from __future__ import annotations

from collections.abc import Callable

from fedeas_flwr.common.text import with_sign
from fedeas_flwr.reproduce import paper
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN
from fedeas_flwr.reproduce.results import Budget, Measured, Results, Value

NONE = "–"


def value_of(
    results: Results,
    name: str,
    measure: str,
    of: Callable[[Measured], float | None],
    published: float | None,
    digits: int = 2,
    form: str = "",
) -> Value:
    """Return what a cell's runs measured, next to the paper's number; with ``form``, only runs with that form of Γ̂."""
    pairs = [(run.seed, number) for run in results.of(name, form) if (number := of(run)) is not None]
    ours, seeds = tuple(number for _, number in pairs), tuple(seed for seed, _ in pairs)
    return Value(name, measure, ours, seeds, published, digits, comparable=results.scale == "full")


def derived(value: Value, measure: str, number: float | None, published: float | None, digits: int = 2) -> Value:
    """Return a number computed from a cell's value, with its seeds, next to the paper's."""
    ours = () if number is None else (number,)
    return Value(value.cell, measure, ours, value.seeds if ours else (), published, digits, value.comparable)


def difference(first: Value, second: Value) -> float | None:
    """Return our first mean minus our second, or None if one is missing."""
    return None if first.mean is None or second.mean is None else first.mean - second.mean


def last_20_of(results: Results, name: str) -> Value:
    """Return a cell's mean accuracy of the last 20 rounds, in %."""
    place, _, method = name.partition("/")
    published = paper.at(paper.LAST_20, method, place)
    if published is None and place == BETA_SWEEP_COLUMN:
        small = {key: row[0] for key, row in paper.BETA_SWEEP.items()} | {k: v[1] for k, v in paper.ABLATION.items()}
        published = small.get(method)
    return value_of(results, name, "last-20 %", lambda run: 100 * run.last_20, published)


def peak_of(results: Results, name: str) -> Value:
    """Return a cell's best accuracy of any round, in %."""
    place, _, method = name.partition("/")
    published = paper.at(paper.PEAK, method, place)
    if name == paper.FEDEAS_AND_SCAFFOLD:
        published = paper.FEDEAS_AND_SCAFFOLD_PEAK
    return value_of(results, name, "peak %", lambda run: 100 * run.peak, published)


def budget_of(results: Results, name: str) -> Budget | None:
    """Return the images of a cell's runs with the paper's total at full scale, else the plan's; None without runs."""
    place, _, method = name.partition("/")
    runs, published = results.of(name), paper.images(method, place) if results.scale == "full" else None
    if not runs:
        return None
    images = tuple(run.images for run in runs)
    if published is not None:
        return Budget(name, images, published, "paper")
    return Budget(name, images, max(run.planned_images() for run in runs), "plan")


def show_ours(value: Value) -> str:
    """Write mean ± standard deviation, or a dash."""
    if value.mean is None:
        return NONE
    shown = f"{value.mean:.{value.digits}f}".replace("-", "−")
    return shown if value.sd is None else f"{shown} ± {value.sd:.{value.digits}f}"


def show_paper(value: Value) -> str:
    """Write the paper's number, or a dash."""
    return NONE if value.paper is None else f"{value.paper:.{value.digits}f}"


def show_seeds(value: Value) -> str:
    """Write the seeds, or a dash."""
    return ", ".join(map(str, value.seeds)) or NONE


def compared(value: Value) -> list[str]:
    """Write ours, the seeds, the paper's number and the difference, each for a column of its own."""
    return [show_ours(value), show_seeds(value), show_paper(value), signed(value.difference, value.digits)]


def signed(number: float | None, digits: int) -> str:
    """Write a number with its sign, or a dash."""
    return NONE if number is None else with_sign(number, digits)


def format_cell(value: Value, mark: str = "{}") -> str:
    """Write one cell of a large table: ours above, the seeds, the paper's number and the difference below."""
    ours = mark.format(show_ours(value)) if value.mean is not None else NONE
    difference = f", {signed(value.difference, value.digits)}" if value.difference is not None else ""
    below = [f"{len(value.seeds)} seeds"] if len(value.seeds) > 1 else []
    below += [f"paper {show_paper(value)}{difference}"] if value.paper is not None else []
    return f"{ours}<br>{'; '.join(below)}" if below else ours


def show_budget(budget: Budget | None, published: int | None = None) -> str:
    """Write the number of images that runs generated, with ✓ or ✗ for what they should have generated."""
    if budget is None:
        return f"{NONE}<br>paper {published:,}" if published is not None else NONE
    found = sorted(set(budget.images))
    shown = ", ".join(f"{images:,}" for images in found)
    if budget.met:
        return f"{shown} ✓" if budget.wanted else shown
    return f"{shown} ✗ ({budget.by}: {budget.wanted:,})"
