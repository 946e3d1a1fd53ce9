"""The first convolution without a copy to wider channels.

Tensor cores take channels in runs of 16 bytes. Images have three, so that every step would copy the batch and the
weights into wider ones, and the weights' gradient back, in seven small kernels. Here both lie in memory with room for
more channels, all zero, from the start; zero channels have zero gradients, and stay zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

_RUN = 16
"""Bytes."""


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """The layer that sees the images in a model that is known here: torchvision's ResNets, also with another stem."""
    from torchvision.models.resnet import ResNet

    if not isinstance(model, ResNet):
        return None
    layer = model.conv1
    plain = isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros"
    return layer if plain and layer.weight.requires_grad else None


def room_for(channels: int, kind: torch.dtype) -> int:
    """How many channels as many take up in memory."""
    run = _RUN // kind.itemsize
    return -channels // run * -run


def use_room(layer: nn.Conv2d, wide: torch.Tensor) -> torch.Tensor:
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
