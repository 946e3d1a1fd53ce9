"""Two faster convolutions: of feature maps of one pixel, and of images with three channels.

A padded 3×3 convolution of one-pixel maps is a matrix product with its centre tap: the other taps see only padding.
On 32×32 images, ResNet-18 with the 7×7 stem has three such convolutions, which hold 7 of its 11 million weights. The
other taps have zero gradients. They still change with weight decay or an algorithm that changes gradients; the engine
then uses plain convolutions.

Tensor cores need channels in multiples of 16 bytes. Images have three channels, so every step would copy batch and
weights to padded tensors, and the weights' gradient back, in seven small kernels. Here batch and
weights are allocated with zero channels as padding. The gradients of these channels are zero, so they stay zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_ALIGNED_BYTES = 16
"""Alignment in bytes that tensor cores need for a pixel's channels."""


# --------------------------------------------------------------------------------------------- one-pixel maps


@torch.no_grad()
def one_pixel_convolutions(model: nn.Module, images: torch.Tensor) -> list[nn.Conv2d]:
    """Return the padded 3×3 convolutions whose inputs all have one pixel in a forward pass on ``images``."""
    candidates = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and _is_padded_3x3(layer)]
    sizes: dict[nn.Module, set[torch.Size]] = {}

    def record_size(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        sizes.setdefault(layer, set()).add(inputs[0].shape[2:])

    hooks = [layer.register_forward_pre_hook(record_size) for layer in candidates]
    was_training = model.training
    try:
        model.eval()(images)  # does not update statistics
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return [layer for layer in candidates if sizes.get(layer) == {(1, 1)}]


def use_centre_tap(layer: nn.Conv2d) -> torch.Tensor:
    """Make a layer use only its centre tap in training; return the tap, a leaf that shares the weight's memory."""
    tap = layer.weight.data[:, :, 1, 1].requires_grad_()
    layer.forward = partial(_forward_centre_tap, layer, layer.weight, tap)  # type: ignore[method-assign]
    return tap


def _is_padded_3x3(layer: nn.Conv2d) -> bool:
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return geometry == ((3, 3), (1, 1), (1, 1), (1, 1)) and _is_plain(layer)


def _is_plain(layer: nn.Conv2d) -> bool:
    plain = layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros"
    return plain and layer.weight.requires_grad


def _forward_centre_tap(layer: nn.Conv2d, weight: torch.Tensor, tap: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not layer.training or layer.weight is not weight:  # functional_call with another state
        return type(layer).forward(layer, x)
    y: torch.Tensor = _CentreTap.apply(x.flatten(1), tap)  # type: ignore[no-untyped-call]
    return y[:, :, None, None]


class _CentreTap(torch.autograd.Function):
    """Linear layer whose weight gradient is contiguous although the weight is not."""

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


# -------------------------------------------------------------------------------------------- padded channels


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """Return the first convolution of a torchvision ResNet, with any stem; None for other models."""
    from torchvision.models.resnet import ResNet

    if not isinstance(model, ResNet):
        return None
    layer = model.conv1
    return layer if isinstance(layer, nn.Conv2d) and _is_plain(layer) else None


def padded_channels(channels: int, dtype: torch.dtype) -> int:
    """Return the number of channels, padding included."""
    multiple = _ALIGNED_BYTES // dtype.itemsize
    return -channels // multiple * -multiple


def use_padded_weights(layer: nn.Conv2d, padded: torch.Tensor) -> torch.Tensor:
    """Make a layer train with ``padded`` weights, whose first channels are the layer's own; return them as a leaf."""
    leaf = padded.detach().requires_grad_()
    layer.forward = partial(_forward_padded, layer, layer.weight, leaf)  # type: ignore[method-assign]
    return leaf


def _forward_padded(layer: nn.Conv2d, weight: torch.Tensor, padded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not layer.training or layer.weight is not weight:  # functional_call with another state
        return type(layer).forward(layer, x)
    (batch, channels, height, width), stored = x.shape, padded.shape[1]
    if x.stride() == (height * width * stored, 1, width * stored, stored):  # the memory layout of `fetch`
        x = x.as_strided((batch, stored, height, width), x.stride())
    else:
        padded = padded[:, :channels]
    return F.conv2d(x, padded, None, layer.stride, layer.padding, layer.dilation)
