"""BatchNorm of small feature maps on a GPU, fused with ReLU and sum: one or two kernels forward, the same backward.

A ResNet-18 step on 64 images of 32×32 is about 300 kernels of a few microseconds; half of its time was BatchNorm and
adjacent operations. Here a program processes a few channels and some or all of their rows. It can also normalise the
map that is added (a block's shortcut), and add two incoming gradients (of a block's main branch and shortcut) without
another kernel. The kernel reads the number of real rows from the device, so a padded batch costs as much as a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096
"""Elements of a feature map that one program processes: enough to keep it busy, few enough that a large map occupies
every multiprocessor."""
_SECTOR = 32
"""Bytes of one memory transaction: the size of a program's channels in one row."""
_BOTH, _SUMS, _APPLY = 0, 1, 2
"""Phases of a kernel. One program processes all rows of a small map (_BOTH); several share the rows of a large map, in
two launches (_SUMS, then _APPLY)."""
_NOTHING, _MAP, _NORMALISED = 0, 1, 2
"""What the kernel adds to the normalised map: nothing, a map, or a map that it normalises first."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, added, y, weight, bias, running_mean, running_var, means, inverses,
    weight2, bias2, running_mean2, running_var2, partials, count, pixels, momentum, eps,
    M: tl.constexpr, C: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr, TRACK: tl.constexpr,
    PHASE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of this program's channels over the real rows, then normalise all rows."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    part = tl.program_id(1)
    number = tl.load(count) * pixels
    if PHASE == 2:
        total, square = _summed(partials, channel, is_channel, C, PARTS)
    else:
        total, square = _sums(x, number, part, channel, is_channel, C, SPAN, ROWS, COLUMNS)
    if PHASE == 1:
        tl.store(partials + 2 * part * C + channel, total, mask=is_channel)
        tl.store(partials + (2 * part + 1) * C + channel, square, mask=is_channel)
    else:
        mean, factor, offset = _finalize_stats(
            x, total, square, number, part, channel, is_channel, weight, bias, running_mean, running_var, means,
            inverses, momentum, eps, TRACK,
        )  # fmt: skip
        if ADDS == 2:
            total, square = _sums(added, number, part, channel, is_channel, C, SPAN, ROWS, COLUMNS)
            mean2, factor2, offset2 = _finalize_stats(
                added, total, square, number, part, channel, is_channel, weight2, bias2, running_mean2, running_var2,
                means + C, inverses + C, momentum, eps, TRACK,
            )  # fmt: skip
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            inside = ((row < M) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            where = row[:, None] * C + channel[None, :]
            value = tl.load(x + where, mask=inside, other=0).to(tl.float32)
            value = (value - mean[None, :]) * factor[None, :] + offset[None, :]
            if ADDS > 0:
                more = tl.load(added + where, mask=inside, other=0).to(tl.float32)
                if ADDS == 2:
                    more = (more - mean2[None, :]) * factor2[None, :] + offset2[None, :]
                value += more
            if RELU:
                value = tl.maximum(value, 0.0)
            tl.store(y + where, value.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x, number, part, channel, is_channel, C: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums of the differences to the first row, and of their squares, over this part's real rows.

    Differences keep the variance accurate when the mean is far from zero.
    """
    shift = tl.load(x + channel, mask=is_channel, other=0).to(tl.float32)
    totals = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SPAN, ROWS):
        row = part * SPAN + start + tl.arange(0, ROWS)
        counts = ((row < number) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], mask=counts, other=0).to(tl.float32)
        value = tl.where(counts, value - shift[None, :], 0.0)
        totals += value
        squares += value * value
    return tl.sum(totals, 0), tl.sum(squares, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _summed(partials, channel, is_channel, C: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the two sums over all parts of the rows."""
    where = 2 * tl.arange(0, PARTS)[:, None] * C + channel[None, :]
    first = tl.sum(tl.load(partials + where, mask=is_channel[None, :], other=0), 0)
    second = tl.sum(tl.load(partials + C + where, mask=is_channel[None, :], other=0), 0)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _finalize_stats(  # type: ignore[no-untyped-def]
    x, total, square, number, part, channel, is_channel, weight, bias, running_mean, running_var, means, inverses,
    momentum, eps, TRACK: tl.constexpr,
):  # fmt: skip
    """Return mean, factor and offset of (value − mean) · factor + offset; the first part stores the statistics."""
    moved = total / number
    variance = tl.maximum(square / number - moved * moved, 0.0)
    mean = moved + tl.load(x + channel, mask=is_channel, other=0).to(tl.float32)
    inverse = 1 / tl.sqrt(variance + eps)
    once = is_channel & (part == 0)
    tl.store(means + channel, mean, mask=once)
    tl.store(inverses + channel, inverse, mask=once)
    if TRACK:
        before = tl.load(running_mean + channel, mask=once, other=0)
        tl.store(running_mean + channel, before + momentum * (mean - before), mask=once)
        before = tl.load(running_var + channel, mask=once, other=0)
        unbiased = variance * number / (number - 1)
        tl.store(running_var + channel, before + momentum * (unbiased - before), mask=once)
    factor = inverse * tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
    return mean, factor, tl.load(bias + channel, mask=is_channel, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, more_dy, y, x, added, weight, weight2, means, inverses, partials, count, dx, dadded, dweight, dbias, pixels,
    M: tl.constexpr, C: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr, TWO: tl.constexpr,
    PHASE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dx = w/σ (g − mean g − x̂ · mean g x̂) over the real rows, g the gradient behind the ReLU; 0 elsewhere."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    part = tl.program_id(1)
    number = tl.load(count) * pixels
    mean = tl.load(means + channel, mask=is_channel, other=0)
    inverse = tl.load(inverses + channel, mask=is_channel, other=0)
    if ADDS == 2:
        mean2 = tl.load(means + C + channel, mask=is_channel, other=0)
        inverse2 = tl.load(inverses + C + channel, mask=is_channel, other=0)
        products2 = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PHASE == 2:
        total, product = _summed(partials, channel, is_channel, C, PARTS)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        products = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            counts = ((row < number) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            where = row[:, None] * C + channel[None, :]
            gradient = _incoming_grad(dy, more_dy, y, where, counts, RELU, TWO)
            value = tl.load(x + where, mask=counts, other=0).to(tl.float32)
            sums += gradient
            products += gradient * (value - mean[None, :]) * inverse[None, :]
            if ADDS == 2:
                value = tl.load(added + where, mask=counts, other=0).to(tl.float32)
                products2 += gradient * (value - mean2[None, :]) * inverse2[None, :]
        total = tl.sum(sums, 0)
        product = tl.sum(products, 0)
    if PHASE == 1:
        tl.store(partials + 2 * part * C + channel, total, mask=is_channel)
        tl.store(partials + (2 * part + 1) * C + channel, product, mask=is_channel)
    else:
        once = is_channel & (part == 0)
        tl.store(dbias + channel, total, mask=once)
        tl.store(dweight + channel, product, mask=once)
        factor = inverse * tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
        if ADDS == 2:
            product2 = tl.sum(products2, 0)
            tl.store(dbias + C + channel, total, mask=once)
            tl.store(dweight + C + channel, product2, mask=once)
            factor2 = inverse2 * tl.load(weight2 + channel, mask=is_channel, other=0).to(tl.float32)
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            inside = ((row < M) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            counts = inside & (row < number)[:, None]
            where = row[:, None] * C + channel[None, :]
            gradient = _incoming_grad(dy, more_dy, y, where, counts, RELU, TWO)
            if ADDS == 1:
                tl.store(dadded + where, gradient.to(dadded.dtype.element_ty), mask=inside)
            if ADDS == 2:
                value = (tl.load(added + where, mask=counts, other=0).to(tl.float32) - mean2[None, :]) * inverse2[
                    None, :
                ]
                slope = (gradient - total[None, :] / number - value * product2[None, :] / number) * factor2[None, :]
                slope = tl.where(counts, slope, 0.0)
                tl.store(dadded + where, slope.to(dadded.dtype.element_ty), mask=inside)
            value = (tl.load(x + where, mask=counts, other=0).to(tl.float32) - mean[None, :]) * inverse[None, :]
            gradient = (gradient - total[None, :] / number - value * product[None, :] / number) * factor[None, :]
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(dx + where, gradient.to(dx.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _incoming_grad(dy, more_dy, y, where, counts, RELU: tl.constexpr, TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of the two incoming gradients, masked by the ReLU."""
    gradient = tl.load(dy + where, mask=counts, other=0).to(tl.float32)
    if TWO:
        gradient += tl.load(more_dy + where, mask=counts, other=0).to(tl.float32)
    if RELU:
        gradient = tl.where(tl.load(y + where, mask=counts, other=0).to(tl.float32) > 0, gradient, 0.0)
    return gradient


class _BatchNorm(torch.autograd.Function):
    """Compute ``relu(batchnorm(x) + added)`` in training mode; return it once, or twice with separate gradients.

    ``added`` is None, a map, or a map that ``other``, a second layer with its own weights, normalises first. A single
    result may be changed in place, as by ``ReLU(inplace=True)``: torch permits that for no output of several, and for
    none that the backward pass reads.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, added: Any, weight: Any, bias: Any, weight2: Any, bias2: Any,
        layer: Any, other: Any, count: Any, relu: bool, twice: bool,
    ) -> Any:  # fmt: skip
        ctx.set_materialize_grads(False)  # an unused output has no gradient
        x = _rows(x)
        added = None if added is None else _rows(added)
        y = torch.empty_like(x)
        means, inverses = torch.empty(2, 2 if other else 1, x.shape[1], device=x.device).unbind()
        ctx.adds, ctx.relu = _NOTHING if added is None else _NORMALISED if other else _MAP, relu
        second = other or layer
        _launch(
            _forward_kernel, x,
            (x, _or(added, x), y, weight, bias, *_statistics(layer, means), means, inverses,
             _or(weight2, weight), _or(bias2, bias), *_statistics(second, means)),
            (count, x[0, 0].numel(), layer.momentum, layer.eps),
            ADDS=ctx.adds, RELU=relu, TRACK=layer.track_running_stats,
        )  # fmt: skip
        ctx.save_for_backward(x, added, y if relu else x, weight, weight2, means, inverses, count)
        return (y, y.view_as(y)) if twice else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any, more_dy: Any = None) -> Any:
        x, added, y, weight, weight2, means, inverses, count = ctx.saved_tensors
        two = dy is not None and more_dy is not None
        dy = _rows(_or(dy, more_dy))
        more_dy = _rows(more_dy) if two else dy
        dx = torch.empty_like(x)
        dadded = None if added is None else torch.empty_like(x)
        dweight, dbias = torch.empty(2, *means.shape, device=x.device).unbind()
        _launch(
            _backward_kernel, x,
            (dy, more_dy, y, x, _or(added, x), weight, _or(weight2, weight), means, inverses),
            (count, dx, _or(dadded, dx), dweight, dbias, x[0, 0].numel()),
            ADDS=ctx.adds, RELU=ctx.relu, TWO=two,
        )  # fmt: skip
        more = (dweight[1], dbias[1]) if ctx.adds == _NORMALISED else (None, None)
        return dx, dadded, dweight[0], dbias[0], *more, None, None, None, None, None


def batchnorm(
    layer: Any, count: torch.Tensor, x: torch.Tensor, added: torch.Tensor | None = None, relu: bool = False,
    other: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``relu(layer(x) + other(added))`` over the first ``count`` samples twice, for two uses.

    ``other`` is a BatchNorm too, or None: then ``added`` is added unchanged.
    """
    if other is not None and (_parts(x) > 1 or _batchnorm_args(other) != _batchnorm_args(layer)):
        added, other = plain_batchnorm(other, count, added), None  # type: ignore[arg-type]
    second = (other.weight, other.bias) if other is not None else (None, None)
    y: tuple[torch.Tensor, torch.Tensor] = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, added, layer.weight, layer.bias, *second, layer, other, count, relu, True
    )
    return y


def plain_batchnorm(layer: Any, count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``layer(x)`` over the first ``count`` samples; the caller may change it in place."""
    y: torch.Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, None, layer.weight, layer.bias, None, None, layer, None, count, False, False
    )
    return y


def _statistics(layer: Any, instead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's running mean and variance, or ``instead`` twice if it has none; the kernel then ignores them."""
    return _or(layer.running_mean, instead), _or(layer.running_var, instead)


def _or(tensor: torch.Tensor | None, other: Any) -> Any:
    return other if tensor is None else tensor


def _batchnorm_args(layer: Any) -> tuple[Any, ...]:
    return layer.momentum, layer.eps, layer.track_running_stats


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return the map with its channels last in memory, as rows of channels."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)  # no copy if they are last already


def _columns_of(x: torch.Tensor) -> int:
    """Return the number of channels per program."""
    return _SECTOR // x.element_size()


def _parts(x: torch.Tensor) -> int:
    """Return the number of parts that the rows of a map are divided into."""
    elements = x.numel() // x.shape[1] * _columns_of(x)
    parts = min(triton.next_power_of_2(triton.cdiv(elements, _ELEMENTS)), 64)
    return parts if parts > 4 else 1  # a second launch costs more than it saves


def _shape(x: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs for a map, and the kernel's sizes."""
    channels, number, columns, parts = x.shape[1], x.numel() // x.shape[1], _columns_of(x), _parts(x)
    span = triton.cdiv(number, parts)
    at_once = min(triton.next_power_of_2(span), 4 * _ELEMENTS // columns)
    sizes = {"M": number, "C": channels, "PARTS": parts, "SPAN": span, "ROWS": at_once, "COLUMNS": columns}
    warps = min(max(at_once * columns // 1024, 4), 16)
    return (triton.cdiv(channels, columns), parts), sizes | {"num_warps": warps}


def _launch(kernel: Any, x: torch.Tensor, before: Sequence[Any], after: Sequence[Any], **constants: Any) -> None:
    """Run a kernel on all channels and rows of ``x``: in one launch, or in two, of which the first sums the parts."""
    grid, sizes = _shape(x)
    partials = torch.empty(sizes["PARTS"], 2, sizes["C"], device=x.device)
    for phase in [_SUMS, _APPLY] if sizes["PARTS"] > 1 else [_BOTH]:
        kernel[grid](*before, partials, *after, PHASE=phase, **sizes, **constants)
