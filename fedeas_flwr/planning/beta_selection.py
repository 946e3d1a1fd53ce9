"""Choose β from limits and label counts: find the β that satisfy the limits, recommend one, or name contradictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedeas_flwr.allocation import check_number
from fedeas_flwr.common.text import counted
from fedeas_flwr.planning.budget_path import BudgetPath, Point, Window, bisect_last_true, where_removed


@dataclass(frozen=True)
class GeneratorSpeed:
    """Speed of a generator, which makes images in whole batches."""

    batch: int
    seconds_a_batch: float

    def seconds(self, images: int) -> float:
        """Return the seconds that generating `images` images takes."""
        return math.ceil(images / self.batch) * self.seconds_a_batch


@dataclass(frozen=True)
class Limits:
    """Limits that β must satisfy; None: no limit. The paper's two conditions are ``Limits(0.5, 0.25)``."""

    min_removed: float | None = None
    max_synthetic: float | None = None
    max_images: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if not math.isfinite(value) or value < 0 or (name in SHARES and value > 1):
                allowed = "a share from 0 to 1" if name in SHARES else "a finite number of at least 0"
                raise ValueError(f"{option(name)} {value}: must be {allowed}")

    def given(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def ceilings(self) -> list[str]:
        """Return the names of the limits that bound β from above."""
        return [name for name in self.given() if name != "min_removed"]


SHARES = ("min_removed", "max_synthetic")


def option(name: str) -> str:
    """Return a limit's name on the command line."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class BetaChoice:
    """The β that satisfy the limits, the recommended one with its reason, or the contradictions."""

    limits: Limits
    windows: list[Window]
    end: float
    grid: list[tuple[Point, list[str]]]  # each with the limits that it breaks
    recommended: float | None
    why: str
    contradictions: list[str]
    speed: GeneratorSpeed | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values; a window without upper end has ``high`` None."""
        return {
            "limits": self.limits.given(),
            "windows": [{"low": low, "high": None if high >= self.end else high} for low, high in self.windows],
            "grid": [self._row(point) | {"breaks": breaks} for point, breaks in self.grid],
            "recommended": self.recommended,
            "why": self.why,
            "contradictions": self.contradictions,
        }

    def _row(self, point: Point) -> dict[str, Any]:
        row = {"beta": point.beta, "total": point.images, "synthetic_fraction": point.synthetic}
        return row | {"removed": point.removed} | ({"seconds": self.speed.seconds(point.images)} if self.speed else {})


def choose(
    path: BudgetPath, limits: Limits, grid: Sequence[float] = (), speed: GeneratorSpeed | None = None
) -> BetaChoice:
    """Find the β that satisfy the limits and recommend one.

    If a limit bounds β from above, the recommended β removes most, since the limits already bound the cost; with
    ``min_removed`` alone it is the cheapest. Without a grid of allowed values, those of two significant digits are
    considered. ``max_seconds`` needs the generator's speed.
    """
    if not limits.given():
        raise ValueError(f"no limit: give {', '.join(map(option, vars(limits)))} or several of them")
    if limits.max_seconds is not None and speed is None:
        raise ValueError(f"{option('max_seconds')} {limits.max_seconds:g}: needs the generator's speed")
    for beta in grid:
        check_number("grid: beta", beta)
    tops = {name: _top(path, limits, name, speed) for name in limits.ceilings()}
    top, least = min([path.end, *tops.values()]), limits.min_removed
    windows = [(0.0, top)] if least is None else where_removed(path, least, top)
    rows = [(point, broken(point, limits, speed)) for point in map(path.at, sorted(set(grid)))]
    if not windows:
        return BetaChoice(limits, [], path.end, rows, None, "", _contradictions(path, limits, tops), speed)
    if not grid:
        values = _round_values(windows)
        fitting = [path.at(beta) for beta in (values if limits.ceilings() else values[:1])]  # the smallest is cheapest
    elif not (fitting := [point for point, breaks in rows if not breaks]):
        text = f"grid {', '.join(f'{point.beta:g}' for point, _ in rows)}: no β of it lies in {show(windows, path.end)}"
        return BetaChoice(limits, windows, path.end, rows, None, "", [text], speed)
    best, why = _best(fitting, limits, bool(grid))
    return BetaChoice(limits, windows, path.end, rows, best.beta, why, [], speed)


def broken(point: Point, limits: Limits, speed: GeneratorSpeed | None = None) -> list[str]:
    """Return the names of the limits that a β breaks."""
    return [name for name in limits.given() if _breaks(point, limits, name, speed)]


def _top(path: BudgetPath, limits: Limits, name: str, speed: GeneratorSpeed | None) -> float:
    """Return the largest β that one limit allows."""
    return bisect_last_true(lambda beta: not _breaks(path.at(beta), limits, name, speed), path.end)


def _breaks(point: Point, limits: Limits, name: str, speed: GeneratorSpeed | None) -> bool:
    limit = limits.given()[name]
    if name == "min_removed":
        return point.removed < limit
    if name == "max_seconds":
        return speed is not None and speed.seconds(point.images) > limit
    return (point.synthetic if name == "max_synthetic" else point.images) > limit


def _best(fitting: list[Point], limits: Limits, on_grid: bool) -> tuple[Point, str]:
    among = "on the grid" if on_grid else "among round values in the window"
    if limits.ceilings():
        best, reason = max(fitting, key=lambda p: (p.removed, -p.beta)), f"removes most {among}"
    else:
        best, reason = min(fitting, key=lambda p: p.beta), f"generates least {among}"
    if len(fitting) == 1 and on_grid:
        reason = "the only one on the grid that satisfies all limits"
    return best, f"{reason}: {describe(best)}"


def _round_values(windows: list[Window]) -> list[float]:
    """Return the values of two significant digits in each window; if there are none, of more digits, or its start."""
    values: list[float] = []
    for low, high in windows:
        lowest = low or min(0.01, high / 1000)  # there are infinitely many numbers of two digits near 0
        for digits in range(2, 8):
            found = [value for value in _of_digits(digits, lowest, high) if low <= value <= high]
            if found:
                break
        values += ([0.0] if low == 0 else []) + found or [low]
    return values


def _of_digits(digits: int, low: float, high: float) -> list[float]:
    """Return the numbers of `digits` significant digits from low to high, and possibly a few beyond."""
    if high <= 0:
        return []
    found: list[float] = []
    for decade in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1):
        step = 10.0 ** (decade - digits + 1)
        first, last = max(10 ** (digits - 1), math.floor(low / step)), min(10**digits, math.ceil(high / step))
        found += [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return found


def _contradictions(path: BudgetPath, limits: Limits, tops: dict[str, float]) -> list[str]:
    """Return the contradictions, all with ``min_removed``: β = 0 satisfies every other limit."""
    least = limits.min_removed
    assert least is not None
    wanted = f"{option('min_removed')} {least:.12g}"
    if path.before == 0:
        return [f"{wanted} cannot be reached at any β: there is no imbalance to remove"]
    anywhere = where_removed(path, least, path.end)
    if not anywhere:
        points = [path.at(float(beta)) for beta in np.geomspace(path.end * 2.0**-48, path.end, 500)]
        best = max(points, key=lambda point: point.removed)
        return [f"{wanted} cannot be reached at any β: about {best.removed:.1%} is the most, near β = {best.beta:.3g}"]
    needed = anywhere[0][0]
    needs = f"{wanted} needs β ≥ {_inside(needed, anywhere[0])} ({describe(path.at(needed))})"
    return [
        f"{needs}, but {option(name)} {limits.given()[name]:.12g} "
        f"allows β ≤ {_inside(top, (0.0, top))} ({describe(path.at(top))})"
        for name, top in tops.items()
        if top < needed
    ]


def describe(point: Point) -> str:
    """Return a short text of what a β removes and costs."""
    return f"{point.removed:.1%} removed, {counted(point.images, 'image')}, {point.synthetic:.1%} synthetic"


def show(windows: list[Window], end: float) -> str:
    """Return windows as text, rounded inwards to few digits, so that the printed values satisfy the limits."""
    pieces = []
    for low, high in windows:
        ends = f"{_inside(low, (low, high))} to {_inside(high, (low, high))}"
        pieces.append(f"{_inside(low, (low, high))} and above" if high >= end else ends)
    return "β from " + ", ".join(pieces)


def _inside(edge: float, window: Window) -> str:
    low, high = window
    for digits in (3, 6, 9):
        scale = 10.0**digits
        rounded = math.ceil(edge * scale) / scale if edge == low else math.floor(edge * scale) / scale
        if low <= rounded <= high:
            return f"{rounded:.{digits}f}".rstrip("0").rstrip(".")
    return repr(edge)


def format_choice(choice: BetaChoice) -> str:
    """Return a choice as lines: the grid, the window, the recommended β or the contradictions."""
    lines = [
        f"  β {point.beta:<6g} {describe(point)}"
        + (f", {choice.speed.seconds(point.images):,.0f} s" if choice.speed else "")
        + (f"; breaks {', '.join(map(option, breaks))}" if breaks else "; fits")
        for point, breaks in choice.grid
    ]
    given = " ".join(f"{option(name)} {value:.12g}" for name, value in choice.limits.given().items())
    if choice.windows:
        pieces = f", in {len(choice.windows)} pieces" if len(choice.windows) > 1 else ""
        lines.append(f"Window:       {show(choice.windows, choice.end)}{pieces} ({given})")
    if choice.recommended is not None:
        lines.append(f"Recommended:  β = {choice.recommended:g}, {choice.why}")
    return "\n".join(lines + [f"Contradiction: {text}" for text in choice.contradictions])
