"""From stored pixels to what a network takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Normaliser:
    """uint8 [N, H, W, C] → float32 [N, C, H, W], by channel mean and deviation on the scale 0 to 1."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: str) -> None:
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(std, device=device).view(1, -1, 1, 1)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
