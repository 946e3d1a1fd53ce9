"""Gradients of weights on a stream of their own: nothing in the backward pass waits for them before its end.

A step is a chain of small kernels, and a convolution's backward pass has two: what the layer below waits for, and the
gradient of the weights. Off the chain, the latter make it shorter. In a CUDA graph they become branches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.training.own_streams import LAST, own_stream


class Side:
    """A second stream beside an engine's own; without a GPU, no stream at all.

    Engines of one rank share it: it is launched on while a step is captured only, which one engine at a time does.

    Parameters
    ----------
    rank
        Of the engine; nothing where there is no GPU.
    """

    def __init__(self, rank: int | None = None) -> None:
        self._stream = None if rank is None else _stream(min(rank, LAST))
        self._used: list[torch.Tensor] = []

    def run(self, work: Callable[[], torch.Tensor], *used: torch.Tensor) -> torch.Tensor:
        """Do what needs no more than what is there by now; the result is there after `join`.

        What is ``used`` is held until then, or its memory would be given away while the work still reads it.
        """
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._used += used
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Let the current stream wait for all that was done."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._used.clear()


@lru_cache(maxsize=LAST + 1)
def _stream(rank: int) -> Any:
    return own_stream(rank)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, layer: Any, side: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.side = layer, side
        return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        how = ctx.layer.stride, ctx.layer.padding, ctx.layer.dilation, False, [0, 0], 1

        def gradient(of_x: bool) -> Any:
            found = torch.ops.aten.convolution_backward(dy, x, weight, None, *how, [of_x, not of_x, False])
            return found[0 if of_x else 1]

        dweight = ctx.side.run(lambda: gradient(of_x=False), x, dy)
        return gradient(of_x=True) if ctx.needs_input_grad[0] else None, dweight, None, None


def is_plain(layer: Any) -> bool:
    """Whether a layer is a convolution that `convolution` can do."""
    plain = isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.bias is None and layer.padding_mode == "zeros"
    return plain and not isinstance(layer.padding, str) and bool(layer.weight.requires_grad)


def convolution(layer: nn.Conv2d, x: torch.Tensor, weight: torch.Tensor, side: Side) -> torch.Tensor:
    """What a layer makes of ``x`` with these weights, in their precision."""
    y: torch.Tensor = _Convolution.apply(x.to(weight.dtype), weight, layer, side)  # type: ignore[no-untyped-call]
    return y
