"""The last layer of a classifier on a GPU, for few outputs: two kernels instead of PyTorch's five."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 16, 64
MAX_CLASSES = 256
"""Maximum number of outputs; one program holds all of them."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, y, B: tl.constexpr, F: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute y = x Wᵀ + b for a few samples."""
    row, output = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_output = (row < B)[:, None], (output < C)[None, :]
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, F, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < F
        values = tl.load(x + row[:, None] * F + column[None, :], mask=is_row & is_column[None, :], other=0)
        weights = tl.load(weight + output[None, :] * F + column[:, None], mask=is_output & is_column[:, None], other=0)
        result = _product(values, weights, result, EXACT)
    result += tl.load(bias + output[None, :], mask=is_output, other=0).to(tl.float32)
    tl.store(y + row[:, None] * C + output[None, :], result.to(y.dtype.element_ty), mask=is_row & is_output)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, x, weight, dx, dweight, dbias, B: tl.constexpr, F: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute dx = dy W, dW = dyᵀ x and db = Σ dy for a few features."""
    column, output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    is_column, is_output = (column < F)[None, :], output < C
    weights = tl.load(weight + output[:, None] * F + column[None, :], mask=is_output[:, None] & is_column, other=0)
    slope = tl.zeros([WIDTH, COLUMNS], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, B, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = (row < B)[:, None]
        gradient = tl.load(dy + row[:, None] * C + output[None, :], mask=is_row & is_output[None, :], other=0)
        values = tl.load(x + row[:, None] * F + column[None, :], mask=is_row & is_column, other=0)
        slope = _product(tl.trans(gradient), values, slope, EXACT)
        total += tl.sum(gradient.to(tl.float32), 0)
        back = _product(gradient, weights, tl.zeros([ROWS, COLUMNS], tl.float32), EXACT)
        tl.store(dx + row[:, None] * F + column[None, :], back.to(dx.dtype.element_ty), mask=is_row & is_column)
    where = output[:, None] * F + column[None, :]
    tl.store(dweight + where, slope.to(dweight.dtype.element_ty), mask=is_output[:, None] & is_column)
    if tl.program_id(0) == 0:
        tl.store(dbias + output, total.to(dbias.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, added, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        return tl.dot(a, b, added, input_precision="ieee")
    return tl.dot(a, b, added)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        x, weight = x.contiguous(), weight.contiguous()
        (samples, features), classes = x.shape, len(weight)
        y = torch.empty(samples, classes, dtype=x.dtype, device=x.device)
        ctx.size = {
            "B": samples, "F": features, "C": classes, "EXACT": not torch.backends.cuda.matmul.allow_tf32,
            "COLUMNS": _COLUMNS, "WIDTH": max(triton.next_power_of_2(classes), 16),
        }  # fmt: skip
        _forward_kernel[(triton.cdiv(samples, _ROWS),)](x, weight, bias, y, ROWS=_ROWS, **ctx.size)
        ctx.save_for_backward(x, weight, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        programs = triton.cdiv(ctx.size["F"], _COLUMNS)
        _backward_kernel[(programs,)](dy.contiguous(), x, weight, dx, dweight, dbias, ROWS=4 * _ROWS, **ctx.size)
        return dx, dweight, dbias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x Wᵀ + b of features ``[B, F]``, in the weights' dtype."""
    y: torch.Tensor = _Linear.apply(x.to(weight.dtype), weight, bias)  # type: ignore[no-untyped-call]
    return y
