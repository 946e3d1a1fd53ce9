"""Clients with the loss ½ (w − a)², so that an algorithm's results can be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import Engine, LocalTrainingConfig, State
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import Batch, Inputs, Objective


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.w * images


def quadratic(objective: Objective) -> Objective:
    """Return the objective with ½ (w − a)² in place of cross-entropy; a is one of the inputs."""

    class Quadratic(type(objective)):  # type: ignore[misc]
        def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            assert isinstance(model, OneWeight)
            return 0.5 * (model.w - batch.given["a"]) ** 2

    made = Quadratic.__new__(Quadratic)
    vars(made).update(vars(objective))
    return made  # type: ignore[no-any-return]


def engine(kind: str, objective: Objective, steps: int, rate: float = 0.5) -> Engine:
    """Return an engine that takes ``steps`` steps: that many epochs of one batch of two samples."""
    recipe, normalise = LocalTrainingConfig(steps, 2, rate), Normaliser((0.5,), (0.5,), "cpu")
    if kind == "eager":
        return EagerEngine(OneWeight(), recipe, normalise, "cpu", quadratic(objective))
    return GraphedEngine(OneWeight(), recipe, normalise, "fp32", "cpu", quadratic(objective))


def train(kind: str, objective: Objective, start: float, a: float, steps: int, inputs: Inputs) -> State:
    """Train one client from w = start; return its trainable state."""
    images, labels = torch.zeros((2, 1, 1, 1), dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    given = inputs | Inputs({"a": torch.tensor(float(a))})
    start_state: Any = {"w": np.array(start, dtype=np.float32)}
    _, trained, _ = engine(kind, objective, steps).train(
        start_state, {}, images, labels, np.random.default_rng(0), given
    )
    return trained
