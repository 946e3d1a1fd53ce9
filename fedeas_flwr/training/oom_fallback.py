"""Out of memory: train the same steps in less of it. A network that cannot be captured goes on eagerly as well.

A round that runs out of memory begins again from the state it was given, one rung further down, and the engine stays
there; the client's result is the same up to rounding. The rungs below the engine that was asked for:

    graphed → eager → the gradient of a batch in 2, 4, 8 … parts, of which the weighted sum is taken

A batch's gradient is the sum of its parts' only where samples do not meet. BatchNorm takes its statistics over the
whole batch, and dropout draws for the whole batch at once: in parts both would give another step, not a rounding of it.
A model with either keeps its batches whole. It forgets what its blocks computed on the way forward and computes it
again on the way back, which is the very same step in the memory of the blocks' inputs and one block at a time. Blocks
are the model's own children: a flat chain of layers gains little, a ResNet about two thirds.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedeas_flwr.common.cuda import CaptureError, release_cached_memory
from fedeas_flwr.common.errors import is_out_of_memory
from fedeas_flwr.common.text import one_line
from fedeas_flwr.training.engine import Engine, State, TrainResult
from fedeas_flwr.training.models import uses_rng
from fedeas_flwr.training.objective import NO_INPUTS, Batch, Inputs, Objective

logger = logging.getLogger(__name__)

Gradients = tuple[torch.Tensor, ...]
Differentiate = Callable[[Objective, nn.Module, Batch, Sequence[torch.Tensor]], tuple[torch.Tensor, Gradients]]
"""(objective, model, batch, weights) → the batch's loss and its gradient by the weights."""

FallbackLevel = tuple[str, Callable[[], Engine]]
"""A way to train in words, and the function that builds its engine."""


def full_batch_gradient(
    objective: Objective, model: nn.Module, batch: Batch, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradient of a batch in one piece: what is done while there is memory."""
    loss = objective.loss(model, batch)
    return loss.detach(), torch.autograd.grad(loss, weights)


# ∇ℓ(B) = Σ_p |B_p|/|B| ∇ℓ(B_p): of a mean over samples, and of a term that no sample is in, since Σ_p |B_p|/|B| = 1
def accumulate_gradients(
    parts: int, objective: Objective, model: nn.Module, batch: Batch, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradient of a batch from those of so many parts of it."""
    size = -(-len(batch.labels) // parts)
    loss, total = torch.zeros((), device=batch.labels.device), [torch.zeros_like(weight) for weight in weights]
    for begin in range(0, len(batch.labels), size):
        rows = slice(begin, begin + size)
        kept = {name: of_all[rows] for name, of_all in batch.precomputed.items()}
        part = replace(batch, images=batch.images[rows], labels=batch.labels[rows], precomputed=kept)
        share = len(part.labels) / len(batch.labels)
        own, gradients = full_batch_gradient(objective, model, part, weights)
        loss += share * own
        torch._foreach_add_(total, gradients, alpha=share)
    return loss, tuple(total)


def checkpoint_activations(
    objective: Objective, model: nn.Module, batch: Batch, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradient of a whole batch, each of the model's blocks computed again on the way back."""
    blocks = _blocks(model)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _StatisticsKept(model)

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    try:
        return full_batch_gradient(objective, model, batch, weights)
    finally:
        for block in blocks:
            del block.forward


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's children; those of a mere list, or of an only child, stand for it."""
    children = list(model.children())
    if len(children) == 1 and list(children[0].children()):
        return _blocks(children[0])
    lists = (nn.ModuleList, nn.ModuleDict)
    return [block for child in children for block in (_blocks(child) if isinstance(child, lists) else [child])]


class _StatisticsKept(AbstractContextManager[None]):
    """The second time BatchNorm sees a batch it counts it in copies, which are thrown away.

    A second derivative sees it a third time: this can be entered again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self._before: list[dict[str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._before = [dict(layer._buffers) for layer in self._layers]
        for layer in self._layers:
            layer._buffers.update({name: None if b is None else b.clone() for name, b in layer._buffers.items()})

    def __exit__(self, *failure: object) -> None:
        for layer, buffers in zip(self._layers, self._before, strict=True):
            layer._buffers.update(buffers)


def low_memory_modes(model: nn.Module, images: torch.Tensor, batch_size: int) -> list[tuple[str, Differentiate, int]]:
    """What can be done with less memory than `full_batch_gradient` needs, the quickest first; two ``images`` are to
    try it with.

    Each in words, as a function, and how many samples it shows to the model at a time.
    """
    batchnorm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
    if batchnorm or uses_rng(model, images):
        return [("block by block, each computed twice", checkpoint_activations, batch_size)]
    parts = [2**power for power in range(1, batch_size.bit_length()) if 2**power <= batch_size]
    return [
        (f"each batch in {count} parts", partial(accumulate_gradients, count), -(-batch_size // count))
        for count in parts
    ]


class OomFallbackEngine:
    """An engine that goes on with less memory when it runs out, and without graphs where there can be none.

    Parameters
    ----------
    first
        What to train with while there is memory.
    fallbacks
        Asked once, when there is not: what else to train with, the one that needs most memory first.
    """

    def __init__(self, first: FallbackLevel, fallbacks: Callable[[], Sequence[FallbackLevel]]) -> None:
        self._words, build = first
        self._engine, self._list_fallbacks = build(), fallbacks
        self._fallbacks: list[FallbackLevel] | None = None
        self._problem = self._reason = ""

    def train(
        self,
        trainable: State,
        buffers: State,
        images: torch.Tensor,
        labels: torch.Tensor,
        batches: np.random.Generator,
        inputs: Inputs = NO_INPUTS,
    ) -> tuple[TrainResult, State, State]:
        """Train as `Engine.train` says, from the beginning again where the memory did not suffice."""
        start: Any = batches.bit_generator.state
        while True:
            try:
                done = self._engine.train(trainable, buffers, images, labels, batches, inputs)
                if self._problem:
                    logger.warning("%s (%s); from here on %s", self._problem, self._reason, self._words)
                    self._problem = ""
                return done
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) and not isinstance(error, CaptureError):
                    raise
                problem = "out of memory in training" if is_out_of_memory(error) else "no CUDA graph of a training step"
                if problem != self._problem:
                    self._problem, self._reason = problem, one_line(error)
            # Only here, where the traceback with its tensors is gone, is there memory again.
            batches.bit_generator.state = start
            self._fall_back()

    def _fall_back(self) -> None:
        self._fallbacks = list(self._list_fallbacks()) if self._fallbacks is None else self._fallbacks
        if not self._fallbacks:
            raise RuntimeError(f"batch-size: no memory to train even {self._words} ({self._reason}); make it smaller")
        self._words, build = self._fallbacks.pop(0)
        del self._engine
        gc.collect()
        if torch.cuda.is_available():
            release_cached_memory()
        self._engine = build()
