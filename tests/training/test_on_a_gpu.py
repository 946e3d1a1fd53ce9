"""Whole runs on a GPU: they match runs on a CPU, resume, and are the same under Ray."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from requires_gpu import on_a_gpu
from runners import CHEAP, NEEDS, finish, small
from safetensors.numpy import load_file

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.config import STRATEGIES
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.fedgen_generator import new_generator
from fedeas_flwr.strategies.interface import ClientRound
from fedeas_flwr.strategies.registry import client_part
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser, build_model, split_state

GPU: dict[str, Any] = {"device": "cuda", "precision": "fp32", "actors": 2}


def weight_changes(run: RunDirectory) -> np.ndarray[Any, Any]:
    """Return the change of all weights of a run's model since its start, as one vector."""
    start, _ = split_state(build_model("small-cnn", 10, (8, 8, 1), seed=1))
    end = load_file(run.path / "model.safetensors")
    return np.concatenate([(end[key] - start[key]).ravel() for key in sorted(start)])


def assert_alike(ours: RunDirectory, theirs: RunDirectory, part: float = 0.03) -> None:
    """Check for equal clients, steps and images, and that models differ by at most ``part`` of their change.

    Rounding alone moves most of these runs by less than 0.006 of it; class-weighted losses and FedAdagrad, whose rare
    images and small denominators count for much, by up to 0.012 (rounding played on a processor).
    """
    for key in ("clients", "steps", "generated"):
        assert [one[key] for one in ours.rounds()] == [one[key] for one in theirs.rounds()]
    way, other = weight_changes(ours), weight_changes(theirs)
    assert np.linalg.norm(other) > 0
    assert np.linalg.norm(way - other) < part * np.linalg.norm(other)


def assert_no_fallback(run: RunDirectory) -> None:
    """Check that nothing was trained or evaluated with the slow fallback."""
    said = (run.path / "flower.log").read_text()
    assert "no CUDA graph" not in said and "not fused" not in said


@on_a_gpu
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_on_gpu_matches_cpu(tmp_path: Path, strategy: str) -> None:
    keys = {"policy": "none", "participation": 1.0, "strategy": strategy, **NEEDS.get(strategy, {})}
    keys |= (
        {"fedprox_mu": 1.0} if strategy == "fedprox" else {}
    )  # its default differs from FedAvg only by rounding here
    here, there = (finish(small(tmp_path / at["device"], **keys, **at)) for at in (GPU, {**GPU, "device": "cpu"}))
    assert_alike(here, there)
    assert_no_fallback(here)


@on_a_gpu
@pytest.mark.parametrize(("precision", "alike"), [("fp32", 0.999), ("bf16", 0.8)])
@pytest.mark.parametrize("strategy", ["fedgen", "fedmix"])
def test_graphed_resnet18_matches_eager(strategy: str, precision: str, alike: float) -> None:
    """FedMix runs without the fused layers, which have no double backward, and FedGen calls the head on its own.

    In bf16 roundings alone part them: at these weights they move FedMix's gradient, of λ = ½, by half (on a processor).
    """
    start, rng = build_model("resnet18", 10, (32, 32, 3), seed=1), np.random.default_rng(0)
    config = small(Path("/nowhere"), strategy=strategy, batch_size=16, **NEEDS[strategy], fedmix_lambda=0.5)
    part, recipe, normalise = (
        client_part(config),
        LocalTrainingConfig(1, 16, 1e-4),
        Normaliser((0.5,) * 3, (0.3,) * 3, "cuda"),
    )
    images = torch.from_numpy(rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)).cuda()  # the last batch is short
    labels = torch.from_numpy(rng.integers(0, 10, 40)).cuda()
    told = {"means": rng.normal(0, 0.1, (3, 3, 32, 32)).astype(np.float32), "clients": np.arange(3)}
    told |= {"proportions": np.full((3, 10), 0.1, np.float32)}
    if strategy == "fedgen":
        told = {f"generator/{name}": value.numpy() for name, value in new_generator(512, 10, seed=1).items()}
        told |= {"labels": np.arange(10)}
    task = ClientRound(config, 2, 0, "cuda", {}, {}, told, {}, labels, recipe.steps(40))
    inputs, ways = part.prepare(task), []
    configure_torch("cuda", precision)
    for engine in (
        EagerEngine(deepcopy(start), recipe, normalise, "cuda", part.objective, precision=precision),
        GraphedEngine(deepcopy(start), recipe, normalise, precision, objective=part.objective),
    ):
        _, trained, _ = engine.train(*read_state(start), images, labels, np.random.default_rng(3), inputs)
        before = read_state(start)[0]
        ways.append(torch.cat([(trained[key].cpu() - before[key]).flatten() for key in before]))
    assert torch.nn.functional.cosine_similarity(ways[0], ways[1], dim=0) > alike
    assert 0.8 < ways[1].norm() / ways[0].norm() < 1.25


NETWORKS = (
    "resnet50", "mobilenet_v2", "mobilenet_v3_small", "vgg11_bn", "shufflenet_v2_x0_5", "densenet121",
    "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_32",
)  # fmt: skip


def torchvision_network(name: str) -> torch.nn.Module:
    """Build a network of torchvision for images of 64×64, without random layers."""
    more = {"image_size": 64} if name.startswith("vit") else {}
    network: torch.nn.Module = getattr(torchvision.models, name)(num_classes=10, **more)
    for module in network.modules():
        if isinstance(module, (torch.nn.Dropout, torchvision.ops.StochasticDepth)):
            module.p = 0.0
    return network


@on_a_gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_torchvision_networks_train_in_graphs(name: str) -> None:
    """Several change BatchNorm's output in place, which only PyTorch's own BatchNorm used to allow.

    These networks amplify rounding: in float32 even ResNet-50's first gradients have a cosine of 0.996 with those in
    float64. So the measure is how far a CPU, which rounds differently, ends from the GPU without graphs.
    """
    torch.manual_seed(0)
    start, rng, recipe = torchvision_network(name), np.random.default_rng(0), LocalTrainingConfig(1, 16, 1e-6)
    images = torch.from_numpy(rng.integers(0, 256, (40, 64, 64, 3), dtype=np.uint8))  # the last batch is short
    labels = torch.from_numpy(rng.integers(0, 10, 40))
    configure_torch("cuda", "fp32")
    on_gpu, on_cpu = (Normaliser((0.5,) * 3, (0.3,) * 3, device) for device in ("cuda", "cpu"))
    before, ways = read_state(start)[0], []
    for device, engine in (
        ("cuda", EagerEngine(deepcopy(start), recipe, on_gpu, "cuda")),
        ("cuda", GraphedEngine(deepcopy(start), recipe, on_gpu, "fp32")),
        ("cpu", EagerEngine(deepcopy(start), recipe, on_cpu, "cpu")),
    ):
        data = images.to(device), labels.to(device)
        for number in range(2):
            result, trained, _ = engine.train(*read_state(start), *data, np.random.default_rng(number))
        assert np.isfinite(result.loss)
        ways.append(torch.cat([(trained[key].cpu() - before[key]).flatten().double() for key in before]))
    graphed, by_rounding = (1 - torch.nn.functional.cosine_similarity(ways[0], way, dim=0) for way in ways[1:])
    assert graphed < 3 * by_rounding + 1e-4


@on_a_gpu
def test_failing_fused_layer_is_replaced_by_pytorchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedeas_flwr.training.gpu.fast_layers import FusedLayers  # needs Triton

    def fail(self: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            raise ValueError("a mistake of the kernel")
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(FusedLayers, "_batchnorm", fail)
    run = finish(small(tmp_path / "run", policy="none", model="users_models:with_batchnorm", **GPU))
    said = (run.path / "flower.log").read_text()
    line = (
        "no CUDA graph of a training step (a mistake of the kernel); from here on in CUDA graphs with PyTorch's layers"
    )
    assert line in said


@on_a_gpu
@pytest.mark.parametrize(
    "keys",
    [
        {"loss": "class-weighted"},
        {"loss": "logit-adjusted"},
        {"views": "flip-crop"},
        {"policy": "oversample"},
        {"learning_rate_schedule": "step 0.1 1"},
        {"learning_rate_schedule": "cosine", "momentum": 0.9},
        {"learning_rate_schedule": "step 0.1 1", "strategy": "scaffold"},
    ],
    ids=str,
)
def test_run_settings_on_gpu_match_cpu(tmp_path: Path, keys: dict[str, Any]) -> None:
    keys = {"policy": "none", **keys}
    here, there = (finish(small(tmp_path / at["device"], **keys, **at)) for at in (GPU, {**GPU, "device": "cpu"}))
    assert_alike(here, there)
    assert_no_fallback(here)


@on_a_gpu
def test_run_with_generated_images_on_gpu_resumes(tmp_path: Path) -> None:
    whole = finish(small(tmp_path / "whole", **GPU, **CHEAP))
    half = finish(small(tmp_path / "half", **GPU, **CHEAP, rounds=1))
    finish(half.config().with_changes(rounds=3, resume=True))
    assert whole.rounds()[-1]["generated"] > 0
    assert_alike(half, whole)


@on_a_gpu
def test_ray_on_gpu_shares_matches_inline(tmp_path: Path, fresh_images: Callable[[str], None]) -> None:
    """Each run generates its own images."""
    fresh_images("inline")
    inline = finish(small(tmp_path / "inline", **GPU, **CHEAP))
    fresh_images("ray")
    assert_alike(finish(small(tmp_path / "ray", **GPU, **CHEAP, backend="ray", gpu_share=0.2)), inline)
