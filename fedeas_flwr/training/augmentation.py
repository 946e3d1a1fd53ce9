"""Random augmentation of a client's images: a shift with zero padding and, if it keeps the class, a horizontal flip.

The random numbers of a round are one small table, drawn before the round from a separate stream: three int8 per sample
and step (int16 from 1,024 pixels per side), so 10 epochs of 6,000 images take 180 kB. A step only gathers stored
pixels, which a CUDA graph can capture. Padding is black before normalisation, as usual for CIFAR.
"""

from __future__ import annotations

import numpy as np
import torch

from fedeas_flwr.data.sources import DatasetInfo

VIEWS = "views"
"""Name of the table among a client's inputs, ``[steps, batch size, 3]``: flipped (0 or 1), shift down, shift right."""


def draw_views(info: DatasetInfo, steps: int, batch_size: int, draws: np.random.Generator) -> torch.Tensor:
    """Draw the table of views, ``[steps, batch size, 3]``; a short batch uses the first rows of its step."""
    most = info.image_shape[0] // 8  # pixels: CIFAR's usual 4 of 32, and 1 of 8 for digits, which reach the border
    dtype = np.int8 if most <= np.iinfo(np.int8).max else np.int16  # the dtype also changes the numbers drawn
    table = np.zeros((steps, batch_size, 3), dtype)
    table[..., 1:] = draws.integers(-most, most, (steps, batch_size, 2), dtype, endpoint=True)
    if info.mirrored_keeps_class:
        table[..., 0] = draws.integers(0, 2, (steps, batch_size), dtype)
    return torch.from_numpy(table)


def augment(pixels: torch.Tensor, views: torch.Tensor) -> torch.Tensor:
    """Return uint8 images ``[B, H, W, C]`` flipped, then shifted, with zeros as padding.

    ``views`` is the table's row for this step, ``[B, 3]``.
    """
    mirrored, down, right = views.long().unbind(1)
    height, width = pixels.shape[1:3]
    # Source of each pixel of the view.
    rows = torch.arange(height, device=pixels.device) - down[:, None]
    columns = torch.arange(width, device=pixels.device) - right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    columns = torch.where(mirrored[:, None] > 0, width - 1 - columns, columns)
    image = torch.arange(len(pixels), device=pixels.device)
    found = pixels[image[:, None, None], rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]]
    return found * inside[..., None]
