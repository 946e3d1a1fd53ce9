"""Two faster convolutions: of maps of one pixel, and of images with three channels.

A 3×3 convolution of maps of one pixel is a matrix product with its centre tap: the other taps meet padding alone. With
the 7×7 stem ResNet-18 has three of those on images of 32×32, and they hold 7 of its 11 million weights. The other taps'
gradients are zero, so that only weight decay, or an algorithm that changes gradients, would ever move them.

Tensor cores take channels in runs of 16 bytes. Images have three, so that every step would copy the batch and the
weights into wider ones, and the weights' gradient back, in seven small kernels. Here both lie in memory with room for
more channels, all zero, from the start; zero channels have zero gradients, and stay zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_ALIGNED_BYTES = 16
"""Bytes."""


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


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """The layer that sees the images in a model that is known here: torchvision's ResNets, also with another stem."""
    from torchvision.models.resnet import ResNet

    if not isinstance(model, ResNet):
        return None
    layer = model.conv1
    plain = isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros"
    return layer if plain and layer.weight.requires_grad else None


def padded_channels(channels: int, kind: torch.dtype) -> int:
    """How many channels as many take up in memory."""
    run = _ALIGNED_BYTES // kind.itemsize
    return -channels // run * -run


def use_padded_weights(layer: nn.Conv2d, wide: torch.Tensor) -> torch.Tensor:
    """Let a layer compute with wide weights in training; return them, a leaf. Its own are their first channels."""
    leaf = wide.detach().requires_grad_()
    layer.forward = partial(_convolve, layer, layer.weight, leaf)  # type: ignore[method-assign]
    return leaf


def _convolve(layer: nn.Conv2d, weight: torch.Tensor, wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not layer.training or layer.weight is not weight:  # the latter: called with another state's weights
        return type(layer).forward(layer, x)
    (batch, channels, height, width), room = x.shape, wide.shape[1]
    if x.stride() == (height * width * room, 1, width * room, room):  # as `fetch` lays images out
        x = x.as_strided((batch, room, height, width), x.stride())
    else:
        wide = wide[:, :channels]
    return F.conv2d(x, wide, None, layer.stride, layer.padding, layer.dilation)
