"""Generated images that clients trained on, from this machine's cache: the first of each class, uncurated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from fedeas_flwr.common.image_sheet import classes_to_show, gap_width, image_sheet
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import readable_info
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.federated import with_folder
from fedeas_flwr.generators.interface import describe_generator
from fedeas_flwr.report.groups import Group

MAX_CLASSES = 10
IMAGES_PER_CLASS = 12


@dataclass(frozen=True)
class SampleGrid:
    """Sample images by class."""

    title: str
    rows: list[tuple[str, npt.NDArray[np.uint8]]]

    @property
    def caption(self) -> str:
        """Return the caption of the figure."""
        return f"{self.title}: the first images of each class in the cache of this machine, uncurated."


def grids_of(groups: Sequence[Group]) -> list[SampleGrid]:
    """Return one grid per generator and settings whose images are cached, for the first cached seed."""
    found: dict[str, SampleGrid] = {}
    for group in groups:
        about = repr(_about(group.config))
        if not group.config.generates or about in found:
            continue
        for member in group.members:
            if rows := _rows(member.config):
                found[about] = SampleGrid(f"Generator {_name(member.config)}, seed {member.config.seed}", rows)
                break
    return list(found.values())


def _rows(config: RunConfig) -> list[tuple[str, npt.NDArray[np.uint8]]]:
    cache = ImageCache()
    if (folder := cache.find(_about(config), config.seed)) is None or (info := readable_info(config.dataset)) is None:
        return []
    shown = classes_to_show(len(info.classes), MAX_CLASSES)
    rows = [(info.classes[label], cache.peek(folder, label, IMAGES_PER_CLASS)) for label in shown]
    return [(name, images) for name, images in rows if len(images)]


def _about(config: RunConfig) -> dict[str, Any]:
    with suppress(OSError, ValueError):  # the dataset of a record may not be on this machine
        return describe_generator(with_folder(config))
    return describe_generator(config)


def _name(config: RunConfig) -> str:
    words = [config.sampler] if config.generator_spec.is_diffusion else []
    return ", ".join([config.generator.rstrip("/").rsplit("/", 1)[-1], *words])


def draw_rows(rows: Sequence[tuple[str, npt.NDArray[np.uint8]]], columns: int) -> Figure:
    """Draw labelled rows of images [N, H, W, channels] without interpolation; short rows are filled with white."""
    sheet = image_sheet([images for _, images in rows], columns)
    (height, width), first = sheet.shape[:2], rows[0][1]
    step = first.shape[1] + gap_width(first)
    figure = Figure(figsize=(8.6, 8.6 * height / width), layout="constrained")
    axes = figure.subplots()
    axes.imshow(sheet, interpolation="nearest")
    axes.set_xticks([])
    names = [one_line(name, 24) for name, _ in rows]
    axes.set_yticks([row * step + first.shape[1] / 2 for row in range(len(rows))], names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
