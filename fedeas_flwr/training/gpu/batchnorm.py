"""Replacements for BatchNorm's forward pass: one with a fast double backward, one for padded batches.

`double_backward_batchnorm` is for objectives that contain a gradient (FedMix). PyTorch's second derivative takes about
seventy kernels per layer, three quarters of a FedMix step of ResNet-18. With
h = (x − μ) r, P(v) = v − mean(v) − h mean(v h) and means over a channel of M numbers,

    y = γ h + β     ∂x = γ r P(g)     S(a) = ⟨a, ∂x⟩ = γ r M Q,  Q = mean(a g) − mean(a) mean(g) − mean(a h) mean(g h)

for a gradient g of y, and so, for a gradient a of ∂x,

    ∂S/∂g = γ r P(a)     ∂S/∂γ = r M Q     ∂S/∂x = −r ( mean(g h) γ r P(a) + mean(a h) γ r P(g) + γ r Q h ).

γ r P(v), M mean(v h) and M mean(v) are the three results of the first derivative's kernel, for v = g and for v = a.

`masked_batchnorm` computes statistics without the rows that pad a short batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def _replaced_forward(model: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Make every BatchNorm of ``model`` call ``forward(layer, x)`` inside the `with` block."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.forward = partial(forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


# -------------------------------------------------------------------------------------------- double backward


def double_backward_batchnorm(model: nn.Module) -> AbstractContextManager[None]:
    """Make every BatchNorm of ``model`` twice differentiable by its inputs, in few kernels."""
    return _replaced_forward(model, _double_backward_forward)


def _double_backward_forward(layer: nn.modules.batchnorm._BatchNorm, x: torch.Tensor) -> torch.Tensor:
    usual = layer.training and layer.affine and layer.track_running_stats and layer.momentum is not None
    if not usual or x.numel() == x.shape[1]:  # torch rejects one value per channel
        return type(layer).forward(layer, x)
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    moving = layer.running_mean, layer.running_var, layer.momentum
    y: torch.Tensor = _Normalised.apply(x, layer.weight, layer.bias, *moving, layer.eps)  # type: ignore[no-untyped-call]
    return y


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
        y, own_mean, scale = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        ctx.save_for_backward(x, weight, own_mean, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return *_Gradients.apply(dy, *ctx.saved_tensors, ctx.eps), None, None, None, None  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """Compute ∂x, ∂γ and ∂β; ∂x can be differentiated."""

    @staticmethod
    def forward(ctx: Any, dy: Any, x: Any, weight: Any, mean: Any, scale: Any, eps: float) -> Any:
        dx, dweight, dbias = _gradients(dy, x, weight, mean, scale, eps)
        ctx.save_for_backward(dy, x, weight, mean, scale, dx, dweight, dbias)
        ctx.eps = eps
        ctx.mark_non_differentiable(dweight, dbias)
        ctx.set_materialize_grads(False)
        return dx, dweight, dbias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Any, *_: Any) -> Any:
        g, x, weight, mean, scale, g_projected, gh, g_sum = ctx.saved_tensors
        size, by_channel = x.numel() // x.shape[1], (1, -1, *[1] * (x.dim() - 2))
        projected, ah, a_sum = _gradients(a, x, weight, mean, scale, ctx.eps)
        products = (a * g).sum([0, *range(2, x.dim())], dtype=ah.dtype)
        dweight = scale * products.addcmul_(a_sum, g_sum, value=-1 / size).addcmul_(ah, gh, value=-1 / size)
        less = scale * (-1 / size)
        of_a, of_g, of_x = (each.view(by_channel) for each in (less * gh, less * ah, less * scale * weight * dweight))
        dx = torch.addcmul((x - mean.view(by_channel)) * of_x, projected, of_a).addcmul_(g_projected, of_g)
        return projected, dx.to(x.dtype), dweight, None, None, None


def _gradients(dy: Any, x: Any, weight: Any, mean: Any, scale: Any, eps: float) -> Any:
    """Return γ r P(dy), Σ dy h and Σ dy."""
    return torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, None, None, mean, scale, True, eps, [True, True, True]
    )


# ----------------------------------------------------------------------------------------------- masked rows


def masked_batchnorm(model: nn.Module, mask: torch.Tensor) -> AbstractContextManager[None]:
    """Make every BatchNorm of ``model`` compute its statistics over the rows where ``mask`` is 1."""
    return _replaced_forward(model, partial(_masked_forward, mask=mask))


def _masked_forward(layer: nn.modules.batchnorm._BatchNorm, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return BatchNorm in training mode over the masked rows, with masked sums for the means."""
    if not layer.training:  # a reference model: its statistics are given, and rows are independent
        return type(layer).forward(layer, x)
    dtype, x = x.dtype, x.float()
    weight = mask.view(-1, *[1] * (x.dim() - 1))
    over = [0, *range(2, x.dim())]
    number = mask.sum() * (x[0, 0].numel())
    mean = (x * weight).sum(over) / number
    shape = (1, -1, *[1] * (x.dim() - 2))
    centred = x - mean.view(shape)
    variance = (centred.square() * weight).sum(over) / number
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            step = 1 / layer.num_batches_tracked.float() if layer.momentum is None else layer.momentum
            unbiased = variance * number / (number - 1)
            layer.running_mean.add_(step * (mean - layer.running_mean))
            layer.running_var.add_(step * (unbiased - layer.running_var))
    out = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out.to(dtype)
