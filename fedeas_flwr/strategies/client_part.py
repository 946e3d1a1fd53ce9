"""An algorithm's part on a client: what its steps need, what it remembers, and what it sends beside the model.

    prepare   from what was received and remembered to the inputs of the steps
    (the engine trains, with the part's objective)
    finish    from what was trained to the next memory and the reply's extra arrays

FedAvg's part does nothing, and so does that of any algorithm that lives on the server alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedeas_flwr.config import RunConfig
from fedeas_flwr.training.engine import State
from fedeas_flwr.training.objective import CROSS_ENTROPY, NO_INPUTS, Inputs, Objective


@dataclass(frozen=True)
class ClientRound:
    """One client in one round, as its part of an algorithm sees it. States hold arrays or tensors."""

    config: RunConfig
    number: int
    client: int
    device: str
    trainable: State
    """The global model as received, and below its buffers."""
    buffers: State
    extra: State
    """What the server's part sent beside the model."""
    memory: State
    """What this client's part kept in its last accepted round; empty before the first."""
    labels: torch.Tensor
    """Of everything the client trains on, synthetic images included."""
    steps: int
    """How many steps this round takes."""

    def tensors(self, state: State) -> dict[str, torch.Tensor]:
        """A state as tensors on the client's device."""
        return {key: self._tensor(value) for key, value in state.items()}

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        return torch.from_numpy(np.require(value, requirements="W")).to(self.device)  # of read-only ones torch warns


@dataclass(frozen=True)
class Finished:
    """What a client's part has to say after training."""

    memory: Mapping[str, Any] = field(default_factory=dict)
    """Kept on this client if the server uses the reply."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Sent beside the model, encoded where the model is; the server's part says which arrays it expects."""


class ClientPart:
    """FedAvg's: cross-entropy, nothing kept, nothing more sent."""

    objective: Objective = CROSS_ENTROPY

    def prepare(self, task: ClientRound) -> Inputs:
        """The inputs that the objective needs for this client and round."""
        return NO_INPUTS

    def finish(self, task: ClientRound, trainable: State, buffers: State) -> Finished:
        """Look at the trained model."""
        return Finished()
