"""CUDA graph capture: one at a time, with the process's settings, and a fallback if it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from waiting import LONG

from fedeas_flwr.common import cuda
from fedeas_flwr.common.cuda import WARM_UPS, CaptureError, capture, capturing
from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.generators.diffusion.denoising import _arithmetic
from fedeas_flwr.training.engine import LocalTrainingConfig, TrainResult, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.oom_fallback import OomFallbackEngine

CUDA = torch.device("cuda")
MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = MATMUL.allow_tf32, CUDNN.allow_tf32, CUDNN.deterministic
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32, CUDNN.deterministic = before


def is_free() -> bool:
    """Return whether another thread could capture now."""
    found: list[bool] = []

    def look() -> None:
        found.append(capturing.acquire(blocking=False))
        if found[0]:
            capturing.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_generator_sets_tf32_only_while_no_capture_runs() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = False
    assert is_free()
    with _arithmetic(CUDA, "bf16"):
        assert MATMUL.allow_tf32 and CUDNN.allow_tf32 and CUDNN.deterministic
        assert not is_free(), "an engine captured now would train in TF32 for the rest of the run"
    assert is_free() and not MATMUL.allow_tf32 and not CUDNN.allow_tf32


def test_starting_client_keeps_the_generators_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    client = threading.Thread(target=configure_torch, args=("cuda", "tf32"))
    with _arithmetic(CUDA, "fp32"):
        client.start()
        client.join(timeout=0.3)
        assert client.is_alive() and not MATMUL.allow_tf32 and not CUDNN.allow_tf32
    client.join(timeout=LONG)
    assert not client.is_alive() and MATMUL.allow_tf32 and CUDNN.allow_tf32


class FakeStream:
    """A stand-in for the stream of a capture."""

    device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA's part of a capture; ending a failed capture raises another error."""

    class Graph:
        def replay(self) -> str:
            return "replayed"

    @contextmanager
    def graph(*_: Any, **modes: Any) -> Iterator[None]:
        assert modes["capture_error_mode"] == "thread_local" and not is_free()
        try:
            yield
        except BaseException:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(cuda, "_end_capture_of_random_numbers", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def failing(error: Exception, calls: list[int]) -> Any:
    """Return a step that runs eagerly and fails when it is captured."""

    def step() -> None:
        calls.append(len(calls))
        if len(calls) > WARM_UPS:
            raise error

    return step


def test_capture_errors_differ_from_out_of_memory(no_gpu: None) -> None:
    steps: list[int] = []
    assert capture(lambda: steps.append(0), FakeStream())() == "replayed" and len(steps) == WARM_UPS + 1  # type: ignore
    unseen = RuntimeError("operation not permitted when\nstream is capturing")
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        capture(failing(unseen, []), FakeStream())  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture(failing(torch.OutOfMemoryError("no memory"), []), FakeStream())  # type: ignore[arg-type]
    assert is_free()


class FakeEngine:
    """An engine that trains, or raises the given error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def train(self, *given: Any) -> Any:
        if self.error is not None:
            raise self.error
        return TrainResult(0.5, 3), {}, {}


def log_of_training(first: Exception, second: Exception | None, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Train a client twice with an engine whose first one or two levels fail; return the log messages."""
    return log_of_levels(first, lambda: FakeEngine(second), caplog)


def log_of_levels(first: Exception, eager: Callable[[], FakeEngine], caplog: pytest.LogCaptureFixture) -> list[str]:
    less = [("eagerly", eager), ("block by block", FakeEngine)]
    engine: Any = OomFallbackEngine(("in CUDA graphs", lambda: FakeEngine(first)), lambda _: less)
    with caplog.at_level(logging.WARNING, "fedeas_flwr"):
        for _ in range(2):
            assert engine.train({}, {}, None, None, np.random.default_rng(0))[0].steps == 3
    return caplog.messages


def test_network_that_cannot_be_captured_trains_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    assert log_of_training(CaptureError("it looks at a number"), None, caplog) == [
        "no CUDA graph of a training step (it looks at a number); from here on eagerly"
    ]


def test_out_of_memory_after_a_failed_capture_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert log_of_training(CaptureError("it looks at a number"), torch.OutOfMemoryError("none left"), caplog) == [
        "out of memory in training (none left); from here on block by block"
    ]


def test_level_without_memory_to_build_it_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    def full() -> FakeEngine:
        raise torch.OutOfMemoryError("none left for the weights")

    assert log_of_levels(torch.OutOfMemoryError("none left"), full, caplog) == [
        "out of memory in training (none left); from here on block by block"
    ]


def test_other_errors_in_training_are_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="a mistake of the model"):
        log_of_training(RuntimeError("a mistake of the model"), None, caplog)


def test_error_of_a_networks_preparation_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next level is tried: a compiler of kernels may raise anything."""

    def fail(*given: Any) -> None:
        raise TypeError("unexpected layer")

    monkeypatch.setattr(GraphedEngine, "_build_for_shape", fail)
    model = torch.nn.Linear(1, 2)
    engine = GraphedEngine(model, LocalTrainingConfig(1, 2, 0.1), Normaliser((0.5,), (0.5,), "cpu"), "fp32", "cpu")
    images, labels = torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.long)
    with pytest.raises(CaptureError, match="unexpected layer"):
        engine.train(*read_state(model), images, labels, np.random.default_rng(0))
