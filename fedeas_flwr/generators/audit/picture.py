"""A picture of samples next to their nearest member and non-member."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedeas_flwr.common.files import atomic_path
from fedeas_flwr.common.image_sheet import classes_to_show
from fedeas_flwr.generators.audit.audit import Audit

_MAX_CLASSES, _PER_CLASS = 10, 3
"""Maximum number of classes, and samples of each."""
_NAMES, _TITLE, _WIDTH = 0.8, 0.2, 0.95
"""Width of the classes' names, height of a title and width of an image, in units of a cell."""


def draw_neighbours(audit: Audit, classes: Sequence[str], path: Path) -> None:
    """Write a PNG file: of each class the samples that are nearest to any real image, with their neighbours."""
    from matplotlib.figure import Figure

    known, (positions, distances) = audit.neighbours()
    labels = audit.samples.labels[known]
    present = np.unique(labels)
    shown = [present[place] for place in classes_to_show(len(present), _MAX_CLASSES)]
    height, width = audit.samples.images.shape[1:3]
    rise = _TITLE + _WIDTH * height / width
    figure = Figure(figsize=(3 * _PER_CLASS + _NAMES, rise * len(shown) + _TITLE), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), frame_on=False)
    for row, label in enumerate(shown):
        top = row * rise + _TITLE
        axes.text(-0.1, top + (rise - _TITLE) / 2, classes[label], ha="right", va="center", fontsize=8)
        # Ordered by the smaller of both distances, which prefers neither side.
        own = np.flatnonzero(labels == label)
        for column, sample in enumerate(own[distances[:, own].min(axis=0).argsort(kind="stable")][:_PER_CLASS]):
            images = [audit.samples.images[known[sample]]]
            images += [side.images[place] for side, place in zip(audit.sides, positions[:, sample], strict=True)]
            titles = ["sample", *map("{} {:.2f}".format, ("member", "non-member"), distances[:, sample])]
            for left, (image, title) in enumerate(zip(images, titles, strict=True), start=3 * column):
                axes.text(left + _WIDTH / 2, top - 0.03, title, ha="center", va="bottom", fontsize=7)
                extent = (left, left + _WIDTH, top + rise - _TITLE, top)
                axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255, extent=extent, aspect="auto")
    axes.set(xlim=(-_NAMES, 3 * _PER_CLASS), ylim=(rise * len(shown) + _TITLE, 0), xticks=[], yticks=[])
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
