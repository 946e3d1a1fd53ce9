"""The engines: the same steps by two roads, and a short batch that is exactly itself."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from runners import finish, small, weights
from torch import nn
from users_models import with_batchnorm

from fedeas_flwr.grids import InlineGrid
from fedeas_flwr.strategies.averaging import weighted_average
from fedeas_flwr.training import Normaliser, Recipe
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import read_state
from fedeas_flwr.training.graphed import GraphedEngine, batch_table, masked_batchnorm

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def data(samples: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(samples)
    images = rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8)
    return torch.tensor(images, device=device), torch.tensor(rng.integers(0, 10, samples), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "samples", [40, 64, 65, 70, 7, 1]
)  # rests of 8, 0, 1 (skipped), 6; shorter than a batch; alone
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_both_engines_take_the_same_steps(samples: int, momentum: float, decay: float, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = with_batchnorm(10, (8, 8, 1)).to(device)
    start = read_state(model)
    recipe = Recipe(epochs=3, batch_size=32, learning_rate=0.05, momentum=momentum, weight_decay=decay)
    normalise = Normaliser((0.3,), (0.4,), device)
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device)
    for seed in (0, 1):  # the second time nothing of the first may be left in the buffers
        images, labels = data(samples, device)
        one, *first = eager.train(*start, images, labels, np.random.default_rng(seed))
        two, *second = graphed.train(*start, images, labels, np.random.default_rng(seed))
        assert one.steps == two.steps
        assert one.loss == pytest.approx(two.loss, rel=1e-4, abs=1e-6)
        for mine, theirs in zip(first, second, strict=True):
            assert list(mine) == list(theirs)
            for key in mine:
                torch.testing.assert_close(
                    mine[key], theirs[key], rtol=2e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
                )


def test_a_padded_batch_is_the_short_batch_for_batchnorm() -> None:
    torch.manual_seed(0)
    short, padding = torch.randn(5, 3, 4, 4), 100 * torch.randn(11, 3, 4, 4)
    plain, masked = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    masked.load_state_dict(plain.state_dict())
    mask = (torch.arange(16) < 5).float()
    direction = torch.randn(5, 3, 4, 4)
    one = plain(short)
    (one * direction).sum().backward()
    with masked_batchnorm(masked, mask):
        two = masked(torch.cat([short, padding]))[:5]
    (two * direction).sum().backward()
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.weight.grad, masked.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain.running_var, masked.running_var)
    torch.testing.assert_close(plain.running_mean, masked.running_mean)
    assert int(masked.num_batches_tracked) == 1
    assert masked(short).shape == short.shape  # outside the block it is itself again


def test_the_batch_table_holds_every_sample_once_an_epoch() -> None:
    recipe = Recipe(epochs=4, batch_size=8, learning_rate=0.1)
    table, full, rest = batch_table(21, recipe, np.random.default_rng(0))
    assert (table.shape, full, rest) == ((12, 8), 2, 5)
    for epoch in table.reshape(4, 24):
        assert sorted(epoch[:21]) == list(range(21))
    table, full, rest = batch_table(17, recipe, np.random.default_rng(0))
    assert (table.shape, full, rest) == ((8, 8), 2, 1)
    assert batch_table(1, recipe, np.random.default_rng(0))[0].shape == (0, 8)


def test_models_handed_over_live_train_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = finish(small(tmp_path / "bytes", policy="none", model="small-cnn"))

    def live_grid(*args: object, **kwargs: object) -> InlineGrid:
        return InlineGrid(*args[:3], workers=2, live=True)  # type: ignore[arg-type]

    monkeypatch.setattr("fedeas_flwr.grids.InlineGrid", live_grid)
    handed_over = finish(small(tmp_path / "live", policy="none", model="small-cnn"))
    assert weights(sent) == weights(handed_over)


def test_average_is_the_same_for_arrays_and_tensors() -> None:
    rng = np.random.default_rng(0)
    states = [{"w": rng.normal(size=(3, 2)).astype(np.float32), "n": np.array(k, dtype=np.int64)} for k in (1, 2, 10)]
    weights = [3.0, 1.0, 7.0]
    arrays = weighted_average(states, weights)
    tensors = weighted_average([{k: torch.tensor(v) for k, v in s.items()} for s in states], weights)
    assert arrays["w"].dtype == np.float32
    assert arrays["n"] == round((3 * 1 + 1 * 2 + 7 * 10) / 11)
    assert arrays["n"].dtype == np.int64
    for key in arrays:
        assert np.array_equal(arrays[key], tensors[key].numpy())
        assert arrays[key].shape == tuple(tensors[key].shape)
    by_hand = (3 * states[0]["w"] + states[1]["w"] + 7 * states[2]["w"]) / 11
    np.testing.assert_allclose(arrays["w"], by_hand, rtol=1e-5)
