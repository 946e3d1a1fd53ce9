"""Models with a given number of parameters and almost no arithmetic, to measure the cost of moving arrays.

fedeas run CONF model=wide_models:eleven_million    (with this folder on PYTHONPATH)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 8


class MeanOfLinear(nn.Module):
    """Linear classifier of 8×8 pixels whose weight is the mean of many trained matrices.

    A step costs a few passes over the parameters for any batch size. A plain layer of this size would multiply all of
    them by every image, which would hide the cost of moving them.
    """

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int], parameters: int) -> None:
        super().__init__()
        size = num_classes * image_shape[2] * SIDE * SIDE
        self.matrices = nn.Parameter(torch.randn(round(parameters / size), size) / SIDE)
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalised images ``[N, C, H, W]``."""
        pixels = F.adaptive_avg_pool2d(images, SIDE).flatten(1)
        return F.linear(pixels, self.matrices.mean(dim=0).view(len(self.bias), -1), self.bias)


def fifty_thousand(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return a model with about 0.05 million parameters."""
    return MeanOfLinear(num_classes, image_shape, 50_000)


def one_million(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return a model with about 1 million parameters."""
    return MeanOfLinear(num_classes, image_shape, 1_000_000)


def eleven_million(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return a model with about 11 million parameters, as many as ResNet-18."""
    return MeanOfLinear(num_classes, image_shape, 11_000_000)
