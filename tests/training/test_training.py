"""The engines: both take the same steps, and a padded short batch equals the short batch."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import finish, pass_models_by_reference, small, weights
from torch import nn
from torch.nn import functional as F
from users_models import with_batchnorm

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.strategies.averaging import weighted_average
from fedeas_flwr.training.build import EnginePool, local_training_config
from fedeas_flwr.training.eager import SGD, EagerEngine
from fedeas_flwr.training.engine import Engine, LocalTrainingConfig, batch_table, read_state
from fedeas_flwr.training.gpu.batchnorm import masked_batchnorm
from fedeas_flwr.training.gpu.convolutions import one_pixel_convolutions
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser, build_model
from fedeas_flwr.training.objective import Objective


def data(samples: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(samples)
    images = rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8)
    return torch.tensor(images, device=device), torch.tensor(rng.integers(0, 10, samples), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "samples", [40, 64, 65, 66, 67, 70, 7, 1]
)  # last batch of 8, 0, 1 (skipped), 2, 3, 6; fewer than one batch; one sample
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_both_engines_take_the_same_steps(samples: int, momentum: float, decay: float, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = with_batchnorm(10, (8, 8, 1)).to(device)
    start = read_state(model)
    recipe = LocalTrainingConfig(epochs=3, batch_size=32, learning_rate=0.05, momentum=momentum, weight_decay=decay)
    normalise = Normaliser((0.3,), (0.4,), device)
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device)
    for seed in (0, 1):  # no data of the first call may remain in the buffers
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("samples", "taken"), [(66, 64), (71, 64), (72, 72), (5, 0)])
def test_last_batch_below_min_batch_is_skipped(samples: int, taken: int, device: str) -> None:
    """Both engines skip it; its samples are drawn again each epoch."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model, (images, labels) = with_batchnorm(10, (8, 8, 1)).to(device), data(samples, device)
    start, normalise = read_state(model), Normaliser((0.3,), (0.4,), device)
    recipe = LocalTrainingConfig(epochs=2, batch_size=32, learning_rate=0.05, min_batch=8)
    ends = []
    for engine in (
        EagerEngine(copy.deepcopy(model), recipe, normalise, device),
        GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device),
    ):
        result, weights, _ = engine.train(*start, images, labels, np.random.default_rng(0))
        assert result.steps == recipe.steps(samples) == 2 * -(-taken // 32)
        ends.append(weights)
    by_hand, rng = copy.deepcopy(model).train(), np.random.default_rng(0)
    for _ in range(2):
        for chosen in np.split(rng.permutation(samples)[:taken], range(32, taken, 32)):
            if len(chosen):
                loss = F.cross_entropy(by_hand(normalise(images[chosen])), labels[chosen])
                loss.backward()
                with torch.no_grad():
                    for weight in by_hand.parameters():
                        weight -= 0.05 * weight.grad
                        weight.grad = None
    for key, wanted in by_hand.named_parameters():
        for weights in ends:
            torch.testing.assert_close(weights[key], wanted.detach(), rtol=2e-4, atol=2e-5)


def test_local_training_config_follows_the_run_config() -> None:
    keys = {"local-epochs": 5, "batch-size": 40, "learning-rate": 0.3, "momentum": 0.7, "weight-decay": 0.02}
    wanted = LocalTrainingConfig(5, 40, 0.3, momentum=0.7, weight_decay=0.02, min_batch=9)
    assert local_training_config(parse_config({**keys, "min-batch": 9})) == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_gives_the_same_steps_in_both_engines(device: str) -> None:
    model, (images, labels) = with_batchnorm(10, (8, 8, 1)).to(device), data(70, device)
    start, recipe = read_state(model), LocalTrainingConfig(epochs=2, batch_size=32, learning_rate=0.05)
    normalise, trained = Normaliser((0.3,), (0.4,), device), {}
    for name, engine in {
        "whole": EagerEngine(copy.deepcopy(model), recipe, normalise, device),
        "eager": EagerEngine(copy.deepcopy(model), recipe, normalise, device, precision="bf16"),
        "graphed": GraphedEngine(copy.deepcopy(model), recipe, normalise, "bf16", device),
    }.items():
        _, trained[name], _ = engine.train(*start, images, labels, np.random.default_rng(0))
    moved = {n: torch.cat([(w - start[0][key]).flatten() for key, w in t.items()]) for n, t in trained.items()}
    assert {value.dtype for value in trained["eager"].values()} == {torch.float32}
    apart = {name: float((moves - moved["eager"]).norm() / moved["eager"].norm()) for name, moves in moved.items()}
    assert 1e-4 < apart["whole"] < 0.1, "the model was not trained in bf16"
    assert apart["graphed"] < 0.03


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_sgd_equals_torchs_bitwise(momentum: float, decay: float) -> None:
    torch.manual_seed(0)
    ours = [torch.randn(7, 5), torch.randn(3)]
    theirs = [nn.Parameter(weight.clone()) for weight in ours]
    descent = SGD(LocalTrainingConfig(1, 8, 0.05, momentum, decay), ours)
    optimizer = torch.optim.SGD(theirs, lr=0.05, momentum=momentum, weight_decay=decay)
    for _ in range(5):
        gradients = [torch.randn_like(weight) for weight in ours]
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        descent.step(gradients)
    assert all(torch.equal(mine, weight) for mine, weight in zip(ours, theirs, strict=True))


class OnePixel(nn.Module):
    """8×8 images become maps of one pixel; `second` sees them, `first` sees larger ones, `both` sees either."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = (nn.Conv2d(n, 6, 3, padding=1, bias=False) for n in (1, 6, 6))
        self.norm, self.fc = nn.BatchNorm2d(6), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(torch.relu(self.both(self.first(x))), 8)
        return self.fc(torch.relu(self.norm(self.both(self.second(x)))).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_kernel_taps_that_only_see_padding_are_not_trained(momentum: float, decay: float, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = OnePixel().to(device)
    start = read_state(model)
    recipe, normalise = LocalTrainingConfig(3, 32, 0.05, momentum, decay), Normaliser((0.3,), (0.4,), device)
    assert one_pixel_convolutions(model, torch.zeros(2, 1, 8, 8, device=device)) == [model.second]
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device)
    images, labels = data(70, device)
    _, wanted, _ = eager.train(*start, images, labels, np.random.default_rng(0))
    for _ in range(2):
        _, trained, _ = graphed.train(*start, images, labels, np.random.default_rng(0))
        for key, value in wanted.items():
            torch.testing.assert_close(trained[key], value, rtol=2e-4, atol=2e-5)
        moved = (trained["second.weight"] != start[0]["second.weight"]).flatten(2).all(dim=(0, 1)).tolist()
        assert moved == [bool(decay) or tap == 4 for tap in range(9)]


def test_masked_batchnorm_of_padded_batch_equals_short_batch() -> None:
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
    assert masked(short).shape == short.shape  # outside the block the layer is unchanged


def test_batch_table_holds_each_sample_once_per_epoch() -> None:
    recipe = LocalTrainingConfig(epochs=4, batch_size=8, learning_rate=0.1)
    table, full, rest = batch_table(21, recipe, np.random.default_rng(0))
    assert (table.shape, full, rest) == ((12, 8), 2, 5)
    for epoch in table.reshape(4, 24):
        assert sorted(epoch[:21]) == list(range(21))
    table, full, rest = batch_table(17, recipe, np.random.default_rng(0))
    assert (table.shape, full, rest) == ((8, 8), 2, 0)
    assert batch_table(1, recipe, np.random.default_rng(0))[0].shape == (0, 8)


def test_models_passed_by_reference_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = finish(small(tmp_path / "bytes", policy="none", model="small-cnn", device="cpu"))
    pass_models_by_reference(monkeypatch)
    by_reference = finish(small(tmp_path / "live", policy="none", model="small-cnn", device="cpu"))
    assert weights(sent) == weights(by_reference)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["eager", "graphed"])
@pytest.mark.parametrize("network", ["with_dropout", "with_functional_dropout"])
def test_random_networks_train_reproducibly_in_parallel(network: str, kind: str, device: str) -> None:
    """Layers use the global random generator, and an inline grid has several threads."""
    images, labels = data(200, device)
    recipe, normalise = (
        LocalTrainingConfig(epochs=5, batch_size=8, learning_rate=0.05),
        Normaliser((0.3,), (0.4,), device),
    )

    def model() -> nn.Module:
        return build_model(f"users_models:{network}", 10, (8, 8, 1), seed=0)

    start = read_state(model())

    def train(client: int) -> torch.Tensor:
        engine = (
            EagerEngine(model(), recipe, normalise, device)
            if kind == "eager"
            else GraphedEngine(model(), recipe, normalise, "fp32", device)
        )
        _, trained, _ = engine.train(*start, images, labels, np.random.default_rng(client))
        return torch.cat([(trained[key].cpu() - start[0][key]).flatten() for key in start[0]])

    alone = [train(client) for client in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for together, one in zip(pool.map(train, range(4)), alone, strict=True):
                # A GPU adds in any order, so only a processor's sums are the same bit for bit.
                assert (together - one).norm() <= (0 if device == "cpu" else 0.01) * one.norm()
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("device", DEVICES)
def test_engine_with_room_for_the_largest_client_captures_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, original = [], GraphedEngine._captured_step

    def captured_step(engine: GraphedEngine, step: Any) -> Any:
        captured.append(engine)
        return original(engine, step)

    monkeypatch.setattr(GraphedEngine, "_captured_step", captured_step)
    model = with_batchnorm(10, (8, 8, 1)).to(device)
    recipe, normalise = LocalTrainingConfig(2, 16, 0.05), Normaliser((0.3,), (0.4,), device)
    start, ends = read_state(model), []
    for most in (0, 90):
        captured.clear()
        engine = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device, most_samples=most)
        for samples in (20, 50, 90):
            _, end, _ = engine.train(*start, *data(samples, device), np.random.default_rng(samples))
        assert len(captured) == (2 if most else 6)  # the steps for full and short batches
        ends.append(end)
    for key in start[0]:
        torch.testing.assert_close(ends[0][key], ends[1][key], rtol=0 if device == "cpu" else 1e-4, atol=1e-5)


def test_average_of_tensors_keeps_the_order_of_the_model() -> None:
    states = [{"n": torch.tensor(number), "w": torch.ones(2), "m": torch.tensor(number)} for number in (2, 5)]
    average = weighted_average(states, [1, 1])
    assert list(average) == ["n", "w", "m"] and int(average["n"]) == int(average["m"]) == 4


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


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2**15,), (7, 2**14 + 1)])
def test_blockwise_average_equals_whole_arrays_bitwise(kind: type[np.generic], shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    states = [{"w": (100 * rng.normal(size=shape)).astype(kind)} for _ in range(10)]
    weights = [float(n) for n in rng.integers(1, 900, 10)]
    parts = [state["w"].astype(np.float64) if kind is np.int64 else state["w"] for state in states]
    expected = parts[0] * (weights[0] / sum(weights))
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        expected = expected + part * (weight / sum(weights))
    expected = np.rint(expected).astype(kind) if kind is np.int64 else expected
    average = weighted_average(states, weights)["w"]
    assert isinstance(average, np.ndarray) and (average.dtype, average.shape) == (kind, shape)
    assert average.tobytes() == expected.tobytes()
    if shape == (7, 2**14 + 1):  # also for arrays with another memory layout
        turned = [{"w": np.asfortranarray(state["w"])} for state in states]
        assert np.array_equal(weighted_average(turned, weights)["w"], average)


def test_engine_pool_lends_an_engine_to_one_client_at_a_time(tmp_path: Path) -> None:
    config, pool = small(tmp_path, policy="none", device="cpu"), EnginePool()
    objective = Objective()

    def borrow(config: RunConfig = config) -> AbstractContextManager[Engine]:
        return pool.borrow(config, "cpu", objective)

    with borrow() as first:
        with borrow() as second, borrow() as third:
            assert len({id(engine) for engine in (first, second, third)}) == 3
        with borrow() as again:
            assert again is second
    with borrow() as engine:
        assert engine is first
        with pytest.raises(ZeroDivisionError), borrow():
            raise ZeroDivisionError
        with borrow() as again:
            assert again is second, "a failure lost the engine"
    with borrow(config.with_changes(learning_rate=0.5)) as other:
        assert other not in (first, second)
