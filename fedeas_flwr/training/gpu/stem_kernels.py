"""BatchNorm, ReLU and max pooling of a ResNet's stem on a GPU: two kernels forward and two backward.

The feature map before pooling is by far the largest of the network; here only the convolution writes it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from fedeas_flwr.training.gpu.batchnorm_kernels import (
    columns_of,
    finalize_stats,
    incoming_grad,
    row_sums,
    rows,
    statistics,
    summed,
)

_AT_ONCE = 1024
"""Elements of a feature map that one program processes."""


@triton.jit  # type: ignore[untyped-decorator]
def _pooled_kernel(  # type: ignore[no-untyped-def]
    x, y, taps, weight, bias, running_mean, running_var, means, inverses, partials, count, pixels, momentum, eps,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    TRACK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the maximum of nine normalised values, at least 0, and its index."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    total, square = summed(partials, channel, is_channel, C, PARTS)
    mean, factor, offset = finalize_stats(
        x, total, square, tl.load(count) * pixels, tl.program_id(1), channel, is_channel, weight, bias, running_mean,
        running_var, means, inverses, momentum, eps, TRACK,
    )  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    image, down, across = row // (DOWN * ACROSS), (row // ACROSS) % DOWN, row % ACROSS
    inside = (row < M)[:, None] & is_channel[None, :]
    best = tl.full([ROWS, COLUMNS], -float("inf"), tl.float32)
    chosen = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tap in tl.static_range(9):
        h = 2 * down - 1 + tap // 3
        w = 2 * across - 1 + tap % 3
        there = inside & ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
        value = tl.load(x + ((image * H + h) * W + w)[:, None] * C + channel[None, :], mask=there, other=0)
        value = (value.to(tl.float32) - mean[None, :]) * factor[None, :] + offset[None, :]
        better = there & (value > best)
        best = tl.where(better, value, best)
        chosen = tl.where(better, tap, chosen)
    where = row[:, None] * C + channel[None, :]
    tl.store(y + where, tl.maximum(best, 0.0).to(y.dtype.element_ty), mask=inside)
    tl.store(taps + where, chosen.to(tl.int8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _pooled_sums_kernel(  # type: ignore[no-untyped-def]
    dy, more_dy, y, taps, x, means, inverses, partials, count,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, TWO: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute Σ g and Σ g x̂ over a part of the pooled rows; a pooled gradient belongs to the maximum and its x̂."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    part = tl.program_id(1)
    number = tl.load(count) * (DOWN * ACROSS)
    mean = tl.load(means + channel, mask=is_channel, other=0)
    inverse = tl.load(inverses + channel, mask=is_channel, other=0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SPAN, ROWS):
        row = part * SPAN + start + tl.arange(0, ROWS)
        counts = ((row < number) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
        where = row[:, None] * C + channel[None, :]
        gradient = incoming_grad(dy, more_dy, y, where, counts, True, TWO)
        tap = tl.load(taps + where, mask=counts, other=4).to(tl.int32)
        h = (2 * ((row // ACROSS) % DOWN) - 1)[:, None] + tap // 3
        w = (2 * (row % ACROSS) - 1)[:, None] + tap % 3
        source = (((row // (DOWN * ACROSS)) * H)[:, None] + h) * W + w
        value = tl.load(x + source * C + channel[None, :], mask=counts, other=0).to(tl.float32)
        sums += gradient
        products += gradient * (value - mean[None, :]) * inverse[None, :]
    tl.store(partials + 2 * part * C + channel, tl.sum(sums, 0), mask=is_channel)
    tl.store(partials + (2 * part + 1) * C + channel, tl.sum(products, 0), mask=is_channel)


@triton.jit  # type: ignore[untyped-decorator]
def _pooled_backward_kernel(  # type: ignore[no-untyped-def]
    dy, more_dy, y, taps, x, weight, means, inverses, partials, count, dx, dweight, dbias, pixels,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    TWO: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute BatchNorm's dx from the gradients of the windows, at most four, whose maximum this value is."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    once = is_channel & (tl.program_id(1) == 0)
    total, product = summed(partials, channel, is_channel, C, PARTS)
    tl.store(dbias + channel, total, mask=once)
    tl.store(dweight + channel, product, mask=once)
    number = tl.load(count) * pixels
    mean = tl.load(means + channel, mask=is_channel, other=0)
    inverse = tl.load(inverses + channel, mask=is_channel, other=0)
    factor = inverse * tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    image, h, w = row // (H * W), (row // W) % H, row % W
    inside = (row < M)[:, None] & is_channel[None, :]
    counts = inside & (row < number)[:, None]
    gradient = tl.zeros([ROWS, COLUMNS], tl.float32)
    for window in tl.static_range(4):
        down = h // 2 + window // 2
        across = w // 2 + window % 2
        tap = (h + 1 - 2 * down) * 3 + w + 1 - 2 * across
        seen = (h + 1 >= 2 * down) & (w + 1 >= 2 * across) & (down < DOWN) & (across < ACROSS)
        there = counts & seen[:, None]
        where = ((image * DOWN + down) * ACROSS + across)[:, None] * C + channel[None, :]
        largest = tl.load(taps + where, mask=there, other=-1).to(tl.int32) == tap[:, None]
        gradient += incoming_grad(dy, more_dy, y, where, there & largest, True, TWO)
    where = row[:, None] * C + channel[None, :]
    value = (tl.load(x + where, mask=counts, other=0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    gradient = (gradient - total[None, :] / number - value * product[None, :] / number) * factor[None, :]
    gradient = tl.where(counts, gradient, 0.0)
    tl.store(dx + where, gradient.to(dx.dtype.element_ty), mask=inside)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, layer: Any, count: Any) -> Any:
        ctx.set_materialize_grads(False)
        x = rows(x)
        (batch, channels, height, width), columns = x.shape, columns_of(x)
        down, across = (height + 1) // 2, (width + 1) // 2
        y = torch.empty(batch, down, across, channels, dtype=x.dtype, device=x.device).movedim(-1, 1)
        taps = torch.empty_like(y, dtype=torch.int8)
        means, inverses = torch.empty(2, channels, device=x.device).unbind()
        partials, at_once = row_sums(x, count), _AT_ONCE // columns
        size = {"C": channels, "H": height, "W": width, "DOWN": down, "ACROSS": across, "COLUMNS": columns}
        _pooled_kernel[(triton.cdiv(channels, columns), triton.cdiv(batch * down * across, at_once))](
            x, y, taps, weight, bias, *statistics(layer, means), means, inverses, partials, count, height * width,
            layer.momentum, layer.eps, M=batch * down * across, TRACK=layer.track_running_stats, PARTS=len(partials),
            ROWS=at_once, **size,
        )  # fmt: skip
        ctx.save_for_backward(x, y, taps, weight, means, inverses, count)
        ctx.size = size
        return y, y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any, more_dy: Any) -> Any:
        x, y, taps, weight, means, inverses, count = ctx.saved_tensors
        two = dy is not None and more_dy is not None
        dy = rows(more_dy if dy is None else dy)
        more_dy = rows(more_dy) if two else dy
        dx = torch.empty_like(x)
        dweight, dbias = torch.empty(2, x.shape[1], device=x.device).unbind()
        channels, columns = x.shape[1], ctx.size["COLUMNS"]
        programs, number, pooled = triton.cdiv(channels, columns), x.numel() // channels, y.numel() // channels
        at_once = _AT_ONCE // columns
        parts = min(triton.next_power_of_2(triton.cdiv(pooled, at_once)), 64)
        partials = torch.empty(parts, 2, channels, device=x.device)
        _pooled_sums_kernel[(programs, parts)](
            dy, more_dy, y, taps, x, means, inverses, partials, count,
            TWO=two, SPAN=triton.cdiv(pooled, parts), ROWS=at_once, **ctx.size,
        )  # fmt: skip
        _pooled_backward_kernel[(programs, triton.cdiv(number, at_once))](
            dy, more_dy, y, taps, x, weight, means, inverses, partials, count, dx, dweight, dbias, x[0, 0].numel(),
            M=number, TWO=two, PARTS=parts, ROWS=at_once, **ctx.size,
        )  # fmt: skip
        return dx, dweight, dbias, None, None


def is_known_pooling(layer: Any) -> bool:
    """Return whether a layer is the max pooling of torchvision's ResNet stem: 3×3 with stride 2."""
    if not isinstance(layer, nn.MaxPool2d) or layer.ceil_mode or layer.return_indices:
        return False
    pairs = [(n, n) if isinstance(n, int) else tuple(n) for n in (layer.kernel_size, layer.stride, layer.padding)]
    return pairs == [(3, 3), (2, 2), (1, 1)] and layer.dilation in (1, (1, 1))


def pooled(layer: Any, count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``maxpool(relu(layer(x)))`` over the first ``count`` samples twice, for two uses."""
    y: tuple[torch.Tensor, torch.Tensor] = _Pooled.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, layer, count
    )
    return y
