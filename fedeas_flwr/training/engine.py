"""The interface of an engine, which trains a client's model, and functions that engines share.

There are two engines: `eager` runs on any device and is the reference; `graphed` replays CUDA graphs. Both accept and
return state dicts (float32 weights, buffers with their own dtypes) and draw the same batches from the same stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedeas_flwr.training.models import trained_names
from fedeas_flwr.training.objective import NO_INPUTS, Inputs

State = Mapping[str, Any]
"""Name → NumPy array (from a message) or tensor (passed by reference within a process)."""

LEARNING_RATE = "learning-rate"
"""Name of the inputs' constant with the round's learning rate; without it the rate is `LocalTrainingConfig`'s."""


@dataclass(frozen=True)
class LocalTrainingConfig:
    """Hyperparameters of a client's local training in a round."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    min_batch: int = 2

    def batches(self, samples: int) -> tuple[int, int]:
        """Return the number of full batches in an epoch, and the size of the short last batch, 0 if there is none.

        A last batch of fewer than ``min_batch`` samples is skipped. ``min_batch`` is at least 2: BatchNorm cannot
        compute the variance of one sample.
        """
        full, rest = divmod(samples, self.batch_size)
        return full, rest if rest >= self.min_batch else 0

    def samples(self, of: int) -> int:
        """Return how many of ``of`` samples an epoch trains on."""
        full, rest = self.batches(of)
        return full * self.batch_size + rest

    def steps(self, samples: int) -> int:
        """Return the number of steps that all epochs take on ``samples`` samples."""
        full, rest = self.batches(samples)
        return self.epochs * (full + (rest > 0))


def batch_table(
    samples: int, recipe: LocalTrainingConfig, batches: np.random.Generator
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int, int]:
    """Draw the sample indices of every step of every epoch; return also `LocalTrainingConfig.batches`.

    The table is int64 [steps, batch size]; a short last batch is padded with index 0.
    """
    size, kept = recipe.batch_size, recipe.samples(samples)
    full, rest = recipe.batches(samples)
    table = np.zeros((recipe.epochs, (full + (rest > 0)) * size), dtype=np.int64)
    for epoch in table:
        epoch[:kept] = batches.permutation(samples)[:kept]
    return table.reshape(-1, size), full, rest


@dataclass(frozen=True)
class TrainResult:
    """Loss and number of steps of a client's round."""

    loss: float
    """Mean over the samples of the last epoch."""
    steps: int


class Engine(Protocol):
    """Trains a client's model in one round."""

    def train(
        self,
        trainable: State,
        buffers: State,
        images: torch.Tensor,
        labels: torch.Tensor,
        batches: np.random.Generator,
        inputs: Inputs = NO_INPUTS,
    ) -> tuple[TrainResult, State, State]:
        """Train from a state on uint8 images [N, H, W, C]; return the result, and trainable and buffers after it.

        ``inputs`` are those of the engine's objective for this client and round.
        """


def copy_state(model: nn.Module | Mapping[str, torch.Tensor], trainable: State, buffers: State) -> None:
    """Copy a state, arrays or tensors, into a model (or its state dict) in place.

    Raise ValueError unless names, shapes and dtypes are the model's: torch would broadcast a smaller array and round a
    float counter silently.
    """
    given = {**trainable, **buffers}
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if given.keys() != state.keys():
        raise ValueError(f"state: the names differ from the model's: {sorted(given.keys() ^ state.keys())[:3]}")
    for key, tensor in state.items():
        dtype, own = str(given[key].dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
        if tuple(given[key].shape) != tuple(tensor.shape) or dtype != own:
            expected = f"{own} {list(tensor.shape)}"
            raise ValueError(f"state: {key} is {dtype} {list(given[key].shape)}; the model needs {expected}")

    # Copy first: arrays from a message may be read-only, and torch warns of those.
    sources = [a if isinstance(a, torch.Tensor) else torch.from_numpy(np.array(a)) for a in map(given.get, state)]
    with torch.no_grad():
        torch._foreach_copy_(list(state.values()), sources)


def read_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return clones of a model's trained parameters and of the rest of its state."""
    return clone_state(model.state_dict(), trained_names(model))


@torch.no_grad()
def clone_state(
    state: Mapping[str, torch.Tensor], trained: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return clones of the trained parameters and of the rest of a state.

    It multiplies by one, which is exact, in two calls: every call may pass the interpreter lock to another thread, and
    ten threads do this at once on a GPU.
    """
    integers = {key for key, tensor in state.items() if not tensor.is_floating_point()}
    copies: dict[str, torch.Tensor] = {}
    for keys in ([key for key in state if key not in integers], [key for key in state if key in integers]):
        if keys:
            copies |= zip(keys, torch._foreach_mul([state[key] for key in keys], 1), strict=True)
    return {k: copies[k] for k in state if k in trained}, {k: copies[k] for k in state if k not in trained}


def stream_seed(stream: np.random.Generator) -> int:
    """Return a seed derived from a stream, without drawing from it."""
    sequence: Any = stream.bit_generator.seed_seq
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
