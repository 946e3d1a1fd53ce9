"""A UNet's forward pass with the kernels of `unet_kernels.py`, for sampling and for training on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets import unet_2d_blocks as blocks
from diffusers.models.upsampling import Upsample2D
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.generators.diffusion.unet_kernels import Map, add, normalise, with_sums

_BLOCKS = (blocks.DownBlock2D, blocks.AttnDownBlock2D, blocks.UpBlock2D, blocks.AttnUpBlock2D, blocks.UNetMidBlock2D)
_CHANNELS = 8
"""Channels that tensor cores need; an image's three are padded with zeros."""


def fuse(unet: Any) -> None:
    """Replace a `UNet2DModel`'s forward by the fused one and its memory layout by channels last, in place.

    Raise ValueError if the fused forward does not know one of its layers, or Triton's error if it cannot compile. The
    UNet is unchanged in both cases.
    """
    config = unet.config
    if config.center_input_sample or config.time_embedding_type != "positional" or config.class_embed_type is not None:
        raise ValueError("this UNet has other embeddings")
    for module in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        if not isinstance(module, _BLOCKS):
            raise ValueError(f"this UNet has a {type(module).__name__}")
    for module in unet.modules():
        if not _is_known(module):
            raise ValueError(f"this UNet has a {type(module).__name__} with other settings")
    device = next(unet.parameters()).device
    normalise(nn.GroupNorm(1, 1, device=device), with_sums(torch.zeros(1, 1, 1, 1, device=device)))
    unet.to(memory_format=torch.channels_last)
    unet.forward = partial(_forward, unet)


def _is_known(module: Any) -> bool:
    """Return whether the fused forward computes this module, except for the modules in it, as diffusers does."""
    if isinstance(module, nn.GroupNorm):
        return bool(module.affine and module.num_groups & (module.num_groups - 1) == 0)
    if isinstance(module, ResnetBlock2D):
        return (
            module.upsample is None
            and module.downsample is None
            and isinstance(module.nonlinearity, nn.SiLU)
            and module.time_emb_proj is not None
            and not module.skip_time_act
            and module.time_embedding_norm in ("default", "scale_shift")
            and module.output_scale_factor == 1
        )
    if isinstance(module, Attention):
        plain = module.residual_connection and module.rescale_output_factor == 1 and module.spatial_norm is None
        return bool(plain and module.to_q.bias is not None)
    if isinstance(module, Downsample2D):
        return bool(module.norm is None and module.use_conv and module.padding == 1)
    if isinstance(module, Upsample2D):
        return bool(module.norm is None and module.use_conv and module.interpolate)
    return True


def _forward(
    unet: Any, sample: torch.Tensor, timestep: torch.Tensor, class_labels: torch.Tensor, return_dict: bool = False
) -> tuple[torch.Tensor]:
    """Compute `UNet2DModel.forward`."""
    time = unet.time_embedding(unet.time_proj(timestep.expand(len(sample))).to(unet.dtype))
    time = F.silu(time + unet.class_embedding(class_labels))
    x = _convolve(unet.conv_in, sample)
    skips = [x]
    for block in unet.down_blocks:
        for resnet, attention in _layers(block):
            x = _attend(attention, _residual(resnet, time, x))
            skips.append(x)
        for downsampler in block.downsamplers or ():
            x = _convolve(downsampler.conv, x.values)
            skips.append(x)
    first, *others = unet.mid_block.resnets
    x = _residual(first, time, x)
    for attention, resnet in zip(unet.mid_block.attentions, others, strict=True):
        x = _residual(resnet, time, _attend(attention, x))
    for block in unet.up_blocks:
        *inner, (last, attention) = _layers(block)
        for resnet, other in inner:
            x = _attend(other, _residual(resnet, time, x, skips.pop()))
        # Nothing but the upsampling reads a block's last map.
        doubled = block.upsamplers is not None
        x = _residual(last, time, x, skips.pop(), doubled=doubled and attention is None)
        x = _attend(attention, x, doubled=doubled)
        for upsampler in block.upsamplers or ():
            x = _convolve(upsampler.conv, x.values)
    return (_convolve(unet.conv_out, normalise(unet.conv_norm_out, x, silu=True)).values,)


def _layers(block: Any) -> Iterator[tuple[Any, Any]]:
    """Return the pairs of a block's residual layers and attentions, which may be None."""
    return zip(block.resnets, getattr(block, "attentions", [None] * len(block.resnets)), strict=True)


def _residual(layer: Any, time: torch.Tensor, *maps: Map, doubled: bool = False) -> Map:
    """Compute `ResnetBlock2D.forward` of concatenated maps; each bias is added by the following kernel."""
    embedded = layer.time_emb_proj(time)
    convolved = with_sums(_without_bias(layer.conv1, normalise(layer.norm1, *maps, silu=True)))
    if layer.time_embedding_norm == "scale_shift":
        hidden = normalise(layer.norm2, convolved, before=layer.conv1.bias, scale_shift=embedded, silu=True)
    else:
        hidden = normalise(layer.norm2, convolved, before=layer.conv1.bias + embedded, silu=True)
    hidden, bias = _without_bias(layer.conv2, layer.dropout(hidden)), layer.conv2.bias
    values = [each.values for each in maps]
    if layer.conv_shortcut is None:
        (shortcut,) = values
    else:
        shortcut = _project(layer.conv_shortcut.weight.flatten(1), *values)
        bias = bias if layer.conv_shortcut.bias is None else bias + layer.conv_shortcut.bias
    return add(shortcut, hidden, bias, doubled=doubled)


def _attend(layer: Any, x: Map, *, doubled: bool = False) -> Map:
    """Compute `Attention.forward`; without a layer return ``x``."""
    if layer is None:
        return x
    values = x.values
    tokens = _tokens(values if layer.group_norm is None else normalise(layer.group_norm, x))
    inputs = (layer.to_q, layer.to_k, layer.to_v)
    weight, bias = torch.cat([each.weight for each in inputs]), torch.cat([each.bias for each in inputs])
    split = F.linear(tokens, weight, bias).view(len(values), -1, 3, layer.heads, values.shape[1] // layer.heads)
    attended = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4))
    attended = attended.transpose(1, 2).reshape(tokens.shape)
    output = layer.to_out[0]
    return add(values, _as_map(F.linear(attended, output.weight), values), output.bias, doubled=doubled)


def _convolve(layer: Any, x: torch.Tensor) -> Map:
    return add(_without_bias(layer, x), None, layer.bias)


def _without_bias(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight
    if (lacking := _CHANNELS - x.shape[1]) > 0:
        x, weight = (F.pad(each, (0, 0, 0, 0, 0, lacking)) for each in (x, weight))
    return F.conv2d(x, weight, None, layer.stride, layer.padding)


def _project(weight: torch.Tensor, *maps: torch.Tensor) -> torch.Tensor:
    """Apply a 1×1 convolution to concatenated maps, without concatenating them."""
    parts = torch.split(weight, [x.shape[1] for x in maps], 1)
    out = F.linear(_tokens(maps[0]), parts[0])
    for x, part in zip(maps[1:], parts[1:], strict=True):
        out.addmm_(_tokens(x), part.to(out.dtype).t())
    return _as_map(out, maps[0])


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the pixels [N · H · W, C] of a map [N, C, H, W], without a copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _as_map(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return pixels as a map of the height and width of another."""
    return tokens.view(len(like), *like.shape[2:], -1).permute(0, 3, 1, 2)
