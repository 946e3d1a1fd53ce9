"""Test a model: accuracy overall and by class, and loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from fedeas_flwr.metrics import balanced_accuracy, per_class_accuracy
from fedeas_flwr.training.images import Normaliser

BATCH = 1024


@dataclass(frozen=True)
class Evaluation:
    """How a model did on a test set."""

    accuracy: float
    balanced_accuracy: float
    per_class_accuracy: list[float | None]
    loss: float
    correct: int
    examples: int


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.int64],
    num_classes: int,
    normalise: Normaliser,
    device: str,
) -> Evaluation:
    """Test ``model`` on images it leaves untouched."""
    model.to(device).eval()
    correct = torch.zeros(num_classes, dtype=torch.long, device=device)
    seen = torch.zeros(num_classes, dtype=torch.long, device=device)
    loss = torch.zeros((), device=device)
    for start in range(0, len(labels), BATCH):
        pixels = torch.tensor(images[start : start + BATCH], device=device)
        targets = torch.tensor(labels[start : start + BATCH], device=device)
        logits = model(normalise(pixels))
        loss += F.cross_entropy(logits, targets, reduction="sum")
        right = targets[logits.argmax(dim=1) == targets]
        correct += torch.bincount(right, minlength=num_classes)
        seen += torch.bincount(targets, minlength=num_classes)
    by_class = per_class_accuracy(correct.cpu().numpy(), seen.cpu().numpy())
    total, examples = int(correct.sum()), int(seen.sum())
    return Evaluation(
        accuracy=total / max(examples, 1),
        balanced_accuracy=balanced_accuracy(by_class),
        per_class_accuracy=by_class,
        loss=float(loss) / max(examples, 1),
        correct=total,
        examples=examples,
    )
