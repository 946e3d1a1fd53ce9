"""Test a model: accuracy overall and by class, and loss."""

from __future__ import annotations

from dataclasses import dataclass

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
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, num_classes: int, normalise: Normaliser
) -> Evaluation:
    """Test ``model`` on uint8 images [N, H, W, C] that lie where the model does."""
    model.eval()
    device = labels.device
    correct = torch.zeros(num_classes, dtype=torch.long, device=device)
    loss = torch.zeros((), device=device)
    for pixels, targets in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True):
        logits = model(normalise(pixels))
        loss += F.cross_entropy(logits, targets, reduction="sum")
        correct.scatter_add_(0, targets, (logits.argmax(dim=1) == targets).long())
    seen = torch.bincount(labels, minlength=num_classes)
    by_class = per_class_accuracy(correct.cpu().numpy(), seen.cpu().numpy())
    total, examples = int(correct.sum()), len(labels)
    return Evaluation(
        accuracy=total / max(examples, 1),
        balanced_accuracy=balanced_accuracy(by_class),
        per_class_accuracy=by_class,
        loss=float(loss) / max(examples, 1),
        correct=total,
        examples=examples,
    )
