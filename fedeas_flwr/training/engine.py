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
    ) -> tuple[TrainResult, State, State]:
        """Train from a state on uint8 images [N, H, W, C]; return the result, and trainable and buffers after it."""
        ...


def copy_state(model: nn.Module, trainable: State, buffers: State) -> None:
    """Copy a state, arrays or tensors, into a model in place."""
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            source = trainable[key] if key in trainable else buffers[key]
            tensor.copy_(source if isinstance(source, torch.Tensor) else torch.from_numpy(np.array(source)))


def read_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Clone a model's state: what is trained, and the rest."""
    names = {key for key, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
    trainable: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for key, tensor in model.state_dict().items():
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        (trainable if key in names else buffers)[key] = copy
    return trainable, buffers
