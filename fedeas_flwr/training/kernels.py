"""BatchNorm for small maps on a GPU: with the ReLU and the sum around it, forward one kernel or two, backward likewise.

A ResNet-18 step on 64 images of 32×32 is some 300 kernels of a few microseconds; half of its time went to BatchNorm and
what surrounds it. Here a program holds a few channels and some or all of their rows. The number of rows that count
comes from the device, so that a padded batch costs what a full one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

_ELEMENTS = 4096
"""Of a map in one program: enough to keep it busy, few enough that a large map gives every multiprocessor some."""
_SECTOR = 32
"""Bytes that memory delivers at once: a program's channels of one row."""
_BOTH, _SUMS, _APPLY = 0, 1, 2
"""A small map's channels are done by one program each; a large map's rows are spread over many, in two launches."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, residual, y, weight, bias, running_mean, running_var, means, inverses, partials, count, pixels, momentum, eps,
    M: tl.constexpr, C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr, TRACK: tl.constexpr,
    PHASE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Statistics of this program's channels over the rows that count, then all rows normalised."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    part = tl.program_id(1)
    number = tl.load(count) * pixels
    # Sums are taken of differences to the first row: a mean far from zero must not drown the variance.
    shift = tl.load(x + channel, mask=is_channel, other=0).to(tl.float32)
    if PHASE == 2:
        total, square = _summed(partials, channel, is_channel, C, PARTS)
    else:
        totals = tl.zeros([ROWS, COLUMNS], tl.float32)
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            counts = ((row < number) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            value = tl.load(x + row[:, None] * C + channel[None, :], mask=counts, other=0).to(tl.float32)
            value = tl.where(counts, value - shift[None, :], 0.0)
            totals += value
            squares += value * value
        total = tl.sum(totals, 0)
        square = tl.sum(squares, 0)
    if PHASE == 1:
        tl.store(partials + 2 * part * C + channel, total, mask=is_channel)
        tl.store(partials + (2 * part + 1) * C + channel, square, mask=is_channel)
    else:
        moved = total / number
        variance = tl.maximum(square / number - moved * moved, 0.0)
        mean = moved + shift
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
        offset = tl.load(bias + channel, mask=is_channel, other=0).to(tl.float32)
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            inside = ((row < M) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            where = row[:, None] * C + channel[None, :]
            value = tl.load(x + where, mask=inside, other=0).to(tl.float32)
            value = (value - mean[None, :]) * factor[None, :] + offset[None, :]
            if HAS_RESIDUAL:
                value += tl.load(residual + where, mask=inside, other=0).to(tl.float32)
            if RELU:
                value = tl.maximum(value, 0.0)
            tl.store(y + where, value.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _summed(partials, channel, is_channel, C: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two sums of all parts of the rows."""
    where = 2 * tl.arange(0, PARTS)[:, None] * C + channel[None, :]
    first = tl.sum(tl.load(partials + where, mask=is_channel[None, :], other=0), 0)
    second = tl.sum(tl.load(partials + C + where, mask=is_channel[None, :], other=0), 0)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, y, x, weight, means, inverses, partials, count, dx, dresidual, dweight, dbias, pixels,
    M: tl.constexpr, C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    PHASE: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = w/σ (g − mean g − x̂ · mean g x̂) over the rows that count, g the gradient behind the ReLU; 0 elsewhere."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    part = tl.program_id(1)
    number = tl.load(count) * pixels
    mean = tl.load(means + channel, mask=is_channel, other=0)
    inverse = tl.load(inverses + channel, mask=is_channel, other=0)
    if PHASE == 2:
        total, product = _summed(partials, channel, is_channel, C, PARTS)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        products = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            counts = ((row < number) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            where = row[:, None] * C + channel[None, :]
            gradient = tl.load(dy + where, mask=counts, other=0).to(tl.float32)
            if RELU:
                gradient = tl.where(tl.load(y + where, mask=counts, other=0).to(tl.float32) > 0, gradient, 0.0)
            value = tl.load(x + where, mask=counts, other=0).to(tl.float32)
            sums += gradient
            products += gradient * (value - mean[None, :]) * inverse[None, :]
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
        for start in range(0, SPAN, ROWS):
            row = part * SPAN + start + tl.arange(0, ROWS)
            inside = ((row < M) & (row < (part + 1) * SPAN))[:, None] & is_channel[None, :]
            counts = inside & (row < number)[:, None]
            where = row[:, None] * C + channel[None, :]
            gradient = tl.load(dy + where, mask=counts, other=0).to(tl.float32)
            if RELU:
                gradient = tl.where(tl.load(y + where, mask=counts, other=0).to(tl.float32) > 0, gradient, 0.0)
            if HAS_RESIDUAL:
                tl.store(dresidual + where, gradient.to(dresidual.dtype.element_ty), mask=inside)
            value = (tl.load(x + where, mask=counts, other=0).to(tl.float32) - mean[None, :]) * inverse[None, :]
            gradient = (gradient - total[None, :] / number - value * product[None, :] / number) * factor[None, :]
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(dx + where, gradient.to(dx.dtype.element_ty), mask=inside)


class _BatchNorm(torch.autograd.Function):
    """``relu(batchnorm(x) + residual)`` in training mode; the last two where asked for."""

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, bias: Any, layer: Any, count: Any, relu: bool) -> Any:
        x = _rows(x)
        residual = None if residual is None else _rows(residual)
        y = torch.empty_like(x)
        means, inverses = torch.empty(2, x.shape[1], device=x.device).unbind()
        _launch(
            _forward_kernel, x,
            (x, residual, y, weight, bias, layer.running_mean, layer.running_var, means, inverses),
            (count, x[0, 0].numel(), layer.momentum, layer.eps),
            HAS_RESIDUAL=residual is not None, RELU=relu, TRACK=layer.track_running_stats,
        )  # fmt: skip
        ctx.save_for_backward(x, y, weight, means, inverses, count)
        ctx.relu, ctx.has_residual = relu, residual is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, y, weight, means, inverses, count = ctx.saved_tensors
        dy, dx = _rows(dy), torch.empty_like(x)
        dresidual = torch.empty_like(x) if ctx.has_residual else None
        dweight, dbias = torch.empty(2, x.shape[1], device=x.device).unbind()
        _launch(
            _backward_kernel, x,
            (dy, y, x, weight, means, inverses),
            (count, dx, dresidual, dweight, dbias, x[0, 0].numel()),
            HAS_RESIDUAL=ctx.has_residual, RELU=ctx.relu,
        )  # fmt: skip
        return dx, dresidual, dweight, dbias, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The map with its channels last in memory: rows of channels."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)  # no copy where they are last already


def _launch(kernel: Any, x: torch.Tensor, before: Sequence[Any], after: Sequence[Any], **constants: Any) -> None:
    """Run a kernel on all channels and rows of ``x``: at once, or first the parts' sums and then what needs them."""
    channels, rows, columns = x.shape[1], x.numel() // x.shape[1], _SECTOR // x.element_size()
    parts = min(triton.next_power_of_2(triton.cdiv(rows * columns, _ELEMENTS)), 64)
    parts = parts if parts > 4 else 1  # a second launch costs more than it brings
    span = triton.cdiv(rows, parts)
    at_once = min(triton.next_power_of_2(span), 4 * _ELEMENTS // columns)
    partials = torch.empty(parts, 2, channels, device=x.device) if parts > 1 else None
    for phase in [_SUMS, _APPLY] if parts > 1 else [_BOTH]:
        kernel[(triton.cdiv(channels, columns), parts)](
            *before, partials, *after, M=rows, C=channels, PHASE=phase, PARTS=parts, SPAN=span, ROWS=at_once,
            COLUMNS=columns, num_warps=min(max(at_once * columns // 1024, 4), 16), **constants,
        )  # fmt: skip


class FastLayers:
    """Gives a model's layers the forward passes above, in place, while in training mode; in eval mode they are as ever.

    Parameters
    ----------
    model
        On a GPU. BatchNorm is known, and torchvision's ResNets with basic blocks, whose ReLUs and sums are merged too.

    Attributes
    ----------
    count
        How many samples of the batch count: a float on the device, set before the step is captured or run.
    """

    def __init__(self, model: nn.Module) -> None:
        from torchvision.models.resnet import BasicBlock, ResNet

        device = next(model.parameters()).device
        self.count = torch.full((), 2.0, device=device)
        self._counters: list[torch.Tensor] = []
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            if is_norm and not (module.affine and module.momentum is not None):
                # It would be left as it is, and would take the padding of a short batch for samples.
                raise ValueError("a BatchNorm without weights, or with a cumulative average, is not known here")
        trial = nn.BatchNorm1d(1, device=device)
        self._batchnorm(trial, torch.zeros(2, 1, device=device))  # raises where Triton cannot compile
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.forward = partial(self._batchnorm, module)  # type: ignore[method-assign]
                if module.num_batches_tracked is not None:
                    self._counters.append(module.num_batches_tracked)
            elif isinstance(module, BasicBlock):
                module.forward = partial(self._basic_block, module)
            elif isinstance(module, ResNet):
                module._forward_impl = partial(self._resnet, module)

    def count_batches(self, number: int) -> None:
        """Move BatchNorm's counters on by so many steps: once, instead of a kernel a layer and step."""
        if self._counters:
            torch._foreach_add_(self._counters, number)

    def _batchnorm(self, layer: Any, x: torch.Tensor, residual: Any = None, relu: bool = False) -> torch.Tensor:
        if layer.training:
            y: torch.Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
                x, residual, layer.weight, layer.bias, layer, self.count, relu
            )
            return y
        y = type(layer).forward(layer, x)
        y = y if residual is None else y + residual
        return F.relu(y) if relu else y

    def _basic_block(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        """torchvision's `BasicBlock.forward`, its ReLUs and its sum merged into the BatchNorms before them."""
        identity = x if block.downsample is None else block.downsample(x)
        hidden = self._batchnorm(block.bn1, block.conv1(x), relu=True)
        return self._batchnorm(block.bn2, block.conv2(hidden), identity, relu=True)

    def _resnet(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        """torchvision's `ResNet.forward`, likewise."""
        x = model.maxpool(self._batchnorm(model.bn1, model.conv1(x), relu=True))
        for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
            x = layer(x)
        if x.shape[2:] != (1, 1) or model.avgpool.output_size not in (1, (1, 1)):
            x = model.avgpool(x)
        logits: torch.Tensor = model.fc(torch.flatten(x, 1))
        return logits
