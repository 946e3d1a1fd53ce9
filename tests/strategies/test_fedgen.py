"""FedGen: losses by hand and by finite differences, server steps against plain torch, zero weights equal FedAvg."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from requires_gpu import DEVICES
from runners import finish, quick, small, weights
from test_fedmix import difference
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.strategies.fedgen import FedGen, FedGenClient, FedGenObjective, label_counts, term_weight
from fedeas_flwr.strategies.fedgen_generator import (
    NOISE,
    TRAINED,
    GeneratorState,
    Heads,
    diversity_loss,
    ensemble_loss,
    generate,
    generator_loss,
    new_generator,
    train_generator,
)
from fedeas_flwr.strategies.interface import ClientRound
from fedeas_flwr.strategies.records import ARRAYS, METRICS, to_arrays, to_record
from fedeas_flwr.strategies.registry import build_strategy
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser, SmallCNN
from fedeas_flwr.training.objective import Batch

FEDGEN: dict[str, Any] = {"strategy": "fedgen", "disclose_label_counts": True, "policy": "none"}


def test_label_weights_are_per_label() -> None:
    # w_A = (.75, .25), w_B = (.25, .75), y = (0, 1): weights that ignore labels would give 1.75.
    heads = Heads(torch.zeros(2, 2, 1), torch.zeros(2, 2), torch.tensor([[3.0, 1.0], [1.0, 3.0]]))
    found = heads.label_weights(torch.tensor([0, 1]))
    assert found.tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert ensemble_loss(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), found).item() == 1.375
    # The second client does not take part: only the first client's counts matter.
    alone = Heads(heads.weight[:1], heads.bias[:1], heads.counts[:1])
    assert alone.label_weights(torch.tensor([0, 1])).tolist() == [[1.0, 1.0]]


def test_diversity_loss_by_hand() -> None:
    noise, made = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert diversity_loss(noise, made).item() == pytest.approx(math.exp(-1))


def test_generator_size_is_the_papers_and_weights_are_seeded() -> None:
    made = new_generator(512, 10, seed=1)
    assert sum(made[name].numel() for name in TRAINED) == 167_680
    again, other = new_generator(512, 10, seed=1), new_generator(512, 10, seed=2)
    assert torch.equal(made["hidden.weight"], again["hidden.weight"])
    assert not torch.equal(made["hidden.weight"], other["hidden.weight"])


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in tensors.items()}


def test_generator_gradients_match_finite_differences() -> None:
    rng = np.random.default_rng(0)
    generator = doubled(new_generator(5, 3, seed=1))
    heads = Heads(
        *(torch.from_numpy(rng.normal(size=shape)) for shape in ((2, 3, 5), (2, 3))),
        torch.tensor([[3.0, 0, 1], [1, 2, 0]]),
    )
    noise, labels = torch.from_numpy(rng.normal(size=(6, NOISE))), torch.from_numpy(rng.integers(0, 3, 6))

    def loss() -> torch.Tensor:
        return generator_loss(generator, heads, noise, labels)

    parameters = [generator[name].requires_grad_() for name in TRAINED]
    gradients = torch.autograd.grad(loss(), parameters)
    for weight, gradient in zip(parameters, gradients, strict=True):
        for at in range(0, weight.numel(), max(1, weight.numel() // 7)):
            assert gradient.flatten()[at].item() == pytest.approx(difference(loss, weight, at), rel=1e-5, abs=1e-8)


def torch_generator(generator: dict[str, torch.Tensor]) -> nn.Sequential:
    """Return the same generator as torch layers."""
    classes, features = generator["hidden.weight"].shape[1] - NOISE, len(generator["features.bias"])
    net = nn.Sequential(nn.Linear(NOISE + classes, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, features))
    with torch.no_grad():
        for parameter, name in zip(net.parameters(), TRAINED, strict=True):
            parameter.copy_(generator[name])
    return net


def test_two_server_rounds_match_torch_adam() -> None:
    """Client 0 trains in round 1, both clients in round 2; compare with torch's layers, optimiser and schedule."""
    config = small(
        Path("/nowhere"), **FEDGEN, fedgen_steps=4, fedgen_batch=3, batch_size=6, clients=2, participation=1.0
    )
    strategy = build_strategy(config)
    assert isinstance(strategy, FedGen)
    counts = {0: np.array([5, 1, 0, 0, 0, 0, 0, 0, 0, 2]), 1: np.array([5, 0, 7, 0, 0, 0, 0, 0, 0, 0])}
    strategy.receive_disclosures({client: {"counts": row} for client, row in counts.items()})
    rng = np.random.default_rng(0)
    replies = {
        c: {"fc.weight": rng.normal(size=(10, 512)).astype(np.float32), "fc.bias": np.full(10, c, np.float32)}
        for c in (0, 1)
    }

    net = torch_generator(new_generator(512, 10, config.seed)).train()
    adam = torch.optim.Adam(net.parameters(), lr=3e-4, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.98)
    for number, chosen in ((1, [0]), (2, [0, 1])):
        averaged = aggregate(strategy, number, {c: replies[c] for c in chosen})
        draws = stream(config.seed, "fedgen server", number)
        held = np.flatnonzero(sum(counts[c] for c in chosen))
        for _ in range(4):
            labels = draws.choice(held, 6)
            noise = draws.standard_normal((6, NOISE), dtype=np.float32)
            made = net(torch.cat([torch.from_numpy(noise), torch.eye(10)[labels]], 1))
            loss = diversity_loss(torch.from_numpy(noise), made)
            for c in chosen:
                each = F.cross_entropy(
                    F.linear(made, *map(torch.from_numpy, replies[c].values())),
                    torch.from_numpy(labels),
                    reduction="none",
                )
                share = [counts[c][y] / sum(counts[j][y] for j in chosen) for y in labels]
                loss = loss + (torch.tensor(share, dtype=torch.float32) * each).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        schedule.step()
        assert averaged["fc.bias"].tolist() == [0.0 if number == 1 else 0.25] * 10  # N = (3, 1)
    found = strategy.state()
    assert found.numbers == {"steps": 8}
    for parameter, name in zip(net.parameters(), TRAINED, strict=True):
        # BatchNorm cancels the hidden bias: its gradient is rounding error, which Adam scales up to a full step.
        close = 8 * 3e-4 if name == "hidden.bias" else 1e-6
        torch.testing.assert_close(found.arrays[f"weights/{name}"], parameter.detach(), rtol=1e-5, atol=close)
    torch.testing.assert_close(found.arrays["weights/norm.var"], net[1].running_var)
    net.eval()
    noise, labels = torch.randn(4, NOISE), torch.tensor([0, 3, 9, 1])
    generator = {name.removeprefix("weights/"): v for name, v in found.arrays.items() if name.startswith("weights/")}
    torch.testing.assert_close(
        generate(generator, noise, labels), net(torch.cat([noise, torch.eye(10)[labels]], 1)), rtol=1e-4, atol=1e-5
    )


def aggregate(strategy: FedGen, number: int, replies: dict[int, dict[str, Any]]) -> dict[str, Any]:
    grid = InlineGrid(ClientApp(), 2, {})
    model = to_record(replies[0])
    out = {m.metadata.dst_node_id - 1: m for m in strategy.configure_train(number, model, ConfigRecord(), grid)}
    taken = []
    for client, arrays in replies.items():
        report = messages.TrainReport(client, (3, 1)[client], 0.5, 1, 0, 0, 0.0, 0.0)
        reply = messages.train_reply(out[client], report, arrays, {}, {})
        messages.read_train_reply(reply, client, replies[0], {}, {})
        taken.append(reply)
    arrays, _ = strategy.aggregate_train(number, taken)
    assert arrays is not None
    return to_arrays(arrays)


def test_head_without_bias_has_a_bias_of_zeros() -> None:
    strategy, weight = FedGen(quick(Path("/nowhere"), **FEDGEN), 4), np.ones((10, 4), np.float32)
    strategy.receive_disclosures({0: {"counts": np.arange(10)}})
    content = RecordDict({ARRAYS: to_record({"fc.weight": weight}), METRICS: MetricRecord({"client-id": 0})})
    heads = strategy._heads([Message(content, 1, "train")])
    assert heads.bias.tolist() == [[0.0] * 10] and heads.counts.tolist() == [[float(n) for n in range(10)]]


def test_generator_training_does_not_modify_its_input() -> None:
    start = GeneratorState.untrained(new_generator(4, 2, seed=1))
    before = copy.deepcopy(start)
    heads = Heads(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.tensor([[3.0, 0.0]]))  # no client holds label 1
    after = train_generator(start, heads, 3, 4, 0.1, np.random.default_rng(0))
    for old, now in ((before.weights, start.weights), (before.first, start.first), (before.second, start.second)):
        assert all(torch.equal(old[name], now[name]) for name in old)
    assert not torch.equal(after.weights["features.bias"], start.weights["features.bias"])
    assert all(value.isfinite().all() for value in after.weights.values())
    nobody = Heads(heads.weight, heads.bias, torch.zeros(1, 2))
    assert train_generator(start, nobody, 3, 4, 0.1, np.random.default_rng(0)) is start


class IdentityFeatures(nn.Module):
    """A network with logits (x, 0), whose features are the image itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 2, bias=False)
        self.fc.weight.data = torch.tensor([[1.0], [0.0]])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(images.flatten(1))


def test_client_loss_terms_by_hand() -> None:
    # G = ln 3 for any input: softmax (¾, ¼). x = 0: softmax (½, ½). Each label is generated once.
    generator = new_generator(1, 2, seed=1)
    generator["features.weight"].zero_(), generator["features.bias"].fill_(math.log(3))
    given = {
        **{f"generator/{name}": value for name, value in generator.items()},
        "noise": torch.randn(5, NOISE),
        "asked noise": torch.randn(2, NOISE),
        "asked labels": torch.tensor([0, 1]),
        "alpha": torch.tensor(4.0),
        "beta": torch.tensor(3.0),
    }
    config = quick(Path("/nowhere"), **FEDGEN, fedgen_batch=2, batch_size=8)
    model, batch = IdentityFeatures(), Batch(torch.zeros(3, 1, 1, 1), torch.tensor([0, 1, 0]), given, torch.mean)
    loss = FedGenObjective(config).loss(model, batch)
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    answered = (math.log(4 / 3) + math.log(4)) / 2
    assert loss.item() == pytest.approx(math.log(2) + 3 * divergence + 4 * (2 / 8) * answered, rel=1e-6)
    # Only the generated features change the head: x is 0, and the teacher has no gradient.
    (slope,) = torch.autograd.grad(loss, [model.fc.weight])
    assert slope.flatten().tolist() == pytest.approx([0.25 * math.log(3), -0.25 * math.log(3)], rel=1e-5)


def make_inputs(samples: int, rng: np.random.Generator, features: int, classes: int) -> dict[str, torch.Tensor]:
    generator = {f"generator/{k}": v for k, v in doubled(new_generator(features, classes, seed=3)).items()}
    return {
        **generator,
        "noise": torch.from_numpy(rng.normal(size=(samples, NOISE))),
        "asked noise": torch.from_numpy(rng.normal(size=(4, NOISE))),
        "asked labels": torch.from_numpy(rng.integers(0, classes, 4)),
        "alpha": torch.tensor(2.0, dtype=torch.float64),
        "beta": torch.tensor(3.0, dtype=torch.float64),
    }


def test_client_gradients_match_finite_differences() -> None:
    torch.manual_seed(0)
    rng, model = np.random.default_rng(0), SmallCNN(3, (2, 2, 1)).double()
    batch = Batch(
        torch.from_numpy(rng.normal(size=(5, 1, 2, 2))),
        torch.from_numpy(rng.integers(0, 3, 5)),
        make_inputs(5, rng, 32, 3),
        torch.mean,
    )
    objective = FedGenObjective(quick(Path("/nowhere"), **FEDGEN, fedgen_batch=4))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective.loss(model, batch), parameters)
    teacher = copy.deepcopy(model.fc)  # it has no gradient, so finite differences must not change it

    def loss() -> torch.Tensor:
        logits, g = model(batch.images), batch.given
        generator = {k.removeprefix("generator/"): v for k, v in g.items() if k.startswith("generator/")}
        wanted = F.softmax(teacher(generate(generator, g["noise"], batch.labels)), 1)
        divergence = (wanted * (wanted.log() - F.log_softmax(logits, 1))).sum(1).mean()
        answered = F.cross_entropy(
            model.fc(generate(generator, g["asked noise"], g["asked labels"])), g["asked labels"]
        )
        return F.cross_entropy(logits, batch.labels) + 3 * divergence + 2 * (4 / 32) * answered

    assert loss().item() == pytest.approx(objective.loss(model, batch).item(), rel=1e-12)
    for weight, gradient in zip(parameters, gradients, strict=True):
        for at in range(0, weight.numel(), max(1, weight.numel() // 7)):
            assert gradient.flatten()[at].item() == pytest.approx(difference(loss, weight, at), rel=1e-5, abs=1e-8)


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(images))


@pytest.mark.parametrize("samples", [64, 70, 7])  # last batch of 0 and of 6; fewer than one batch
@pytest.mark.parametrize("device", DEVICES)
def test_both_engines_take_the_same_steps(samples: int, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    config = quick(Path("/nowhere"), **FEDGEN)
    model, rng, part = WithBatchNorm().to(device), np.random.default_rng(0), FedGenClient(config)
    start, recipe = read_state(model), LocalTrainingConfig(epochs=2, batch_size=32, learning_rate=0.01)
    images = torch.from_numpy(rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, 10, samples)).to(device)
    extra = {f"generator/{name}": value for name, value in new_generator(256, 10, seed=1).items()}
    normalise = Normaliser((0.3,), (0.4,), device)
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device, part.objective)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device, part.objective)
    for number in (1, 2):  # a round without the terms and one with them use the same buffers
        task = ClientRound(
            config, number, 0, device, {}, {}, {**extra, "labels": np.array([0, 4])}, {}, labels, recipe.steps(samples)
        )
        inputs = part.prepare(task)
        assert set(inputs.tables["asked labels"].unique().tolist()) == {0, 4}
        one, *first = eager.train(*start, images, labels, np.random.default_rng(3), inputs)
        two, *second = graphed.train(*start, images, labels, np.random.default_rng(3), inputs)
        assert one.loss == pytest.approx(two.loss, rel=1e-4)
        for mine, theirs in zip(first, second, strict=True):
            for key in mine:
                torch.testing.assert_close(
                    mine[key], theirs[key], rtol=5e-4, atol=5e-5, msg=lambda m, k=key: f"{k}: {m}"
                )


def test_term_weight_starts_in_round_2_and_decays_to_its_floor() -> None:
    assert [term_weight(10.0, number) for number in (1, 2, 3)] == [0.0, 9.8, pytest.approx(9.604)]
    assert term_weight(10.0, 1000) == 1e-4
    assert term_weight(0.0, 1000) == 0.0


def test_fedgen_with_zero_weights_is_fedavg_bitwise(tmp_path: Path) -> None:
    fedavg = finish(quick(tmp_path / "fedavg", policy="none"))
    off = finish(quick(tmp_path / "off", **FEDGEN, fedgen_alpha=0.0, fedgen_beta=0.0))
    assert weights(off) == weights(fedavg)
    # In the first round the generator is untrained and not used.
    first = finish(quick(tmp_path / "first", **FEDGEN, rounds=1))
    assert weights(first) == weights(finish(quick(tmp_path / "one", policy="none", rounds=1)))
    for terms in ({}, {"fedgen_alpha": 0.0}, {"fedgen_beta": 0.0}):
        assert weights(finish(quick(tmp_path / f"on{len(terms)}{terms}", **FEDGEN, **terms))) != weights(fedavg)


def test_disclosed_counts_are_real_and_noise_is_integer_laplace(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", **FEDGEN, rounds=1))
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert np.array_equal(checkpoint.strategy.arrays["counts"], planned_counts(run.config()))
    labels, pixels = np.repeat(np.arange(10), 5000), np.zeros((0, 8, 8, 1), np.uint8)
    noisy = quick(tmp_path / "noisy", **FEDGEN, fedgen_count_noise=10.0)
    drawn = np.stack([label_counts(noisy, pixels, labels)["counts"] for _ in range(400)]) - 5000
    assert drawn.dtype == np.int64
    assert abs(drawn.mean()) < 1  # 4,000 draws with a standard deviation of 14
    assert np.abs(drawn).mean() == pytest.approx(10, rel=0.1)  # Laplace: the mean absolute deviation is its scale
    few = np.stack([label_counts(noisy, pixels, labels[:1])["counts"] for _ in range(20)])
    assert few.min() == 0  # never negative


def test_fedgen_rejects_model_whose_fc_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    network = IdentityFeatures()
    monkeypatch.setattr("fedeas_flwr.strategies.fedgen.build_network", lambda config: network)
    config = quick(Path("/nowhere"), **FEDGEN)
    assert isinstance(build_strategy(config), FedGen)
    network.requires_grad_(False)
    with pytest.raises(ConfigError, match="needs a network that ends in a trained Linear named fc"):
        build_strategy(config)


def test_fedgen_rejects_model_without_fc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    with pytest.raises(ConfigError, match=r"users_models:with_batchnorm.*named fc"):
        build_strategy(quick(Path("/nowhere"), **FEDGEN, model="users_models:with_batchnorm"))
