"""Plain PyTorch training on any device: the reference every faster engine is measured against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from fedeas_flwr.training.images import Normaliser


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


def train(
    model: torch.nn.Module,
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.int64],
    recipe: Recipe,
    normalise: Normaliser,
    batches: np.random.Generator,
    device: str,
) -> TrainResult:
    """Train in place with SGD, the optimizer fresh, the whole set shuffled uniformly each epoch.

    A last batch of one sample is skipped: BatchNorm cannot take a variance from it.
    """
    model.to(device).train()
    pixels = torch.from_numpy(images).to(device)
    targets = torch.from_numpy(labels).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    steps = 0
    loss_sum, seen = torch.zeros((), device=device), 0
    for _ in range(recipe.epochs):
        order = torch.from_numpy(batches.permutation(len(labels))).to(device)
        loss_sum, seen = torch.zeros((), device=device), 0
        for chosen in torch.split(order, recipe.batch_size):
            if len(chosen) == 1:
                continue
            loss = F.cross_entropy(model(normalise(pixels[chosen])), targets[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += loss.detach() * len(chosen)
            seen += len(chosen)
            steps += 1
    return TrainResult(loss=float(loss_sum) / max(seen, 1), steps=steps)
