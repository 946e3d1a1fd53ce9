"""Colours and labels shared by all figures. Lines of one figure differ in lightness or shape, not only in hue."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from fedeas_flwr.common.import_path import short_name
from fedeas_flwr.common.text import one_line

matplotlib.use("Agg")
matplotlib.rcParams["text.parse_math"] = False  # names and values from outside may hold dollar signs

GAMMA_HAT = r"$\hat{\Gamma}$"
"""Γ̂ in matplotlib's math text: its fonts place the combining accent badly."""
MATH_LABELS = (GAMMA_HAT, f"waiting for {GAMMA_HAT} and tests")
"""The labels that are math text."""
INK = "#22303c"
COLOURS = {
    "none": "#9aa5b1",
    "uniform": "#e1a730",
    "missing-only": "#3a8dde",
    "fedeas": "#d1495b",
    "full-balance": "#4f9d69",
    "greedy": INK,
    "waterfill": "#3a8dde",
}
WIDTHS = {"fedeas": 2.4}
"""Widths of accuracy curves, in points, that differ from the default."""
MORE_COLOURS = ("#8a5fbf", "#0b6e6e", "#9a4a12", "#e58fb5", "#1f3f8f", "#7a9a01", "#6b1f4f", "#7fd1d8")
"""Colours for policies without their own, and for a second group of a policy."""
LINES = {"-": "", "--": "6 3", "-.": "9 3 2 3", ":": "2 3"}
"""Line styles, used once colours run out, and their SVG dash patterns for tables."""
MARKERS = "osD^vPX*<>p"
LABELS = {
    "none": "FedAvg, nothing generated",
    "uniform": "Uniform",
    "missing-only": "Missing-only",
    "fedeas": "FedEAS",
    "full-balance": "Full-Balance",
    "greedy": "Greedy reference",
    "waterfill": "Waterfill (ours)",
    "oversample": "Oversampling, nothing generated",
    "fedeas-in-parts": "FedEAS in parts (ours)",
    "adaptive": "Adaptive, by loss (ours)",
    "adaptive-accuracy": "Adaptive, by accuracy (ours)",
    "adaptive-disagreement": "Adaptive, by disagreement (ours)",
    "adaptive-agreement": "Adaptive, by loss and agreement (ours)",
}


def label_of(policy: str) -> str:
    """Return the name of a policy in reports and figures; that of an import path is its last part."""
    return LABELS.get(policy, short_name(policy))


@dataclass(frozen=True)
class LineStyle:
    """Colour, line style and marker that distinguish a group; groups with equal colours differ in line style."""

    colour: str
    line: str = "-"
    marker: str = "o"


_SIZE = 9
"""Font size of a legend, in points."""
_LETTER, _SIGN, _LINE = 0.068, 0.6, 0.19
"""Inches of a letter, of the symbol before a name and of a line in a legend."""


def assign_styles(policies: Sequence[str]) -> list[LineStyle]:
    """Return a style per group: its policy's colour if that is free, and dashes once all colours are taken."""
    found: list[LineStyle] = []
    for number, policy in enumerate(policies):
        colours = dict.fromkeys((COLOURS.get(policy, MORE_COLOURS[0]), *MORE_COLOURS))
        taken = {(style.colour, style.line) for style in found}
        free = ((colour, line) for line in LINES for colour in colours if (colour, line) not in taken)
        colour, line = next(free, (INK, ":"))
        used = {style.marker for style in found if style.colour == colour}
        turned = MARKERS[number % len(MARKERS) :] + MARKERS
        marker = next(marker for marker in turned if len(used) == len(MARKERS) or marker not in used)
        found.append(LineStyle(colour, line, marker))
    return found


def within(axes: Axes, most: float) -> None:
    """Limit the y axis to the range from 0 to ``most``; markers on its edge are not clipped."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(most, high))
    for line in axes.lines:
        line.set_clip_on(line.get_marker() in ("None", "_", "|"))


def tidy(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Show a light grid and hide the top and right borders."""
    axes.grid(alpha=0.25, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def annotate(
    axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any
) -> Annotation:
    """Write a text at an offset, in typographic points, from a point of the axes."""
    return axes.annotate(text, point, offset, textcoords="offset points", **style)


def legend_above(axes: Axes, title: str = "") -> float:
    """Draw the legend above the axes, where it covers nothing, and return its height in inches.

    It has as many columns as fit. A title at the left moves up.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes always belong to a figure
    figure.draw_without_rendering()  # the width of the axes depends on their labels
    room = float(axes.bbox.width) / figure.dpi
    handles, names = axes.get_legend_handles_labels()
    names = [textwrap.fill(one_line(name), int((room - _SIGN) / _LETTER), break_on_hyphens=False) for name in names]
    most = next(n for n in range(len(names), 0, -1) if n == 1 or _width(names, n) <= room)
    columns = ceil(len(names) / ceil(len(names) / most))  # as few as that many lines need: 2 and 2, not 2, 1 and 1
    lines = max(sum(1 + name.count("\n") for name in column) for column in np.array_split(names, columns))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2, "borderpad": 0.2}
    style: dict[str, Any] = {"frameon": False, "fontsize": _SIZE, "title_fontsize": _SIZE, "alignment": "left"}
    legend = axes.legend(handles, names, ncols=columns, title=title or None, **place, **style)
    for text in legend.get_texts():
        text.set_parse_math(text.get_text() in MATH_LABELS)
    height = _LINE * int(lines + bool(title))
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=8 + 72 * height)
    return height


def _width(names: list[str], columns: int) -> float:
    """Return the width in inches of a legend with ``columns`` columns."""
    widest = [max(map(len, column)) for column in np.array_split(names, columns)]
    return _LETTER * sum(widest) + _SIGN * columns
