"""FedMix: loss terms by hand, gradients by finite differences, λ = 0 equals FedAvg."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import finish, quick, weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from users_models import with_batchnorm

from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.strategies.averaging import weighted_average
from fedeas_flwr.strategies.fedmix import FedMixClient, FedMixObjective
from fedeas_flwr.strategies.interface import ClientRound
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.batchnorm import double_backward_batchnorm, masked_batchnorm
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import Batch, Inputs, mean_of_first

FEDMIX: dict[str, Any] = {"strategy": "fedmix", "disclose_mean_images": True, "policy": "none"}


class WeightTimesInput(nn.Module):
    """A network with logits (w x, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.w * images.flatten(1)
        return torch.cat([first, torch.zeros_like(first)], 1)


def make_batch(images: torch.Tensor, labels: torch.Tensor, means: torch.Tensor, proportions: torch.Tensor) -> Batch:
    given = {"means": means, "proportions": proportions, "other": torch.tensor(len(means) - 1)}
    return Batch(images, labels, given, torch.mean)


def by_hand(copies: int) -> Batch:
    # x = (4/3) ln 3, so u = ln 3; x̄ = 2, ȳ = (½, ½). The mean of the other client, which is not drawn, has no effect.
    images = torch.full((copies, 1, 1, 1), 4 / 3 * math.log(3), dtype=torch.float64)
    means = torch.tensor([99.0, 2.0], dtype=torch.float64).view(2, 1, 1, 1)
    proportions = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    return make_batch(images, torch.zeros(copies, dtype=torch.long), means, proportions)


@pytest.mark.parametrize("copies", [1, 2])
def test_loss_terms_and_gradient_by_hand(copies: int) -> None:
    # λ = ¼, w = 1, y = 0: softmax(ln 3, 0) = (¾, ¼).
    model, part = WeightTimesInput(), 0.25
    loss = FedMixObjective(part).loss(model, by_hand(copies))
    own = 0.75 * math.log(4 / 3)
    mixture = 0.25 * (0.5 * math.log(4 / 3) + 0.5 * math.log(4))
    taylor_term = -3 / 16 * 0.25 * 2
    assert (own, mixture, taylor_term) == (
        pytest.approx(0.215762, abs=5e-7),
        pytest.approx(0.209247, abs=5e-7),
        -0.09375,
    )
    assert loss.item() == pytest.approx(own + mixture + taylor_term, abs=1e-12)
    (slope,) = torch.autograd.grad(loss, [model.w])
    assert slope.item() == pytest.approx(-0.153830, abs=5e-7)


def slope_by_hand(w: float, x: float, part: float, mean: float) -> float:
    """Return dL/dw of the model above for y = 0, ȳ = (½, ½), with s = σ(−wu): CE = −ln(1 − s), ∂CE/∂u = −w s."""
    u = (1 - part) * x
    s = 1 / (1 + math.exp(w * u))
    own, mixture = -u * s, 0.5 * -u * s + 0.5 * u * (1 - s)
    return (1 - part) * own + part * mixture + part * (1 - part) * mean * (-s + w * u * s * (1 - s))


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_two_rounds_by_hand(kind: str) -> None:
    # Client 1 has x = 2 and gets mean 2, client 2 has x = 1 and gets mean −1; N = (3, 1), lr ½, one step; λ = ¼.
    assert slope_by_hand(1, 4 / 3 * math.log(3), 0.25, 2) == pytest.approx(-0.153830, abs=5e-7)
    data = {0: (2.0, 2.0, 3), 1: (1.0, -1.0, 1)}

    def local(client: int, w: float) -> float:
        x, mean, _ = data[client]
        recipe, normalise = LocalTrainingConfig(1, 2, 0.5), Normaliser((0.0,), (1 / x,), "cpu")
        model, objective = WeightTimesInput().float(), FedMixObjective(0.25)
        engine = (
            EagerEngine(model, recipe, normalise, "cpu", objective)
            if kind == "eager"
            else GraphedEngine(model, recipe, normalise, "fp32", "cpu", objective)
        )
        constants = {"means": torch.tensor([mean]).view(1, 1, 1, 1), "proportions": torch.tensor([[0.5, 0.5]])}
        images, labels = torch.full((2, 1, 1, 1), 255, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
        inputs = Inputs(constants, {"other": torch.zeros(1, dtype=torch.long)})
        _, trained, _ = engine.train({"w": np.float32(w)}, {}, images, labels, np.random.default_rng(0), inputs)
        return float(trained["w"])

    first = local(0, 1.0)  # client 2 does not take part
    assert first == pytest.approx(1 - 0.5 * slope_by_hand(1, 2, 0.25, 2), rel=1e-6)
    states: list[Any] = [{"w": np.float32(local(client, first))} for client in (0, 1)]
    ends = [first - 0.5 * slope_by_hand(first, x, 0.25, mean) for x, mean, _ in data.values()]
    assert float(weighted_average(states, [3, 1])["w"]) == pytest.approx((3 * ends[0] + ends[1]) / 4, rel=1e-6)


def random_batch(samples: int) -> Batch:
    rng = np.random.default_rng(samples)
    images = torch.from_numpy(rng.normal(size=(samples, 1, 4, 4)))
    means, proportions = torch.from_numpy(rng.normal(size=(3, 1, 4, 4))), torch.from_numpy(rng.dirichlet([1] * 3, 3))
    return make_batch(images, torch.from_numpy(rng.integers(0, 3, samples)), means, proportions)


def smooth_net() -> nn.Module:
    """Return a smooth float64 network with BatchNorm, for accurate finite differences."""
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


def difference(loss: Callable[[], torch.Tensor], weight: torch.Tensor, at: int) -> float:
    """Return the derivative of a loss by one weight, by central differences."""
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight.view(-1)[at] += step
        values.append(loss().item())
        with torch.no_grad():
            weight.view(-1)[at] -= step
    return (values[0] - values[1]) / 2e-5


def test_gradients_match_finite_differences() -> None:
    model, batch, objective = smooth_net(), random_batch(5), FedMixObjective(0.3)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective.loss(model, batch), parameters)
    assert len(parameters) == 6
    for weight, gradient in zip(parameters, gradients, strict=True):
        for at in range(0, weight.numel(), 3):
            found = difference(lambda: objective.loss(model, batch), weight, at)
            assert gradient.view(-1)[at].item() == pytest.approx(found, rel=1e-6, abs=1e-8)


def test_taylor_term_is_the_derivative_towards_the_mean() -> None:
    """It is the derivative of CE(u + t x̄) by t: the mean is mixed into all images of a batch, BatchNorm included."""
    model, batch, part = smooth_net(), random_batch(5), 0.3
    mean, cross_entropy = batch.given["means"][2], nn.CrossEntropyLoss()

    def plain(shift: float) -> float:
        return cross_entropy(model((1 - part) * batch.images + shift * mean), batch.labels).item()

    slope = (plain(1e-5) - plain(-1e-5)) / 2e-5
    logits = model((1 - part) * batch.images)
    soft = -(batch.given["proportions"][2] * logits.log_softmax(1)).sum(1).mean()
    expected = (1 - part) * plain(0) + part * soft.item() + part * (1 - part) * slope
    assert FedMixObjective(part).loss(model, batch).item() == pytest.approx(expected, rel=1e-9)


def test_padding_rows_do_not_change_gradients() -> None:
    model, short, objective = smooth_net(), random_batch(5), FedMixObjective(0.3)
    alone = torch.autograd.grad(objective.loss(model, short), list(model.parameters()))
    mask = (torch.arange(8) < 5).double()
    images = torch.cat([short.images, 50 * torch.randn(3, 1, 4, 4, dtype=torch.float64)])
    labels = torch.cat([short.labels, torch.zeros(3, dtype=torch.long)])
    padded = Batch(images, labels, short.given, partial(mean_of_first, mask.sum()))
    with masked_batchnorm(model, mask):
        loss = objective.loss(model, padded)
        found = torch.autograd.grad(loss, list(model.parameters()))
    for one, two in zip(alone, found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)  # the masked layer computes in float32


@pytest.mark.parametrize("samples", [64, 70, 7])  # last batch of 0 and of 6; fewer than one batch
@pytest.mark.parametrize("device", DEVICES)
def test_both_engines_take_the_same_steps(samples: int, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model, rng = with_batchnorm(10, (8, 8, 1)).to(device), np.random.default_rng(0)
    start, recipe = read_state(model), LocalTrainingConfig(epochs=2, batch_size=32, learning_rate=0.05, momentum=0.9)
    images = torch.from_numpy(rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, 10, samples)).to(device)
    inputs = Inputs(
        {
            "means": torch.randn(3, 1, 8, 8).to(device),
            "proportions": torch.softmax(torch.randn(3, 10), 1).to(device),
        },
        {"other": torch.from_numpy(rng.integers(0, 3, recipe.steps(samples))).to(device)},
    )
    normalise, objective = Normaliser((0.3,), (0.4,), device), FedMixObjective(0.2)
    assert objective.needs_double_backward, "kernels without double backward would be used"
    assert not FedMixObjective(0).needs_double_backward
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device, objective)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device, objective)
    one, *first = eager.train(*start, images, labels, np.random.default_rng(3), inputs)
    two, *second = graphed.train(*start, images, labels, np.random.default_rng(3), inputs)
    assert one.loss == pytest.approx(two.loss, rel=1e-4)
    for mine, theirs in zip(first, second, strict=True):
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=5e-4, atol=5e-5, msg=lambda m, k=key: f"{k}: {m}")


class OperationCounter(TorchDispatchMode):
    """Counts torch operations, views included; on a GPU most are one kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operation: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        self.number += 1
        return operation(*given, **(named or {}))


def test_full_batch_step_uses_double_backward_batchnorm() -> None:
    torch.manual_seed(0)
    blocks = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Softplus())]
    model = nn.Sequential(nn.Conv2d(1, 4, 3), *blocks, nn.Flatten(), nn.Linear(16, 3))
    recipe, normalise, objective = (
        LocalTrainingConfig(1, 8, 0.05),
        Normaliser((0.3,), (0.4,), "cpu"),
        FedMixObjective(0.2),
    )
    images, labels = torch.randint(0, 256, (8, 4, 4, 1), dtype=torch.uint8), torch.arange(8) % 3
    constants = {"means": torch.randn(2, 1, 4, 4), "proportions": torch.full((2, 3), 1 / 3)}
    inputs, states, numbers = Inputs(constants, {"other": torch.ones(1, dtype=torch.long)}), [], []
    for engine in (
        EagerEngine(copy.deepcopy(model), recipe, normalise, "cpu", objective),
        GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", "cpu", objective),
    ):
        for _ in range(2):  # the first time, an engine also looks at the network
            with OperationCounter() as counted:
                _, *state = engine.train(*read_state(model), images, labels, np.random.default_rng(3), inputs)
        states.append({**state[0], **state[1]})
        numbers.append(counted.number)
    assert numbers[1] < 0.6 * numbers[0]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (6, 3)])
def test_double_backward_batchnorm_matches_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3).double()
    nn.init.normal_(plain.weight)
    with torch.no_grad():
        plain.weight[1] = 0  # a channel with weight 0 has gradients, too
    ours = copy.deepcopy(plain)
    x, weights, towards = torch.randn(3, *shape, dtype=torch.float64)

    def found(layer: nn.Module) -> tuple[torch.Tensor, ...]:
        inputs = x.clone().requires_grad_()
        made = layer(inputs)
        (slopes,) = torch.autograd.grad((made * weights).sin().mean(), inputs, create_graph=True)
        loss = (slopes * towards).sum() + made.square().mean()
        return loss, *torch.autograd.grad(loss, [inputs, *layer.parameters()])

    expected = found(plain)
    with double_backward_batchnorm(ours):
        torch.testing.assert_close(found(ours), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    assert "forward" not in vars(ours)


def task(config: RunConfig, client: int, clients: list[int], steps: int = 200) -> ClientRound:
    extra = {
        "means": np.zeros((len(clients), 1, 8, 8), np.float32),
        "proportions": np.full((len(clients), 10), 0.1, np.float32),
        "clients": np.array(clients),
    }
    return ClientRound(config, 3, client, "cpu", {}, {}, extra, {}, torch.zeros(2), steps)


def test_client_draws_means_of_other_clients_reproducibly() -> None:
    config = quick(Path("/nowhere"), **FEDMIX)
    part = FedMixClient(config)
    drawn = part.prepare(task(config, 7, [2, 7, 9, 11])).tables["other"]
    assert set(drawn.tolist()) == {0, 2, 3}  # rows of all but client 7
    assert torch.equal(drawn, part.prepare(task(config, 7, [2, 7, 9, 11])).tables["other"])
    assert part.prepare(task(config, 7, [7])).tables["other"].tolist() == [0] * 200  # there is no other client
    first, second = (part.prepare(task(config, client, [2, 9])).tables["other"] for client in (3, 4))
    assert not torch.equal(first, second)  # each client has its own random numbers


def test_fedmix_with_lambda_zero_is_fedavg_bitwise(tmp_path: Path) -> None:
    fedavg = finish(quick(tmp_path / "fedavg", policy="none"))
    assert weights(finish(quick(tmp_path / "zero", **FEDMIX, fedmix_lambda=0.0))) == weights(fedavg)
    assert weights(finish(quick(tmp_path / "some", **FEDMIX))) != weights(fedavg)


def test_disclosed_means_are_of_all_real_normalised_images(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", **FEDMIX, rounds=1))
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    disclosed, data = checkpoint.strategy.arrays, federated_data(run.config(), 4)
    normalise = Normaliser(data.dataset.mean, data.dataset.std, "cpu")
    assert disclosed["clients"].tolist() == [0, 1, 2, 3]
    for client in range(4):
        images, labels = data.train(client)
        mean = normalise(torch.from_numpy(images)).mean(0).numpy()
        np.testing.assert_allclose(disclosed["means"][client], mean, atol=1e-5)
        np.testing.assert_allclose(
            disclosed["proportions"][client], np.bincount(labels, minlength=10) / len(labels), atol=1e-7
        )
