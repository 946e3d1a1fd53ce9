"""Combine many images into one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import atomic_write

Pixels = NDArray[np.uint8]

_MIN_HEIGHT = 64
"""Minimum height of an image in a file, in pixels; smaller images are enlarged."""


def classes_to_show(classes: int, limit: int) -> list[int]:
    """Return the indices of the classes to show: all, or ``limit`` evenly spaced ones if there are more."""
    return sorted({round(i * (classes - 1) / (limit - 1)) for i in range(limit)})


def gap_width(image: Pixels) -> int:
    """Return the width in pixels of the white gap between two images; ``image`` has the shape ``[..., H, W, C]``."""
    return max(1, int(image.shape[-2]) // 16)


def image_sheet(rows: Sequence[Pixels], columns: int) -> Pixels:
    """Return one picture, ``[height, width, 3]`` without a border, that shows images in rows on a white background.

    The images of a row are ``[N, H, W, C]`` with one or three channels, and all have the same size. A row of fewer than
    ``columns`` images is filled with white.
    """
    height, width = rows[0].shape[1:3]
    gap = gap_width(rows[0])
    sheet = np.full((len(rows) * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            top, left = row * (height + gap), column * (width + gap)
            sheet[top : top + height, left : left + width] = image  # a grey image is broadcast to three channels
    return sheet


def save_sheet(rows: Sequence[Pixels], columns: int, path: Path) -> None:
    """Write the rows of images as one PNG file. Small images are enlarged without interpolation."""
    from PIL import Image

    scale = max(1, _MIN_HEIGHT // rows[0].shape[1])
    sheet = image_sheet(rows, columns).repeat(scale, axis=0).repeat(scale, axis=1)
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, "PNG")
    atomic_write(path, file.getvalue())
