"""What an engine is: something that trains a client's model from one state to the next.

Two engines: `eager` runs anywhere and is the reference; `graphed` replays CUDA graphs. Both take and give plain state
dicts (float32 weights, buffers of their own kinds) and draw the same batches from the same stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedeas_flwr.training.objective import NO_INPUTS, Inputs

State = Mapping[str, Any]
"""Name → NumPy array (from a message) or tensor (handed over within a process)."""


@dataclass(frozen=True)
class Recipe:
    """How a client trains in a round."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def steps(self, samples: int) -> int:
        """Steps on so many samples. A last batch of one is skipped: BatchNorm cannot take a variance from it."""
        full, rest = divmod(samples, self.batch_size)
        return self.epochs * (full + (rest > 1))


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
    with torch.no_grad():
        for key, tensor in state.items():
            source = given[key]
            # A copy first: arrays from a message may be read-only, and torch warns of those.
            tensor.copy_(source if isinstance(source, torch.Tensor) else torch.from_numpy(np.array(source)))


def read_state(
    model: nn.Module, state: Mapping[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Clone a model's state (or one that stands for it): what is trained, and the rest."""
    names = {key for key, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
    trainable: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for key, tensor in (model.state_dict() if state is None else state).items():
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        (trainable if key in names else buffers)[key] = copy
    return trainable, buffers


def stream_seed(stream: np.random.Generator) -> int:
    """A seed that belongs to a stream, without drawing from it."""
    sequence: Any = stream.bit_generator.seed_seq
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
