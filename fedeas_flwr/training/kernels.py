"""BatchNorm for small maps on a GPU: with the ReLU and the sum around it, forward one kernel, backward one.

A ResNet-18 step on 64 images of 32×32 is some 300 kernels of a few microseconds; half of its time went to BatchNorm and
what surrounds it. Here a program holds a few channels and reads all their rows, which are few. The number of rows that
count comes from the device, so that a padded batch costs what a full one does. And a 3×3 convolution of a map of one
pixel is a matrix product with its centre tap: its other taps meet padding alone, and their gradient is zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

_ELEMENTS = 32_768
"""Of a map in flight in one program: it waits for memory once for all of them."""
_SECTOR = 32
"""Bytes that memory delivers at once: a program's channels of one row."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, residual, y, weight, bias, running_mean, running_var, means, inverses, count, pixels, momentum, eps,
    M: tl.constexpr, C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr, TRACK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Statistics of this program's channels over the rows that count, then all rows normalised."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    number = tl.load(count) * pixels
    # Sums are taken of differences to the first row: a mean far from zero must not drown the variance.
    shift = tl.load(x + channel, mask=is_channel, other=0).to(tl.float32)
    totals = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = (row < number)[:, None] & is_channel[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], mask=counts, other=0).to(tl.float32)
        value = tl.where(counts, value - shift[None, :], 0.0)
        totals += value
        squares += value * value
    moved = tl.sum(totals, 0) / number
    variance = tl.maximum(tl.sum(squares, 0) / number - moved * moved, 0.0)
    mean = moved + shift
    inverse = 1 / tl.sqrt(variance + eps)
    tl.store(means + channel, mean, mask=is_channel)
    tl.store(inverses + channel, inverse, mask=is_channel)
    if TRACK:
        before = tl.load(running_mean + channel, mask=is_channel, other=0)
        tl.store(running_mean + channel, before + momentum * (mean - before), mask=is_channel)
        before = tl.load(running_var + channel, mask=is_channel, other=0)
        unbiased = variance * number / (number - 1)
        tl.store(running_var + channel, before + momentum * (unbiased - before), mask=is_channel)

    factor = inverse * tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
    offset = tl.load(bias + channel, mask=is_channel, other=0).to(tl.float32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & is_channel[None, :]
        where = row[:, None] * C + channel[None, :]
        value = tl.load(x + where, mask=inside, other=0).to(tl.float32)
        value = (value - mean[None, :]) * factor[None, :] + offset[None, :]
        if HAS_RESIDUAL:
            value += tl.load(residual + where, mask=inside, other=0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + where, value.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, y, x, weight, means, inverses, count, dx, dresidual, dweight, dbias, pixels,
    M: tl.constexpr, C: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = w/σ (g − mean g − x̂ · mean g x̂) over the rows that count, g the gradient behind the ReLU; 0 elsewhere."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = channel < C
    number = tl.load(count) * pixels
    mean = tl.load(means + channel, mask=is_channel, other=0)
    inverse = tl.load(inverses + channel, mask=is_channel, other=0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = (row < number)[:, None] & is_channel[None, :]
        where = row[:, None] * C + channel[None, :]
        gradient = tl.load(dy + where, mask=counts, other=0).to(tl.float32)
        if RELU:
            gradient = tl.where(tl.load(y + where, mask=counts, other=0).to(tl.float32) > 0, gradient, 0.0)
        value = tl.load(x + where, mask=counts, other=0).to(tl.float32)
        sums += gradient
        products += gradient * (value - mean[None, :]) * inverse[None, :]
    total = tl.sum(sums, 0)
    product = tl.sum(products, 0)
    tl.store(dbias + channel, total, mask=is_channel)
    tl.store(dweight + channel, product, mask=is_channel)

    factor = inverse * tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & is_channel[None, :]
        counts = (row < number)[:, None] & is_channel[None, :]
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
        sizes = _sizes(x)
        _forward_kernel[(triton.cdiv(x.shape[1], sizes["COLUMNS"]),)](
            x, residual, y, weight, bias, layer.running_mean, layer.running_var, means, inverses, count,
            x[0, 0].numel(), layer.momentum, layer.eps,
            HAS_RESIDUAL=residual is not None, RELU=relu, TRACK=layer.track_running_stats, **sizes,
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
        sizes = _sizes(x)
        _backward_kernel[(triton.cdiv(x.shape[1], sizes["COLUMNS"]),)](
            dy, y, x, weight, means, inverses, count, dx, dresidual, dweight, dbias, x[0, 0].numel(),
            HAS_RESIDUAL=ctx.has_residual, RELU=ctx.relu, **sizes,
        )  # fmt: skip
        return dx, dresidual, dweight, dbias, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The map with its channels last in memory: rows of channels."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)  # no copy where they are last already


def _sizes(x: torch.Tensor) -> dict[str, int]:
    rows, columns = x.numel() // x.shape[1], _SECTOR // x.element_size()
    at_once = min(triton.next_power_of_2(rows), _ELEMENTS // columns)
    warps = min(max(at_once * columns // 1024, 4), 32)
    return {"M": rows, "C": x.shape[1], "ROWS": at_once, "COLUMNS": columns, "num_warps": warps}


class _CentreTap(torch.autograd.Function):
    """A 3×3 convolution, padded by one, of maps of one pixel."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x.flatten(1), weight[:, :, 1, 1])[:, :, None, None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        dy, dweight = dy.flatten(1), torch.zeros_like(weight)
        dweight[:, :, 1, 1] = dy.t() @ x.flatten(1)
        return (dy @ weight[:, :, 1, 1])[:, :, None, None], dweight


class FastLayers:
    """Gives a model's layers the forward passes above, in place, while in training mode; in eval mode they are as ever.

    Parameters
    ----------
    model
        On a GPU. BatchNorm and padded 3×3 convolutions are known, and torchvision's ResNets with basic blocks, where
        ReLU and the sum are merged too.

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
            elif isinstance(module, nn.Conv2d) and _may_meet_padding_alone(module):
                module.forward = partial(_convolution, module)  # type: ignore[method-assign]
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
        logits: torch.Tensor = model.fc(torch.flatten(model.avgpool(x), 1))
        return logits


def _may_meet_padding_alone(layer: nn.Conv2d) -> bool:
    known = (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    return known and layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros"


def _convolution(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    if layer.training and x.shape[2:] == (1, 1):
        y: torch.Tensor = _CentreTap.apply(x, layer.weight)  # type: ignore[no-untyped-call]
        return y
    return type(layer).forward(layer, x)
