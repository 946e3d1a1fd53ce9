"""Row 3: memory runs out in training or generation. The same steps are computed in less memory, with one log line."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runners import finish, small
from torch import nn
from users_models import Unlucky, WithFeatures, WithFunctions

from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import parse_config
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.fedgen_generator import NOISE, new_generator
from fedeas_flwr.strategies.registry import client_part
from fedeas_flwr.training.build import build_engine, build_network
from fedeas_flwr.training.engine import read_state
from fedeas_flwr.training.objective import Batch
from fedeas_flwr.training.oom_fallback import accumulate_gradients, checkpoint_activations, full_batch_gradient


class MemoryLimited(nn.Module):
    """A network that raises OutOfMemoryError when its forward pass saves more than `most` numbers, like a full GPU.

    Only tensors saved for the backward pass count; with activation checkpointing they are fewer.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        super().__init__()
        self.model, self.most = model, most

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            if kept > self.most:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to keep {kept} numbers")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits: torch.Tensor = self.model(images)
        return logits


def trained(model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, **keys: Any) -> dict[str, torch.Tensor]:
    """Return the state and loss after one round of a client's training with the engine that a run would use."""
    config = parse_config({"policy": "none", "batch-size": 32, "local-epochs": 2, "momentum": 0.9, **keys})

    def fresh(_: object) -> nn.Module:
        torch.manual_seed(3)
        return model()

    monkeypatch.setattr("fedeas_flwr.training.build.build_network", fresh)
    draws = np.random.default_rng(0)
    images = torch.from_numpy(draws.integers(0, 256, (75, 8, 8, 1), dtype=np.uint8))
    labels = torch.from_numpy(draws.integers(0, 10, 75))
    engine = build_engine(config, "cpu", client_part(config).objective)
    result, *states = engine.train(*read_state(fresh(None)), images, labels, stream(1, "batches", 1, 0))
    assert result.steps == 6
    return {**states[0], **states[1], "loss": torch.tensor(result.loss)}


def plain() -> nn.Module:
    return build_network(parse_config({}))


def norm() -> nn.Module:
    return WithFeatures(10, (8, 8, 1))


def dropout() -> nn.Module:
    def block(size: int) -> nn.Module:
        return nn.Sequential(nn.Linear(size, 200), nn.ReLU(), nn.Dropout(0.3))

    return nn.Sequential(nn.Flatten(), block(64), block(200), nn.Linear(200, 10))


def functional_dropout() -> nn.Module:
    return WithFunctions(10, (8, 8, 1))


def test_gradient_accumulation_takes_the_same_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(plain, monkeypatch)
    with caplog.at_level(logging.WARNING, "fedeas_flwr"):
        less = trained(lambda: MemoryLimited(plain(), 40_000), monkeypatch)  # 32 images save 150,000
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory in training (CUDA out of memory. Tried to keep 67728 numbers); "
        "from here on with gradient accumulation over 8 micro-batches"
    ]
    for name, value in less.items():
        assert torch.allclose(value, whole[name.removeprefix("model.")], atol=1e-5), name


def test_batchnorm_and_dropout_use_activation_checkpointing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Statistics over a micro-batch would change the step; checkpointing recomputes blocks and is bitwise equal."""
    whole = trained(norm, monkeypatch)
    with caplog.at_level(logging.WARNING, "fedeas_flwr"):
        less = trained(lambda: MemoryLimited(norm(), 20_000), monkeypatch)
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [
        "from here on with activation checkpointing"
    ]
    assert int(less["model.body.1.num_batches_tracked"]) == 6
    for name, value in less.items():
        assert torch.equal(value, whole[name.removeprefix("model.")]), name
    for times, (model, most) in enumerate([(dropout, 50_000), (functional_dropout, 22_000)], 2):
        drawn = trained(model, monkeypatch)
        again = trained(lambda model=model, most=most: MemoryLimited(model(), most), monkeypatch)
        assert len(caplog.records) == times
        for name, value in again.items():
            assert torch.equal(value, drawn[name.removeprefix("model.")]), name


@pytest.mark.parametrize("strategy", ["fedprox", "moon", "fedmix"])
def test_low_memory_modes_keep_the_regularisation_terms(
    strategy: str,
) -> None:
    """A term that does not depend on samples must count once, not once per micro-batch."""
    torch.manual_seed(0)
    config = parse_config({"strategy": strategy, "fedprox-mu": 0.5, "disclose-mean-images": True, "policy": "none"})
    for model in (plain(), WithFeatures(10, (8, 8, 1))):
        weights = [p for p in model.parameters() if p.requires_grad]
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        given = {
            **{f"start/{n}": torch.randn_like(w) for n, w in zip(names, weights, strict=True)},
            **{
                f"{kind}/{n}": torch.rand_like(v.float()).to(v.dtype)
                for kind in ("received", "previous")
                for n, v in model.state_dict().items()
            },
            "other": torch.tensor(1),
            "means": torch.randn(2, 1, 8, 8),
            "proportions": torch.full((2, 10), 0.1),
        }
        batch = Batch(torch.randn(30, 1, 8, 8), torch.randint(0, 10, (30,)), given, torch.mean)
        objective = client_part(config).objective
        whole_loss, whole = full_batch_gradient(objective, model, batch, weights)
        way = checkpoint_activations if isinstance(model, WithFeatures) else lambda *a: accumulate_gradients(4, *a)
        loss, gradients = way(objective, model, batch, weights)
        assert torch.allclose(loss, whole_loss, atol=1e-5)
        for ours, theirs in zip(gradients, whole, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_fedgen_in_parts_gives_each_image_its_own_noise() -> None:
    """With the noise of the step's first images for every part, the gradient differs by 0.1."""
    keys = {
        "strategy": "fedgen",
        "model": "small-cnn",
        "disclose-label-counts": True,
        "policy": "none",
        "batch-size": 8,
    }
    config = parse_config(keys)
    model, draws = build_network(config), torch.Generator().manual_seed(0)
    weights = list(model.parameters())
    given = {f"generator/{n}": w for n, w in new_generator(model.fc.in_features, 10, 1).items()}  # type: ignore[union-attr, arg-type]
    given |= {kind: torch.randn(8, NOISE, generator=draws) for kind in ("noise", "asked noise")}
    given |= {"asked labels": torch.arange(8), "alpha": torch.tensor(10.0), "beta": torch.tensor(10.0)}
    batch = Batch(torch.randn(8, 1, 8, 8, generator=draws), torch.arange(8), given, torch.mean)
    objective = client_part(config).objective
    whole_loss, whole = full_batch_gradient(objective, model, batch, weights)
    loss, gradients = accumulate_gradients(2, objective, model, batch, weights)
    assert torch.allclose(loss, whole_loss, rtol=1e-5)
    for ours, theirs in zip(gradients, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_other_errors_and_hopeless_limits_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArithmeticError, match="out of"):
        trained(lambda: Unlucky(10), monkeypatch)
    with pytest.raises(RuntimeError, match=r"batch-size: no memory to train even .* over 32 micro-batches .* smaller"):
        trained(lambda: MemoryLimited(plain(), 10), monkeypatch)


ADDRESS_SPACE = """
import resource, sys, torch
from torch import nn
from _pytest.monkeypatch import MonkeyPatch
sys.path[:0] = sys.argv[2:]
import test_3_out_of_memory as t
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 256, 3, padding=1), nn.Linear(256, 10)
    def forward(self, x):
        x = nn.functional.interpolate(x, size=(64, 64))
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))
torch.set_num_threads(1)
t.trained(t.plain, MonkeyPatch())  # what libraries need once
if int(sys.argv[1]):
    used = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), resource.RLIM_INFINITY))
print(float(t.trained(Large, MonkeyPatch())["loss"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to know how much memory is in use")
def test_training_under_an_address_space_limit_ends_the_same() -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    said = []
    for room in (0, 250_000_000):
        command = [sys.executable, "-c", ADDRESS_SPACE, str(room), *folders]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=300))
        assert said[-1].returncode == 0, said[-1].stderr
    whole, less = said
    assert "out of memory" not in whole.stderr
    assert less.stderr.count("out of memory in training") == 1
    assert "you tried to allocate" in less.stderr
    assert float(less.stdout) == pytest.approx(float(whole.stdout), rel=1e-4)


def test_run_short_of_memory_logs_it_once_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    whole = finish(small(tmp_path / "whole", policy="none", rounds=2))
    less = finish(small(tmp_path / "less", policy="none", rounds=2, model="test_3_out_of_memory:small_memory"))
    log = (tmp_path / "less" / "flower.log").read_text()
    assert log.count("out of memory in training") == 1
    assert [r["failures"] for r in less.rounds()] == [[], []]
    ours = RunDirectory(less.path).load_model()
    for name, value in RunDirectory(whole.path).load_model().items():
        assert np.allclose(value, ours[f"model.{name}"], atol=1e-4), name


def small_memory(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return MemoryLimited(plain(), 40_000)
