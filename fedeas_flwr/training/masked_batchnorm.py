"""BatchNorm over the rows of a batch that count, in plain PyTorch: what a padded short batch needs without Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


@contextmanager
def masked_batchnorm(model: nn.Module, mask: torch.Tensor) -> Iterator[None]:
    """Let every BatchNorm of ``model`` see only the rows of the batch that count."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.forward = partial(_masked_forward, layer, mask)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _masked_forward(layer: nn.modules.batchnorm._BatchNorm, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """BatchNorm in training mode over the masked rows: the same formulas, sums instead of means."""
    if not layer.training:  # a reference model's: its statistics are given, and rows do not mix
        return type(layer).forward(layer, x)
    kind, x = x.dtype, x.float()
    weight = mask.view(-1, *[1] * (x.dim() - 1))
    over = [0, *range(2, x.dim())]
    number = mask.sum() * (x[0, 0].numel())
    mean = (x * weight).sum(over) / number
    shape = (1, -1, *[1] * (x.dim() - 2))
    centred = x - mean.view(shape)
    variance = (centred.square() * weight).sum(over) / number
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            step = 1 / layer.num_batches_tracked.float() if layer.momentum is None else layer.momentum
            unbiased = variance * number / (number - 1)
            layer.running_mean.add_(step * (mean - layer.running_mean))
            layer.running_var.add_(step * (unbiased - layer.running_var))
    out = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out.to(kind)
