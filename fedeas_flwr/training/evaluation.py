"""Evaluate a model on a test set: accuracy, accuracy per class, and loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedeas_flwr.common.cuda import capture, own_stream
from fedeas_flwr.common.launcher import on_stream
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.engine import State, copy_state
from fedeas_flwr.training.models import Normaliser

logger = logging.getLogger(__name__)

BATCH = 1024
"""Number of test images per forward pass."""
Evaluate = Callable[[State, State], dict[str, Any]]
"""(trainable, buffers) → metrics by name, as a round's record stores them."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on a test set; accuracies are from 0 to 1."""

    accuracy: float
    balanced_accuracy: float
    """Mean of the class accuracies, over the classes that have test images."""
    per_class_accuracy: list[float | None]
    """None for a class without test images."""
    loss: float
    correct: int
    examples: int
    correct_by_client: list[int]
    """Correct predictions among each client's own images; empty if the test set is not the clients'."""


class Evaluator:
    """Evaluates model states on a test set, one after another in the same network.

    With a stream, an evaluation is one CUDA graph: its thousand or so kernel launches from Python would compete with
    those of the clients that train at the same time. The stream is for these evaluations only; without one they run
    eagerly on the current stream.

    The evaluations overwrite the weights of ``model``. ``images`` are uint8 [N, H, W, C], on the model's device.
    ``client_sizes`` are the numbers of each client's images, in this order, if they are the clients' own test images.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        num_classes: int,
        normalise: Normaliser,
        stream: torch.cuda.Stream | None = None,
        client_sizes: Sequence[int] = (),
    ) -> None:
        self._model, self._images, self._labels, self._normalise = model.eval(), images, labels, normalise
        self._state, self._stream = model.state_dict(), stream
        self._examples = torch.bincount(labels, minlength=num_classes).tolist()
        clients = torch.arange(len(client_sizes)).repeat_interleave(torch.tensor(client_sizes, dtype=torch.long))
        # What the correct predictions are counted by: the image's class, and then its client.
        self._groups = [labels, clients.to(labels.device) + num_classes] if client_sizes else [labels]
        groups = num_classes + len(client_sizes)
        self._correct = torch.zeros(groups, dtype=torch.long, device=labels.device)
        self._loss = torch.zeros((), device=labels.device)
        self._result = torch.zeros(groups + 1, dtype=torch.float64, device=labels.device)
        self._run = self._compute if stream is None else self._capture(stream)

    def evaluate(self, trainable: State, buffers: State) -> Evaluation:
        """Return the metrics of a state; not thread-safe."""
        with on_stream(self._stream):
            copy_state(self._state, trainable, buffers)
            self._run()
            *counts, loss = self._result.tolist()  # waits for the GPU
        correct, classes, examples = [int(count) for count in counts], len(self._examples), len(self._labels)
        total = sum(correct[:classes])
        by_class = [c / n if n else None for c, n in zip(correct[:classes], self._examples, strict=True)]
        tested = [accuracy for accuracy in by_class if accuracy is not None]
        return Evaluation(
            accuracy=total / max(examples, 1),
            balanced_accuracy=float(np.mean(tested)) if tested else 0.0,
            per_class_accuracy=by_class,
            loss=loss / max(examples, 1),
            correct=total,
            examples=examples,
            correct_by_client=correct[classes:],
        )

    @torch.no_grad()
    def _compute(self) -> None:
        """Write the correct predictions per class and client, and the sum of the losses, to `_result`."""
        self._correct.zero_()
        self._loss.zero_()
        batches = (torch.split(tensor, BATCH) for tensor in (self._images, *self._groups))
        for pixels, *groups in zip(*batches, strict=True):
            logits, targets = self._model(self._normalise(pixels)), groups[0]
            self._loss += F.cross_entropy(logits, targets, reduction="sum")
            hits = (logits.argmax(dim=1) == targets).long()
            for group in groups:
                self._correct.scatter_add_(0, group, hits)
        self._result[:-1].copy_(self._correct)  # one tensor for one transfer; float64 holds the counts exactly
        self._result[-1].copy_(self._loss)

    def _capture(self, stream: torch.cuda.Stream) -> Callable[[], None]:
        try:
            with on_stream(stream):
                return capture(self._compute, stream)
        except RuntimeError as error:  # out of memory, or a network that cannot be captured
            logger.warning("no CUDA graph of the evaluation; it runs eagerly: %s", one_line(error))
            return self._compute


@torch.no_grad()
def evaluate_each(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, normalise: Normaliser
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the predicted class of every image."""
    found = []
    for pixels, targets in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True):
        logits = model.eval()(normalise(pixels))
        found.append((F.cross_entropy(logits, targets, reduction="none"), logits.argmax(dim=1)))
    loss, predicted = zip(*found, strict=True)
    return torch.cat(loss), torch.cat(predicted)


def central_test(config: RunConfig, device: str) -> Evaluate:
    """Return a function that evaluates a model state on the global test set."""
    data = federated_data(config, config.clients)
    images, labels = (torch.tensor(array, device=device) for array in data.global_test())
    sizes = data.test_sizes()
    model = build_network(config).to(device)
    if device == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    normalise = Normaliser(data.dataset.mean, data.dataset.std, device)
    stream = own_stream() if device == "cuda" and config.engine != "eager" else None
    evaluator = Evaluator(model, images, labels, data.num_classes, normalise, stream, sizes)

    def evaluate(trainable: State, buffers: State) -> dict[str, Any]:
        result = evaluator.evaluate(trainable, buffers)
        return {
            "accuracy": result.accuracy,
            "balanced_accuracy": result.balanced_accuracy,
            # Six digits tell a million images apart; with all of them, these numbers would be most of a run's record.
            "per_class_accuracy": [a if a is None else round(a, 6) for a in result.per_class_accuracy],
            "loss": result.loss,
            **client_scores(dict(enumerate(zip(result.correct_by_client, sizes, strict=True)))),
        }

    return evaluate


def client_scores(counts: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
    """Return the accuracy of clients on their own test images: the mean over clients, and that of the worst tenth.

    ``counts`` has the number of each client's images that are classified correctly, and of all its images. Clients
    without images are left out; if there are no others, the result is empty.
    """
    accuracies = {client: correct / images for client, (correct, images) in counts.items() if images}
    if not accuracies:
        return {}
    worst = sorted(accuracies, key=lambda client: accuracies[client])
    tenth = worst[: math.ceil(len(worst) / 10)]
    return {
        "mean_client_accuracy": sum(accuracies.values()) / len(accuracies),
        "worst_tenth_accuracy": sum(accuracies[client] for client in tenth) / len(tenth),
        "worst_client": worst[0],
    }
