"""Colours and names that every figure shares. Lines of one figure differ in lightness or shape besides hue."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes

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
MORE_COLOURS = ("#8a5fbf", "#0f8b8d", "#c8702a", "#6c7a89", "#b5408f", "#2f5d9b", "#7a9a01", "#5b4636")
"""For policies without a colour of their own, and for a second group of one policy."""
LABELS = {
    "none": "FedAvg, nothing generated",
    "uniform": "Uniform",
    "missing-only": "Missing-only",
    "fedeas": "FedEAS",
    "full-balance": "Full-Balance",
    "greedy": "Greedy reference",
    "waterfill": "Waterfill (ours)",
    "oversample": "Oversampling, nothing generated",
}


def tidy(axes: Axes) -> None:
    """Leave only the lines that help to read a value."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
