"""Random views of the images a client has: a shift within zero padding and, where it keeps the class, a mirroring.

The draws of a whole round are one small table, made before it from a stream of their own: three int8 a sample a step
(int16 from 1,024 pixels a side), so 10 epochs of 6,000 images take 180 kB. A step only gathers, on stored pixels, which
a CUDA graph can capture; and padding is black, as usual for CIFAR, before the pixels are normalised.
"""

from __future__ import annotations

import numpy as np
import torch

from fedeas_flwr.data.sources import DatasetInfo

VIEWS = "views"
"""Name of the table among a client's inputs, ``[steps, batch size, 3]``: mirrored or not, shift down, shift right."""


def largest_shift(info: DatasetInfo) -> int:
    """An eighth of the side: CIFAR's usual 4 pixels of 32, and 1 of the digits' 8, whose strokes reach the border."""
    return info.image_shape[0] // 8


def draw_views(info: DatasetInfo, steps: int, batch_size: int, draws: np.random.Generator) -> torch.Tensor:
    """The views of every sample of every step, ``[steps, batch size, 3]``; a short batch uses its first rows."""
    most = largest_shift(info)
    dtype = np.int8 if most <= np.iinfo(np.int8).max else np.int16  # which also decides what is drawn
    table = np.zeros((steps, batch_size, 3), dtype)
    table[..., 1:] = draws.integers(-most, most, (steps, batch_size, 2), dtype, endpoint=True)
    if info.mirrored_keeps_class:
        table[..., 0] = draws.integers(0, 2, (steps, batch_size), dtype)
    return torch.from_numpy(table)


def augment(pixels: torch.Tensor, views: torch.Tensor) -> torch.Tensor:
    """Images as their views show them: mirrored, then shifted, zeros where nothing was.

    Parameters
    ----------
    pixels
        uint8 ``[B, H, W, C]``.
    views
        ``[B, 3]``, a row of the table.
    """
    mirrored, down, right = views.long().unbind(1)
    height, width = pixels.shape[1:3]
    # Where each pixel of the view comes from.
    rows = torch.arange(height, device=pixels.device) - down[:, None]
    columns = torch.arange(width, device=pixels.device) - right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    columns = torch.where(mirrored[:, None] > 0, width - 1 - columns, columns)
    image = torch.arange(len(pixels), device=pixels.device)
    found = pixels[image[:, None, None], rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return found * inside[..., None]
