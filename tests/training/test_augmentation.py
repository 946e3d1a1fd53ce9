"""Augmentation: images by hand, reproducible draws, and the same steps in both engines."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import finish, quick, weights
from users_models import with_batchnorm

from fedeas_flwr.common.randomness import stream
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.training.augmentation import VIEWS, augment, draw_views
from fedeas_flwr.training.build import common_inputs
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import NO_INPUTS, Inputs

IMAGE = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        ((0, 0, 0), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        ((1, 0, 0), [[3, 2, 1], [6, 5, 4], [9, 8, 7]]),
        ((0, 1, 0), [[0, 0, 0], [1, 2, 3], [4, 5, 6]]),
        ((0, -1, 0), [[4, 5, 6], [7, 8, 9], [0, 0, 0]]),
        ((0, 0, 2), [[0, 0, 1], [0, 0, 4], [0, 0, 7]]),
        ((1, -1, 1), [[0, 6, 5], [0, 9, 8], [0, 0, 0]]),
    ],
)
def test_augment_by_hand(view: tuple[int, int, int], expected: list[list[int]]) -> None:
    other = IMAGE + 100  # next to it in the batch, with another view
    pixels = torch.stack([IMAGE, other])[..., None].repeat(1, 1, 1, 2)
    shown = augment(pixels, torch.tensor([view, (0, 0, 0)], dtype=torch.int8))
    assert shown.dtype == torch.uint8
    assert shown.is_contiguous()
    for channel in (0, 1):
        assert shown[0, :, :, channel].tolist() == expected
        assert shown[1, :, :, channel].tolist() == other.tolist()


def test_drawn_views_depend_on_the_dataset() -> None:
    table = draw_views(dataset_info("cifar10"), 940, 64, np.random.default_rng(0))
    assert (table.shape, table.dtype) == ((940, 64, 3), torch.int8)
    assert table.numel() < 200_000  # bytes, for 10 epochs of 6,000 images
    assert table[..., 0].unique().tolist() == [0, 1]
    assert table[..., 1].unique().tolist() == table[..., 2].unique().tolist() == list(range(-4, 5))
    digits = draw_views(dataset_info("digits"), 100, 64, np.random.default_rng(0))
    assert digits[..., 0].unique().tolist() == [0]  # digits are not flipped
    assert digits[..., 1:].unique().tolist() == [-1, 0, 1]
    for side, dtype in ((1023, torch.int8), (1024, torch.int16)):
        large = dataclasses.replace(dataset_info("digits"), image_shape=(side, side, 1))
        table = draw_views(large, 200, 64, np.random.default_rng(0))
        assert (table.dtype, int(table.min()), int(table.max())) == (dtype, -(side // 8), side // 8)


def test_drawn_views_depend_on_client_and_round() -> None:
    config, labels = quick(Path("/nowhere"), views="flip-crop"), torch.zeros(70, dtype=torch.long)
    tables = [common_inputs(config, 10, labels, *who).tables[VIEWS] for who in ((1, 0), (1, 0), (2, 0), (1, 1))]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    assert not torch.equal(tables[0], tables[3])
    assert common_inputs(quick(Path("/nowhere")), 10, labels, 1, 0) == NO_INPUTS


@pytest.mark.parametrize(
    "samples", [64, 70, 65, 7, 1]
)  # full last batch, short, one image (skipped), less than a batch, one image in total
@pytest.mark.parametrize("device", DEVICES)
def test_both_engines_take_the_same_steps(samples: int, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = with_batchnorm(10, (8, 8, 1)).to(device)
    start, recipe, normalise = read_state(model), LocalTrainingConfig(2, 32, 0.05), Normaliser((0.3,), (0.4,), device)
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device)
    rng = np.random.default_rng(samples)
    images = torch.from_numpy(rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, 10, samples)).to(device)
    steps = recipe.steps(samples)
    for number in (1, 2):
        drawn = draw_views(dataset_info("digits"), steps, 32, stream(1, "views", number, 0))
        inputs = Inputs(tables={VIEWS: drawn.to(device)})
        one, *first = eager.train(*start, images, labels, np.random.default_rng(7), inputs)
        two, *second = graphed.train(*start, images, labels, np.random.default_rng(7), inputs)
        assert one.steps == two.steps == steps
        assert one.loss == pytest.approx(two.loss, rel=1e-4, abs=1e-6)
        for mine, theirs in zip(first, second, strict=True):
            for key in mine:
                torch.testing.assert_close(mine[key], theirs[key], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_identity_views_give_bitwise_equal_weights(kind: str) -> None:
    model, recipe, normalise = (
        with_batchnorm(10, (8, 8, 1)),
        LocalTrainingConfig(2, 32, 0.05),
        Normaliser((0.3,), (0.4,), "cpu"),
    )
    start, (images, labels) = read_state(model), (torch.randint(0, 256, (70, 8, 8, 1)).byte(), torch.arange(70) % 10)

    def trained(inputs: Inputs) -> torch.Tensor:
        engine = (
            EagerEngine(model, recipe, normalise, "cpu")
            if kind == "eager"
            else GraphedEngine(model, recipe, normalise, "fp32", "cpu")
        )
        _, state, _ = engine.train(*start, images, labels, np.random.default_rng(7), inputs)
        return torch.cat([value.flatten() for value in state.values()])

    still, moved = torch.zeros((6, 32, 3), dtype=torch.int8), torch.ones((6, 32, 3), dtype=torch.int8)
    assert torch.equal(trained(Inputs(tables={VIEWS: still})), trained(NO_INPUTS))
    assert not torch.equal(trained(Inputs(tables={VIEWS: moved})), trained(NO_INPUTS))


def test_run_with_augmentation_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = finish(quick(tmp_path / "whole", policy="none", rounds=2, views="flip-crop"))
    finish(quick(tmp_path / "parts", policy="none", rounds=1, views="flip-crop"))
    resumed = finish(quick(tmp_path / "parts", policy="none", rounds=2, views="flip-crop", resume=True))
    assert weights(whole) == weights(resumed)
    assert weights(whole) != weights(finish(quick(tmp_path / "plain", policy="none", rounds=2)))
