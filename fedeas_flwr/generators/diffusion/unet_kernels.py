"""GroupNorm, scale, shift and SiLU of a UNet on a GPU as few passes over memory, forward and backward.

Eager PyTorch normalises, scales, shifts and activates in one pass over memory each, adds a convolution's bias in
another, concatenates skip connections in a third, and copies to a layout that its GroupNorm can read and back; that
takes longer than the convolutions. Here a kernel that writes a map also sums its channels, and another one reads the
map and writes what the next convolution reads. Maps are channels last: ``[N, C, H, W]`` in PyTorch's terms,
``[N, H, W, C]`` in memory. torch.compile finds some of this, but takes a minute or two in every process; these kernels
take seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

_ELEMENTS, _SPAN, _MAX_BLOCK, _WARPS = 2048, 128, 32, 2
"""Elements that a program reads at once, rows (pixels) that it processes, its largest number of channels
and its warps."""

# A program's part of a map: the channels ``pid 0`` of one of the maps that are normalised together (its ``own``
# channels follow the ``start`` channels of others), the rows ``pid 1`` and the image ``pid 2``.


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]
    x, sums, pixels, own, start, channels, SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the sum and the sum of squares of each channel over this program's rows."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)  # summed over rows once, at the end, since that synchronises threads
    squared = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, SPAN, ROWS):
        row = span * SPAN + step + tl.arange(0, ROWS)
        at = (image * pixels + row[:, None]) * own + channel[None, :]
        value = tl.load(x + at, mask=(row < pixels)[:, None], other=0).to(tl.float32)
        total += value
        squared += value * value
    to = sums + (image * tl.num_programs(1) + span) * 2 * channels + start + channel
    tl.store(to, tl.sum(total, 0))
    tl.store(to + channels, tl.sum(squared, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _table_kernel(  # type: ignore[no-untyped-def]
    sums, before, before_stride, weight, bias, scale_shift, table, eps, pixels, channels, SPANS: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_SCALE_SHIFT: tl.constexpr,
):  # fmt: skip
    """Store an image's table: mean and variance of each group, as a factor and an offset of each channel."""
    size = channels // GROUPS
    image = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, MEMBERS)
    channel = tl.arange(0, GROUPS)[:, None] * size + member[None, :]
    real = (member < size)[None, :] & (channel >= 0)
    total = tl.zeros([GROUPS, MEMBERS], tl.float32)
    squared = tl.zeros([GROUPS, MEMBERS], tl.float32)
    for span in range(SPANS):
        at = sums + (image * SPANS + span) * 2 * channels + channel
        total += tl.load(at, mask=real, other=0)
        squared += tl.load(at + channels, mask=real, other=0)
    added = tl.zeros([GROUPS, MEMBERS], tl.float32)
    if HAS_BEFORE:
        added = tl.load(before + image * before_stride + channel, mask=real, other=0).to(tl.float32)
        squared += (2 * total + pixels * added) * added
        total += pixels * added
    mean = tl.sum(total, 1) / (pixels * size)
    variance = tl.sum(squared, 1) / (pixels * size) - mean * mean
    inverse = (1 / tl.sqrt(tl.maximum(variance, 0.0) + eps))[:, None]
    shifted = added - mean[:, None]
    factor = inverse * tl.load(weight + channel, mask=real, other=0).to(tl.float32)
    offset = tl.load(bias + channel, mask=real, other=0).to(tl.float32) + shifted * factor
    if HAS_SCALE_SHIFT:
        at = scale_shift + image * 2 * channels + channel
        scale = 1 + tl.load(at, mask=real, other=0).to(tl.float32)
        factor *= scale
        offset = offset * scale + tl.load(at + channels, mask=real, other=0).to(tl.float32)
    to = table + image * 4 * channels + channel
    tl.store(to, factor, mask=real)
    tl.store(to + channels, offset, mask=real)
    tl.store(to + 2 * channels, shifted, mask=real)
    tl.store(to + 3 * channels, inverse + tl.zeros([GROUPS, MEMBERS], tl.float32), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_kernel(  # type: ignore[no-untyped-def]
    x, table, out, pixels, own, start, channels, SILU: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the normalised channels of this program."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = table + image * 4 * channels + start + channel
    factor, offset = tl.load(entry)[None, :], tl.load(entry + channels)[None, :]
    for step in range(0, SPAN, ROWS):
        row = span * SPAN + step + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None]
        pixel = image * pixels + row[:, None]
        value = tl.load(x + pixel * own + channel[None, :], mask=inside, other=0).to(tl.float32) * factor + offset
        if SILU:
            value = value * tl.sigmoid(value)
        tl.store(out + pixel * channels + start + channel[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _through_silu(z, gradient, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the gradient of SiLU's input z."""
    if SILU:
        sigmoid = tl.sigmoid(z)
        gradient *= sigmoid * (1 + z * (1 - sigmoid))
    return gradient


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_sums_kernel(  # type: ignore[no-untyped-def]
    x, table, gradient, sums, pixels, own, start, channels, SILU: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sums of the gradient of SiLU's input, and of its product with x, over this program's rows."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = table + image * 4 * channels + start + channel
    factor, offset = tl.load(entry)[None, :], tl.load(entry + channels)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    product = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, SPAN, ROWS):
        row = span * SPAN + step + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None]
        pixel = image * pixels + row[:, None]
        value = tl.load(x + pixel * own + channel[None, :], mask=inside, other=0).to(tl.float32)
        came = tl.load(gradient + pixel * channels + start + channel[None, :], mask=inside, other=0).to(tl.float32)
        came = _through_silu(value * factor + offset, came, SILU)
        total += came
        product += came * value
    to = sums + (image * tl.num_programs(1) + span) * 2 * channels + start + channel
    tl.store(to, tl.sum(total, 0))
    tl.store(to + channels, tl.sum(product, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_table_kernel(  # type: ignore[no-untyped-def]
    sums, gradient_sums, table, weight, bias, scale_shift, coefficients, of_affine, of_before, of_scale_shift,
    pixels, channels, SPANS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, HAS_SCALE_SHIFT: tl.constexpr,
):  # fmt: skip
    """Store an image's gradients of all inputs but x, and two coefficients of each channel for that of x.

    With z = SiLU's input, n = the normalised x and w = weight · (1 + scale), the gradient of x is
    factor · dz - inverse · mean(w · dz) - inverse · n · mean(w · dz · n); the means are those of a group.
    """
    size = channels // GROUPS
    image = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, MEMBERS)
    channel = tl.arange(0, GROUPS)[:, None] * size + member[None, :]
    real = (member < size)[None, :] & (channel >= 0)
    total = tl.zeros([GROUPS, MEMBERS], tl.float32)
    dz = tl.zeros([GROUPS, MEMBERS], tl.float32)
    product = tl.zeros([GROUPS, MEMBERS], tl.float32)
    for span in range(SPANS):
        at = (image * SPANS + span) * 2 * channels + channel
        total += tl.load(sums + at, mask=real, other=0)
        dz += tl.load(gradient_sums + at, mask=real, other=0)
        product += tl.load(gradient_sums + at + channels, mask=real, other=0)
    entry = table + image * 4 * channels + channel
    factor = tl.load(entry, mask=real, other=0)
    shifted = tl.load(entry + 2 * channels, mask=real, other=0)
    inverse = tl.load(entry + 3 * channels, mask=real, other=0)
    product = inverse * (product + shifted * dz)
    scaled = tl.load(weight + channel, mask=real, other=0).to(tl.float32)
    scale = tl.zeros([GROUPS, MEMBERS], tl.float32) + 1
    if HAS_SCALE_SHIFT:
        to = of_scale_shift + image * 2 * channels + channel
        own = tl.load(bias + channel, mask=real, other=0).to(tl.float32)
        tl.store(to, (scaled * product + own * dz).to(of_scale_shift.dtype.element_ty), mask=real)
        tl.store(to + channels, dz.to(of_scale_shift.dtype.element_ty), mask=real)
        scale += tl.load(scale_shift + image * 2 * channels + channel, mask=real, other=0).to(tl.float32)
        scaled *= scale
    to = of_affine + image * 2 * channels + channel
    tl.store(to, scale * product, mask=real)
    tl.store(to + channels, scale * dz, mask=real)
    mean = (tl.sum(scaled * dz, 1) / (pixels * size))[:, None]
    mean_product = (tl.sum(scaled * product, 1) / (pixels * size))[:, None]
    slope = -inverse * inverse * mean_product
    constant = shifted * slope - inverse * mean
    to = coefficients + image * 2 * channels + channel
    tl.store(to, slope, mask=real)
    tl.store(to + channels, constant, mask=real)
    tl.store(of_before + image * channels + channel, factor * dz + slope * total + constant * pixels, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_apply_kernel(  # type: ignore[no-untyped-def]
    x, table, coefficients, gradient, out, pixels, own, start, channels, SILU: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x for the channels of this program."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = table + image * 4 * channels + start + channel
    factor, offset = tl.load(entry)[None, :], tl.load(entry + channels)[None, :]
    entry = coefficients + image * 2 * channels + start + channel
    slope, constant = tl.load(entry)[None, :], tl.load(entry + channels)[None, :]
    for step in range(0, SPAN, ROWS):
        row = span * SPAN + step + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None]
        pixel = image * pixels + row[:, None]
        value = tl.load(x + pixel * own + channel[None, :], mask=inside, other=0).to(tl.float32)
        came = tl.load(gradient + pixel * channels + start + channel[None, :], mask=inside, other=0).to(tl.float32)
        came = _through_silu(value * factor + offset, came, SILU)
        value = factor * came + slope * value + constant
        tl.store(out + pixel * own + channel[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]
    x, y, bias, out, sums, width, pixels, own, start, channels, HAS_Y: tl.constexpr, DOUBLES: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store x + y + bias for the channels of this program, and its sums; if it doubles sides, each pixel four times."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    span, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    added = tl.load(bias + channel).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squared = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, SPAN, ROWS):
        row = span * SPAN + step + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None]
        at = (image * pixels + row[:, None]) * own + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32) + added
        if HAS_Y:
            value += tl.load(y + at, mask=inside, other=0).to(tl.float32)
        value = value.to(out.dtype.element_ty)
        if DOUBLES:
            corner = row // width * 4 * width + row % width * 2
            to = out + (image * 4 * pixels + corner[:, None]) * own + channel[None, :]
            tl.store(to, value, mask=inside)
            tl.store(to + own, value, mask=inside)
            tl.store(to + 2 * width * own, value, mask=inside)
            tl.store(to + (2 * width + 1) * own, value, mask=inside)
        else:
            tl.store(out + at, value, mask=inside)
            stored = tl.where(inside, value.to(tl.float32), 0.0)
            total += stored
            squared += stored * stored
    if not DOUBLES:
        to = sums + (image * tl.num_programs(1) + span) * 2 * own + channel
        tl.store(to, tl.sum(total, 0))
        tl.store(to + own, tl.sum(squared, 0))


class _Tiles:
    """How programs divide maps of the same size, which are normalised together as if concatenated."""

    def __init__(self, *maps: torch.Tensor) -> None:
        self.images, self.pixels = len(maps[0]), maps[0][0, 0].numel()
        self.channels = sum(x.shape[1] for x in maps)
        self.spans = triton.cdiv(self.pixels, _SPAN)

    def launch(self, kernel: Any, x: torch.Tensor, *tensors: Any, start: int = 0, **settings: Any) -> None:
        """Launch a kernel on all tiles of the map ``x``, whose first channel is channel ``start`` of all."""
        own = x.shape[1]
        block = min(own & -own, _MAX_BLOCK)  # the largest power of two that divides it
        rows = min(_ELEMENTS // block, triton.next_power_of_2(self.pixels), _SPAN)
        kernel[(own // block, self.spans, self.images)](
            x,
            *tensors,
            self.pixels,
            own,
            start,
            self.channels,
            SPAN=_SPAN,
            ROWS=rows,
            BLOCK=block,
            num_warps=_WARPS,
            **settings,
        )

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return a new float32 tensor [images, *shape, channels] on the device of ``like``."""
        return torch.empty(self.images, *shape, self.channels, device=like.device)


class Map(NamedTuple):
    """A map, and for each image and some of its rows the sum and the sum of squares of every channel."""

    values: torch.Tensor
    sums: torch.Tensor


def with_sums(x: torch.Tensor) -> Map:
    """Return a map ``[N, C, H, W]`` and its sums."""
    x = x.contiguous(memory_format=torch.channels_last)
    tiles = _Tiles(x)
    sums = tiles.empty(x, tiles.spans, 2)
    tiles.launch(_sums_kernel, x.detach(), sums)
    return Map(x, sums)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        norm: nn.GroupNorm,
        silu: bool,
        weight: torch.Tensor,
        bias: torch.Tensor,
        before: torch.Tensor | None,
        scale_shift: torch.Tensor | None,
        sums: torch.Tensor,
        *maps: torch.Tensor,
    ) -> torch.Tensor:
        tiles, first = _Tiles(*maps), maps[0]
        table, start = tiles.empty(first, 4), 0
        ctx.groups = {
            "pixels": tiles.pixels, "channels": tiles.channels, "GROUPS": norm.num_groups, "SPANS": tiles.spans,
            "MEMBERS": triton.next_power_of_2(tiles.channels // norm.num_groups),
            "HAS_SCALE_SHIFT": scale_shift is not None,
        }  # fmt: skip
        stride = 0 if before is None or before.dim() == 1 else tiles.channels
        _table_kernel[(tiles.images,)](
            sums, before, stride, weight, bias, scale_shift, table, norm.eps, HAS_BEFORE=before is not None,
            **ctx.groups,
        )  # fmt: skip
        out = _empty(first, tiles.channels, *first.shape[2:])
        for x in maps:
            tiles.launch(_apply_kernel, x, table, out, start=start, SILU=silu)
            start += x.shape[1]
        ctx.silu, ctx.before = silu, None if before is None else before.dim()
        ctx.save_for_backward(weight, bias, scale_shift, sums, table, *maps)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, bias, scale_shift, sums, table, *maps = ctx.saved_tensors
        tiles, first, start = _Tiles(*maps), maps[0], 0
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        gradient_sums = tiles.empty(first, tiles.spans, 2)
        for x in maps:
            tiles.launch(_gradient_sums_kernel, x, table, gradient, gradient_sums, start=start, SILU=ctx.silu)
            start += x.shape[1]
        coefficients, of_affine, of_before = tiles.empty(first, 2), tiles.empty(first, 2), tiles.empty(first)
        of_scale_shift = None if scale_shift is None else torch.empty_like(scale_shift)
        _gradient_table_kernel[(tiles.images,)](
            sums, gradient_sums, table, weight, bias, scale_shift, coefficients, of_affine, of_before, of_scale_shift,
            **ctx.groups,
        )  # fmt: skip
        of_weight, of_bias = of_affine.sum(0)
        of_maps, start = [torch.empty_like(x) for x in maps], 0
        for x, out in zip(maps, of_maps, strict=True):
            tiles.launch(_gradient_apply_kernel, x, table, coefficients, gradient, out, start=start, SILU=ctx.silu)
            start += x.shape[1]
        summed = None if ctx.before is None else of_before.sum(0) if ctx.before == 1 else of_before
        return None, None, of_weight, of_bias, summed, of_scale_shift, None, *of_maps


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor | None, bias: torch.Tensor, doubled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (_, channels, height, width), tiles = x.shape, _Tiles(x)
        ctx.doubled, ctx.has_y = doubled, y is not None
        out = _empty(x, channels, *((2 * height, 2 * width) if doubled else (height, width)))
        sums = tiles.empty(x, tiles.spans, 2)
        tiles.launch(_add_kernel, x, y, bias, out, sums, width, HAS_Y=y is not None, DOUBLES=doubled)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_sums: torch.Tensor) -> Any:
        if ctx.doubled:
            gradient = F.avg_pool2d(gradient, 2, divisor_override=1)
        came = with_sums(gradient)
        return came.values, came.values if ctx.has_y else None, came.sums[:, :, 0].sum((0, 1)), None


def _empty(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a new map of another shape [C, H, W] with the images, type and device of a map."""
    return torch.empty(len(x), *shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def normalise(
    norm: nn.GroupNorm,
    *maps: Map,
    before: torch.Tensor | None = None,
    scale_shift: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """Return GroupNorm of ``x + before``, optionally ``· (1 + scale) + shift``, then optionally SiLU.

    x is the concatenation of ``maps``. ``before`` is ``[C]`` or ``[N, C]``, such as the bias of
    the preceding convolution; ``scale_shift`` is ``[N, 2C]``.
    """
    values, sums = zip(*maps, strict=True)
    together = sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)
    scale_shift = None if scale_shift is None else scale_shift.contiguous()
    out: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        norm, silu, norm.weight, norm.bias, before, scale_shift, together, *values
    )
    return out


def add(x: torch.Tensor, y: torch.Tensor | None, bias: torch.Tensor, *, doubled: bool = False) -> Map:
    """Return ``x + y + bias`` of maps ``[N, C, H, W]``.

    ``doubled``: with sides doubled by nearest neighbours, for a convolution; its sums are undefined.
    """
    last = [each if each is None else each.contiguous(memory_format=torch.channels_last) for each in (x, y)]
    return Map(*_Add.apply(*last, bias, doubled))  # type: ignore[no-untyped-call]
