"""Generated images as clients trained on them, from this machine's cache: the first of each class, not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from fedeas_flwr.cache import ImageCache
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.generators import describe_generator
from fedeas_flwr.report.groups import Group

MOST_CLASSES = 10
A_CLASS = 12


@dataclass(frozen=True)
class SampleGrid:
    """Some images of some classes."""

    title: str
    rows: list[tuple[str, npt.NDArray[np.uint8]]]

    @property
    def caption(self) -> str:
        """What is to be seen."""
        return f"{self.title}: the first images of each class in the cache of this machine, uncurated."


def grids_of(groups: Sequence[Group]) -> list[SampleGrid]:
    """One grid for each generator (with its settings) whose images the cache has, of the first seed that it has."""
    found: dict[str, SampleGrid] = {}
    for group in groups:
        about = repr(describe_generator(group.config))
        if not group.config.generates or about in found:
            continue
        for member in group.members:
            rows = _rows(member.config)
            if rows:
                title = f"Generator {_name(member.config)}, seed {member.config.seed}"
                found[about] = SampleGrid(title, rows)
                break
    return list(found.values())


def _rows(config: RunConfig) -> list[tuple[str, npt.NDArray[np.uint8]]]:
    cache = ImageCache()
    folder = cache.find(describe_generator(config), config.seed)
    if folder is None:
        return []
    try:
        names = dataset_info(config.dataset).classes
    except (OSError, ValueError):
        return []
    labels = sorted({round(i * (len(names) - 1) / (MOST_CLASSES - 1)) for i in range(MOST_CLASSES)})
    rows = [(names[label], cache.peek(folder, label, A_CLASS)) for label in labels]
    return [(name, images) for name, images in rows if len(images)]


def _name(config: RunConfig) -> str:
    words = [] if config.generator.startswith(("bank:", "sd-turbo")) else [config.sampler]
    return ", ".join([config.generator.rstrip("/").rsplit("/", 1)[-1], *words])


def draw(grid: SampleGrid) -> Figure:
    """A row a class, pixels as squares."""
    height, width = grid.rows[0][1].shape[1:3]
    gap = max(1, width // 16)
    tall, wide = len(grid.rows) * (height + gap) - gap, A_CLASS * (width + gap) - gap
    canvas = np.full((tall, wide, 3), 255, np.uint8)
    for row, (_, images) in enumerate(grid.rows):
        for column, image in enumerate(images):
            top, left = row * (height + gap), column * (width + gap)
            canvas[top : top + height, left : left + width] = np.broadcast_to(image, (height, width, 3))
    figure = Figure(figsize=(8.6, 8.6 * tall / wide), layout="constrained")
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([row * (height + gap) + height / 2 for row in range(len(grid.rows))], [n for n, _ in grid.rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
