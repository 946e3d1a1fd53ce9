"""Fused GroupNorm, scale, shift and SiLU of a UNet on a GPU: unfused, they take longer than the convolutions.

Eager PyTorch normalises, scales, shifts and activates in one pass over memory each, adds a convolution's bias in
another, and copies to a layout that its GroupNorm can read and back. Here one Triton kernel reads the channels-last map
that one convolution wrote and writes the map that the next one reads. torch.compile finds the same fusion, but takes
half a minute in every process; this takes a second.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

_WARPS, _ELEMENTS = 8, 4096
"""Warps and elements of the map per program: enough loads to hide memory latency, few enough for the registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _normalise_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    before,
    weight,
    bias,
    scale_shift,
    scratch,
    before_stride,
    eps,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_SCALE_SHIFT: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalise one image: sum over its pixels, then read them again (from the L2 cache) and normalise."""
    size: tl.constexpr = CHANNELS // GROUPS
    image = tl.program_id(0).to(tl.int64)
    x += image * PIXELS * CHANNELS
    out += image * PIXELS * CHANNELS
    scratch += image * 2 * WIDTH
    channel = tl.arange(0, WIDTH)
    is_channel = channel < CHANNELS
    added = tl.zeros([WIDTH], tl.float32)
    if HAS_BEFORE:
        added = tl.load(before + image * before_stride + channel, mask=is_channel, other=0).to(tl.float32)

    totals = tl.zeros([ROWS, WIDTH], tl.float32)  # summed over rows once, at the end, since that synchronises threads
    squared = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, PIXELS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < PIXELS)[:, None] & is_channel[None, :]
        value = tl.load(x + row[:, None] * CHANNELS + channel[None, :], mask=inside, other=0).to(tl.float32)
        value = tl.where(inside, value + added[None, :], 0.0)
        totals += value
        squared += value * value

    # Channel sums become group sums through memory: a group's width need not be a power of two.
    tl.store(scratch + channel, tl.sum(totals, 0))
    tl.store(scratch + WIDTH + channel, tl.sum(squared, 0))
    tl.debug_barrier()
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP_WIDTH)
    members = group[:, None] * size + member[None, :]
    is_member = (member < size)[None, :] & (group >= 0)[:, None]
    number = PIXELS * size
    mean = tl.sum(tl.load(scratch + members, mask=is_member, other=0), 1) / number
    square = tl.sum(tl.load(scratch + WIDTH + members, mask=is_member, other=0), 1) / number
    inverse = 1 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    tl.debug_barrier()
    tl.store(scratch + group, mean)
    tl.store(scratch + WIDTH + group, inverse)
    tl.debug_barrier()
    own = tl.where(is_channel, channel // size, 0)
    factor = tl.load(scratch + WIDTH + own) * tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
    offset = tl.load(bias + channel, mask=is_channel, other=0).to(tl.float32)
    offset += (added - tl.load(scratch + own)) * factor
    if HAS_SCALE_SHIFT:
        at = scale_shift + image * 2 * CHANNELS + channel
        scale = 1 + tl.load(at, mask=is_channel, other=0).to(tl.float32)
        factor *= scale
        offset = offset * scale + tl.load(at + CHANNELS, mask=is_channel, other=0).to(tl.float32)

    for start in range(0, PIXELS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < PIXELS)[:, None] & is_channel[None, :]
        where = row[:, None] * CHANNELS + channel[None, :]
        value = tl.load(x + where, mask=inside, other=0).to(tl.float32) * factor[None, :] + offset[None, :]
        if SILU:
            value = value / (1 + tl.exp(-value))
        tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(x, y, bias, out, elements, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(y + at, mask=inside).to(tl.float32)
    total += tl.load(bias + at % CHANNELS, mask=inside).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def normalise(
    norm: nn.GroupNorm,
    x: torch.Tensor,
    *,
    before: torch.Tensor | None = None,
    scale_shift: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """Return GroupNorm of ``x + before``, optionally ``· (1 + scale) + shift``, then optionally SiLU.

    ``x`` is ``[N, C, H, W]`` or ``[N, C, L]`` and is copied to channels last if necessary. ``before`` is ``[C]`` or
    ``[N, C]``, such as the bias of the preceding convolution; ``scale_shift`` is ``[N, 2C]``.
    """
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.transpose(1, 2).contiguous().transpose(1, 2)
    channels, width = x.shape[1], triton.next_power_of_2(x.shape[1])
    out, scratch = torch.empty_like(x), torch.empty(len(x), 2, width, device=x.device)
    _normalise_kernel[(len(x),)](
        x,
        out,
        before,
        norm.weight,
        norm.bias,
        None if scale_shift is None else scale_shift.contiguous(),
        scratch,
        0 if before is None or before.dim() == 1 else channels,
        norm.eps,
        PIXELS=x[0, 0].numel(),
        CHANNELS=channels,
        GROUPS=norm.num_groups,
        HAS_BEFORE=before is not None,
        HAS_SCALE_SHIFT=scale_shift is not None,
        SILU=silu,
        WIDTH=width,
        GROUP_WIDTH=triton.next_power_of_2(channels // norm.num_groups),
        ROWS=max(1, _ELEMENTS // width),
        num_warps=_WARPS,
    )
    return out


def add(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x + y + bias`` of two maps ``[N, C, H, W]``, channels last in memory."""
    x, y = x.to(memory_format=torch.channels_last), y.to(memory_format=torch.channels_last)
    out, block = torch.empty_like(x), 2048
    _add_kernel[(triton.cdiv(x.numel(), block),)](x, y, bias, out, x.numel(), CHANNELS=x.shape[1], BLOCK=block)
    return out


def fuse(unet: nn.Module) -> None:
    """Replace the forward of a UNet's blocks by the fused one, in place; other types of blocks keep theirs.

    If Triton cannot compile, its error is raised and the UNet is unchanged.
    """
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.upsampling import Upsample2D

    device = next(unet.parameters()).device
    normalise(nn.GroupNorm(1, 1, device=device), torch.zeros(1, 1, 1, 1, device=device))
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D) and _is_plain(module):
            module.forward = partial(_resnet_block, module)  # type: ignore[method-assign]
        elif isinstance(module, Upsample2D) and module.interpolate and module.use_conv and module.norm is None:
            module.forward = partial(_upsample, module)
        elif isinstance(module, nn.GroupNorm) and _is_fusable(module):
            module.forward = partial(normalise, module)  # type: ignore[method-assign]


def _is_fusable(norm: Any) -> bool:
    is_norm = isinstance(norm, nn.GroupNorm) and norm.affine
    return is_norm and norm.num_groups & (norm.num_groups - 1) == 0


def _is_plain(block: Any) -> bool:
    return (
        block.upsample is None
        and block.downsample is None
        and isinstance(block.nonlinearity, nn.SiLU)
        and block.time_emb_proj is not None
        and block.time_embedding_norm in ("default", "scale_shift")
        and block.output_scale_factor == 1
        and block.conv1.bias is not None
        and block.conv2.bias is not None
        and _is_fusable(block.norm1)
        and _is_fusable(block.norm2)
    )


def _resnet_block(block: Any, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
    """Compute `ResnetBlock2D.forward` in eval mode; each bias is added by the following kernel."""
    time = block.time_emb_proj(F.silu(temb))
    hidden = _convolve(block.conv1, normalise(block.norm1, x, silu=True))
    if block.time_embedding_norm == "scale_shift":
        hidden = normalise(block.norm2, hidden, before=block.conv1.bias, scale_shift=time, silu=True)
    else:
        hidden = normalise(block.norm2, hidden, before=block.conv1.bias + time, silu=True)
    hidden, bias = _convolve(block.conv2, hidden), block.conv2.bias
    if block.conv_shortcut is not None:
        x = _convolve(block.conv_shortcut, x)
        bias = bias if block.conv_shortcut.bias is None else bias + block.conv_shortcut.bias
    return add(x, hidden, bias)


def _convolve(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def _upsample(block: Any, x: torch.Tensor, output_size: Any = None) -> torch.Tensor:
    """Upsample by nearest neighbours without a change of layout, then apply the block's convolution."""
    scale = 2.0 if output_size is None else None
    larger = F.interpolate(x, size=output_size, scale_factor=scale, mode="nearest")
    convolved: torch.Tensor = (block.conv if block.name == "conv" else block.Conv2d_0)(larger)
    return convolved
