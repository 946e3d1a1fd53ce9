"""What an engine is: something that trains a client's model from one state to the next.

Two engines: `eager` runs anywhere and is the reference; `graphed` replays CUDA graphs. Both take and give plain state
dicts (float32 weights, buffers of their own kinds) and draw the same batches from the same stream.
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
"""Name → NumPy array (from a message) or tensor (handed over within a process)."""


@dataclass(frozen=True)
class LocalTrainingConfig:
    """How a client trains in a round."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    min_batch: int = 2

    def batches(self, samples: int) -> tuple[int, int]:
        """Full batches in an epoch of so many samples, and the size of the short one after them, 0 if there is none.

        One of fewer than ``min_batch`` is left out, always one of a single sample: BatchNorm cannot take a variance
        from it.
        """
        full, rest = divmod(samples, self.batch_size)
        return full, rest if rest >= self.min_batch else 0

    def samples(self, of: int) -> int:
        """How many of so many samples an epoch trains on."""
        full, rest = self.batches(of)
        return full * self.batch_size + rest

    def steps(self, samples: int) -> int:
        """Steps on so many samples."""
        full, rest = self.batches(samples)
        return self.epochs * (full + (rest > 0))


def batch_table(
    samples: int, recipe: LocalTrainingConfig, batches: np.random.Generator
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int, int]:
    """The indices of every step of every epoch, one row a step.

    Returns
    -------
    table
        int64 [steps, batch size]; a short last batch is padded with index 0.
    full
        Full batches an epoch.
    rest
        Samples of a short last batch; 0 if it has none.
    """
    size, kept = recipe.batch_size, recipe.samples(samples)
    full, rest = recipe.batches(samples)
    table = np.zeros((recipe.epochs, (full + (rest > 0)) * size), dtype=np.int64)
    for epoch in table:
        epoch[:kept] = batches.permutation(samples)[:kept]
    return table.reshape(-1, size), full, rest


@dataclass(frozen=True)
class TrainResult:
    """What a round of training was."""

    loss: float
    """Mean over the samples of the last epoch."""
    steps: int


class Engine(Protocol):
    """Trains a client."""

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

        ``inputs`` are what the engine's objective needs of this client and round.
        """
        ...


def copy_state(model: nn.Module | Mapping[str, torch.Tensor], trainable: State, buffers: State) -> None:
    """Copy a state, arrays or tensors, into a model (or its state dict) in place, or refuse all of it.

    Shapes and kinds must be the model's own: torch would quietly stretch a smaller array and round a float counter.
    """
    given = {**trainable, **buffers}
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if given.keys() != state.keys():
        raise ValueError(f"state: the names differ from the model's: {sorted(given.keys() ^ state.keys())[:3]}")
    for key, tensor in state.items():
        kind, own = str(given[key].dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
        if tuple(given[key].shape) != tuple(tensor.shape) or kind != own:
            wanted = f"{own} {list(tensor.shape)}"
            raise ValueError(f"state: {key} is {kind} {list(given[key].shape)}; the model needs {wanted}")
    # A copy first: arrays from a message may be read-only, and torch warns of those.
    sources = [a if isinstance(a, torch.Tensor) else torch.from_numpy(np.array(a)) for a in map(given.get, state)]
    with torch.no_grad():
        torch._foreach_copy_(list(state.values()), sources)


def read_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Clone a model's state: what is trained, and the rest."""
    return clone_state(model.state_dict(), trained_names(model))


@torch.no_grad()
def clone_state(
    state: Mapping[str, torch.Tensor], trained: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Clone a state: what is trained, and the rest.

    In two calls, because every call gives other threads a chance to hold the interpreter, and ten of them do this at
    once on a GPU. Times one is exact.
    """
    whole = {key for key, tensor in state.items() if not tensor.is_floating_point()}
    copies: dict[str, torch.Tensor] = {}
    for keys in ([key for key in state if key not in whole], [key for key in state if key in whole]):
        if keys:
            copies |= zip(keys, torch._foreach_mul([state[key] for key in keys], 1), strict=True)
    return {k: copies[k] for k in state if k in trained}, {k: copies[k] for k in state if k not in trained}


def stream_seed(stream: np.random.Generator) -> int:
    """A seed that belongs to a stream, without drawing from it."""
    sequence: Any = stream.bit_generator.seed_seq
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
