"""Engine that falls back to less memory when it runs out, and to eager steps if a step cannot be captured.

A client's training that runs out of memory restarts from its initial state one fallback level lower, and the engine
stays at that level; the result is the same up to rounding. The levels:

    graphed → eager → gradient accumulation over 2, 4, 8 … micro-batches

A batch's gradient is the weighted sum of its micro-batches' only if samples are independent. BatchNorm computes its
statistics over the whole batch, and dropout draws for the whole batch at once: micro-batches would change the step, not
just its rounding. A model with either uses activation checkpointing instead: it drops the activations inside each block
in the forward pass and recomputes them in the backward pass. The step is identical and needs memory for the blocks'
inputs and for one block at a time. Blocks are the model's children: a flat chain of layers saves little, a ResNet about
two thirds.
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
"""(objective, model, batch, weights) → the batch's loss and its gradient with respect to the weights."""

FallbackLevel = tuple[str, Callable[[], Engine]]
"""A description for the log, and the function that builds the engine."""


def full_batch_gradient(
    objective: Objective, model: nn.Module, batch: Batch, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Gradients]:
    """Return loss and gradient of a batch in one pass: the mode while memory suffices."""
    loss = objective.loss(model, batch)
    return loss.detach(), torch.autograd.grad(loss, weights)


# ∇ℓ(B) = Σ_p |B_p|/|B| ∇ℓ(B_p): for a mean over samples, and for a term without samples, since Σ_p |B_p|/|B| = 1
def accumulate_gradients(
    parts: int, objective: Objective, model: nn.Module, batch: Batch, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Gradients]:
    """Return loss and gradient of a batch, accumulated over ``parts`` micro-batches."""
    size = -(-len(batch.labels) // parts)
    loss, total = torch.zeros((), device=batch.labels.device), [torch.zeros_like(weight) for weight in weights]
    for begin in range(0, len(batch.labels), size):
        rows = slice(begin, begin + size)
        precomputed = {name: values[rows] for name, values in batch.precomputed.items()}
        part = replace(
            batch, images=batch.images[rows], labels=batch.labels[rows], first=begin, precomputed=precomputed
        )
        share = len(part.labels) / len(batch.labels)
        own, gradients = full_batch_gradient(objective, model, part, weights)
        loss += share * own
        torch._foreach_add_(total, gradients, alpha=share)
    return loss, tuple(total)


def checkpoint_activations(
    objective: Objective, model: nn.Module, batch: Batch, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Gradients]:
    """Return loss and gradient of a whole batch with activation checkpointing of each of the model's blocks."""
    blocks = _blocks(model)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _FrozenStatistics(model)

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    try:
        return full_batch_gradient(objective, model, batch, weights)
    finally:
        for block in blocks:
            del block.forward


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's children; a list or an only child is replaced by its own children."""
    children = list(model.children())
    if len(children) == 1 and list(children[0].children()):
        return _blocks(children[0])
    lists = (nn.ModuleList, nn.ModuleDict)
    return [block for child in children for block in (_blocks(child) if isinstance(child, lists) else [child])]


class _FrozenStatistics(AbstractContextManager[None]):
    """Keep BatchNorm's statistics unchanged while a block is recomputed: it updates copies, which are dropped.

    A second derivative recomputes the block again, so this context manager can be entered more than once.
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
    """Return the modes that need less memory than `full_batch_gradient`, the fastest first.

    A mode is a description, a function, and the number of samples per forward pass. ``images`` are two images for a
    trial forward pass.
    """
    batchnorm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
    if batchnorm or uses_rng(model, images):
        return [("with activation checkpointing", checkpoint_activations, batch_size)]
    return [
        (
            f"with gradient accumulation over {count} micro-batches",
            partial(accumulate_gradients, count),
            -(-batch_size // count),
        )
        for count in (2**power for power in range(1, batch_size.bit_length()))
    ]


class OomFallbackEngine:
    """Engine that moves to the next fallback level when memory runs out or a step cannot be captured.

    ``fallbacks`` returns the levels below ``first``, the one that needs most memory first. It is called once, when the
    first level fails, with whether it ran out of memory.
    """

    def __init__(self, first: FallbackLevel, fallbacks: Callable[[bool], Sequence[FallbackLevel]]) -> None:
        self._mode, self._build = first
        self._engine: Engine | None = self._build()
        self._list_fallbacks = fallbacks
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
        """Train as `Engine.train`; restart from the initial state at each fallback level."""
        start: Any = batches.bit_generator.state
        while True:
            try:
                self._engine = self._engine or self._build()  # building may also run out of memory
                done = self._engine.train(trainable, buffers, images, labels, batches, inputs)
                if self._problem:
                    logger.warning("%s (%s); from here on %s", self._problem, self._reason, self._mode)
                    self._problem = ""
                return done
            except (RuntimeError, MemoryError) as error:
                out_of_memory = is_out_of_memory(error)
                if not (out_of_memory or isinstance(error, CaptureError)):
                    raise
                problem = "out of memory in training" if out_of_memory else "no CUDA graph of a training step"
                if problem != self._problem:
                    self._problem, self._reason = problem, one_line(error)
            # The memory is free only here, after the traceback and its tensors are gone.
            batches.bit_generator.state = start
            self._fall_back(out_of_memory)

    def _fall_back(self, out_of_memory: bool) -> None:
        self._fallbacks = list(self._list_fallbacks(out_of_memory)) if self._fallbacks is None else self._fallbacks
        if not self._fallbacks:
            raise RuntimeError(f"batch-size: no memory to train even {self._mode} ({self._reason}); make it smaller")
        self._mode, self._build = self._fallbacks.pop(0)
        self._engine = None
        gc.collect()
        if torch.cuda.is_available():
            release_cached_memory()
