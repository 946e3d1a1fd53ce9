"""A 3×3 convolution of maps of one pixel is a matrix product with its centre tap: the other taps meet padding alone.

With the 7×7 stem ResNet-18 has three of those on images of 32×32, and they hold 7 of its 11 million weights. The other
taps' gradients are zero, so that only weight decay, or an algorithm that changes gradients, would ever move them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@torch.no_grad()
def one_pixel_convolutions(model: nn.Module, images: torch.Tensor) -> list[nn.Conv2d]:
    """The convolutions, 3×3 and padded by one, that see maps of one pixel and no others in a pass on ``images``."""
    known = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and _is_padded_3x3(layer)]
    seen: dict[nn.Module, set[bool]] = {}

    def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(layer, set()).add(given[0].shape[2:] == (1, 1))

    hooks = [layer.register_forward_pre_hook(note) for layer in known]
    before = model.training
    try:
        model.eval()(images)  # statistics stay as they are
    finally:
        model.train(before)
        for hook in hooks:
            hook.remove()
    return [layer for layer in known if seen.get(layer) == {True}]


def use_centre_tap(layer: nn.Conv2d) -> torch.Tensor:
    """Let a layer compute with its centre tap in training; return the tap, a leaf in the very memory of the weight."""
    tap = layer.weight.data[:, :, 1, 1].requires_grad_()
    layer.forward = partial(_forward, layer, layer.weight, tap)  # type: ignore[method-assign]
    return tap


def _is_padded_3x3(layer: nn.Conv2d) -> bool:
    known = (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    plain = layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros"
    return known and plain and layer.weight.requires_grad


def _forward(layer: nn.Conv2d, weight: torch.Tensor, tap: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not layer.training or layer.weight is not weight:  # the latter: called with another state's weights
        return type(layer).forward(layer, x)
    y: torch.Tensor = _CentreTap.apply(x.flatten(1), tap)  # type: ignore[no-untyped-call]
    return y[:, :, None, None]


class _CentreTap(torch.autograd.Function):
    """A linear layer whose gradient lies in memory row by row, although the weight does not."""

    @staticmethod
    def forward(ctx: Any, x: Any, tap: Any) -> Any:
        x = x.to(tap.dtype)
        ctx.save_for_backward(x, tap)
        return F.linear(x, tap)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, tap = ctx.saved_tensors
        return dy @ tap, dy.t() @ x
