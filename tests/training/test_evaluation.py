"""Evaluation of a model: counts by hand, and the same from a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import on_a_gpu
from torch import nn
from torch.nn import functional as F
from users_models import with_batchnorm

from fedeas_flwr.training import evaluation
from fedeas_flwr.training.engine import read_state
from fedeas_flwr.training.evaluation import Evaluator, client_scores
from fedeas_flwr.training.models import Normaliser


class Brightness(nn.Module):
    """Classifies one shifted pixel of 0 or 1: class 0 if dark, else class 1; never class 2."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = x.flatten(1)[:, :1] + self.shift
        return torch.cat([1 - bright, bright, torch.full_like(bright, -9.0)], dim=1)


def by_hand() -> Evaluator:
    pixels = torch.tensor([0, 0, 255, 255, 255, 0], dtype=torch.uint8).view(-1, 1, 1, 1)
    labels = torch.tensor([0, 1, 1, 1, 1, 2])
    return Evaluator(Brightness(), pixels, labels, 4, Normaliser((0.0,), (1.0,), "cpu"))


def test_evaluator_counts_and_loss_by_hand() -> None:
    evaluator = by_hand()
    found = evaluator.evaluate({"shift": np.float32(0)}, {})
    assert (found.correct, found.examples, found.accuracy) == (4, 6, 4 / 6)
    assert found.per_class_accuracy == [1.0, 3 / 4, 0.0, None]
    assert found.balanced_accuracy == pytest.approx((1 + 3 / 4) / 3)
    right, wrong, never = (-np.log(np.exp(x) / (1 + np.e + np.exp(-9))) for x in (1, 0, -9))
    assert found.loss == pytest.approx((4 * right + wrong + never) / 6, rel=1e-6)
    # Every pixel is bright now; no result of the first evaluation remains, and the given arrays are unchanged.
    shift = np.float32(2)
    again = evaluator.evaluate({"shift": shift}, {})
    assert again.per_class_accuracy == [0.0, 1.0, 0.0, None] and shift == 2
    assert evaluator.evaluate({"shift": torch.zeros(())}, {}) == found


def test_clients_own_images_by_hand() -> None:
    pixels = torch.tensor([0, 0, 255, 255, 255, 0], dtype=torch.uint8).view(-1, 1, 1, 1)
    labels, normalise = torch.tensor([0, 1, 1, 1, 1, 2]), Normaliser((0.0,), (1.0,), "cpu")
    evaluator = Evaluator(Brightness(), pixels, labels, 4, normalise, client_sizes=[3, 0, 2, 1])
    for _ in range(2):
        found = evaluator.evaluate({"shift": np.float32(0)}, {})
        assert found.correct_by_client == [2, 0, 2, 0] and found.correct == 4
    assert by_hand().evaluate({"shift": np.float32(0)}, {}).correct_by_client == []


def test_worst_tenth_of_clients_by_hand() -> None:
    counts = {client: (client, 10) for client in range(3, 10)} | {20: (1, 2), 21: (2, 2), 22: (1, 4), 23: (9, 9)}
    assert client_scores(counts | {30: (0, 0)}) == {
        "mean_client_accuracy": pytest.approx((4.2 + 0.5 + 1 + 0.25 + 1) / 11),
        "worst_tenth_accuracy": pytest.approx((0.25 + 0.3) / 2),  # two of eleven
        "worst_client": 22,
    }
    assert client_scores({5: (1, 4)})["worst_tenth_accuracy"] == 0.25
    assert client_scores({}) == {} == client_scores({0: (0, 0)})


def test_evaluator_counts_each_image_of_several_batches_once() -> None:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (2 * evaluation.BATCH + 7, 8, 8, 1), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, len(images)))
    torch.manual_seed(0)
    model, normalise = with_batchnorm(10, (8, 8, 1)), Normaliser((0.3,), (0.4,), "cpu")
    sizes = [len(images) - 5, 5]
    found = Evaluator(model, images, labels, 10, normalise, client_sizes=sizes).evaluate(*read_state(model))
    assert not model.training
    with torch.no_grad():
        logits = model(normalise(images))
    correct = logits.argmax(1) == labels
    assert found.correct == int(correct.sum())
    assert found.correct_by_client == [int(part.sum()) for part in torch.split(correct, sizes)]
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


class FakeStream:
    """A stand-in for a CUDA stream on a CPU."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_stream(self, other: str) -> None:
        self.waited.append(other)

    def synchronize(self) -> None: ...


def evaluator_on_fake_stream(
    monkeypatch: pytest.MonkeyPatch, capture: Callable[..., Callable[[], None]]
) -> tuple[Evaluator, FakeStream]:
    monkeypatch.setattr(evaluation, "capture", capture)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    plain, stream = by_hand(), FakeStream()
    images, labels, normalise = plain._images, plain._labels, plain._normalise
    return Evaluator(Brightness(), images, labels, 4, normalise, stream), stream  # type: ignore[arg-type]


def test_evaluation_graph_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def capture(step: Callable[[], None], stream: Any) -> Callable[[], None]:
        happened.append("captured")

        def replay() -> None:
            happened.append("replayed")
            step()

        return replay

    evaluator, stream = evaluator_on_fake_stream(monkeypatch, capture)
    for shift in (0.0, 2.0, 0.0):
        state = {"shift": np.float32(shift)}
        assert evaluator.evaluate(state, {}) == by_hand().evaluate(state, {})
    assert happened == ["captured", "replayed", "replayed", "replayed"]
    assert stream.waited == ["default"] * 4, "did not wait for the copy of the state"


def test_failed_capture_evaluates_eagerly_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(step: Callable[[], None], stream: Any) -> Callable[[], None]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    with caplog.at_level(logging.WARNING, "fedeas_flwr"):
        evaluator, _ = evaluator_on_fake_stream(monkeypatch, capture)
        for shift in (0.0, 2.0):
            state = {"shift": np.float32(shift)}
            assert evaluator.evaluate(state, {}) == by_hand().evaluate(state, {})
    (said,) = caplog.messages
    assert "no CUDA graph" in said and "out of memory. Tried" in said


@on_a_gpu
def test_graphed_evaluation_equals_eager() -> None:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (2 * evaluation.BATCH + 7, 8, 8, 1), dtype=np.uint8)).cuda()
    labels, normalise = torch.from_numpy(rng.integers(0, 10, len(images))).cuda(), Normaliser((0.3,), (0.4,), "cuda")
    torch.manual_seed(0)
    states = [read_state(with_batchnorm(10, (8, 8, 1))) for _ in range(3)]
    stream, sizes = torch.cuda.Stream(), [7, 0, len(images) - 7]  # type: ignore[no-untyped-call]
    graphed = Evaluator(with_batchnorm(10, (8, 8, 1)).cuda(), images, labels, 10, normalise, stream, sizes)
    assert graphed._run != graphed._compute, "it was not captured"
    plain = Evaluator(with_batchnorm(10, (8, 8, 1)).cuda(), images, labels, 10, normalise, client_sizes=sizes)
    for trainable, buffers in [*states, states[0]]:
        one, two = graphed.evaluate(trainable, buffers), plain.evaluate(trainable, buffers)
        assert one.per_class_accuracy == two.per_class_accuracy and one.correct == two.correct
        assert one.correct_by_client == two.correct_by_client
        assert one.loss == pytest.approx(two.loss, rel=1e-6)


class SynchronisingModel(nn.Module):
    """Reads a value from the GPU in its forward pass, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits if float(logits.sum()) > -1e30 else -logits


@on_a_gpu
def test_network_that_cannot_be_captured_is_evaluated_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    images, labels = torch.zeros((9, 8, 8, 1), dtype=torch.uint8).cuda(), torch.zeros(9, dtype=torch.long).cuda()
    normalise, model = Normaliser((0.3,), (0.4,), "cuda"), SynchronisingModel().cuda()
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with caplog.at_level(logging.WARNING, "fedeas_flwr"):
        evaluator = Evaluator(model, images, labels, 10, normalise, stream)
    assert "no CUDA graph" in caplog.text and torch.cuda.current_stream() == before
    assert evaluator.evaluate(*read_state(model)).examples == 9
    torch.rand(1, device="cuda")  # raises if the failed capture left the generator in its capturing state
