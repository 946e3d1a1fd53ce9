"""MOON: loss term and gradients by hand, references that do not change the model, and the previous model."""

from __future__ import annotations

import copy
import io
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lossy import federation, lossy_app
from rich.console import Console
from runners import client_state, finish, pass_models_by_reference, quick, weights
from users_models import with_features

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.strategies.interface import ClientAlgorithmResult, ClientRound
from fedeas_flwr.strategies.moon import (
    PREVIOUS,
    RECEIVED,
    ContrastiveObjective,
    MoonClient,
    build_moon,
    contrastive_losses,
    reference_features,
)
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, State, read_state
from fedeas_flwr.training.gpu.batchnorm import masked_batchnorm
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser, split_state
from fedeas_flwr.training.objective import CROSS_ENTROPY, Batch, Inputs

# ----------------------------------------------------------------------------------------------- the term


@pytest.mark.parametrize(
    ("z", "loss", "gradient"),
    [((1.0, 0.0), 0.126928, (0.0, 0.238406)), ((3.0, 4.0), 0.913015, (-0.268212, 0.201159))],
)
def test_contrastive_loss_and_gradient_by_hand(z: tuple[float, ...], loss: float, gradient: tuple[float, ...]) -> None:
    features = torch.tensor([z], requires_grad=True)
    found = contrastive_losses(features, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 0.5)
    assert found.item() == pytest.approx(loss, abs=1e-6)
    (slope,) = torch.autograd.grad(found.sum(), features)
    assert slope[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_equal_references_give_ln_2_and_zero_gradient() -> None:
    torch.manual_seed(0)
    features, reference = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    found = contrastive_losses(features, reference, reference.clone(), 0.5)
    assert found.tolist() == pytest.approx([math.log(2)] * 5)
    (slope,) = torch.autograd.grad(found.sum(), features)
    assert not slope.any()


def test_zero_features_give_no_nan() -> None:
    features = torch.zeros(1, 3, requires_grad=True)  # as after a ReLU with no positive input
    found = contrastive_losses(features, torch.ones(1, 3), torch.zeros(1, 3), 0.5)
    (slope,) = torch.autograd.grad(found.sum(), features)
    assert torch.isfinite(found).all()
    assert torch.isfinite(slope).all()


# --------------------------------------------------------------------------------------------- the models


def models(number: int) -> list[torch.nn.Module]:
    """Return networks whose BatchNorm statistics are not the initial ones."""
    made = []
    for seed in range(number):
        torch.manual_seed(seed)
        model = with_features(10, (8, 8, 1))
        model(3 * torch.randn(50, 1, 8, 8) + seed)
        made.append(model)
    return made


def given(received: torch.nn.Module, previous: torch.nn.Module) -> Inputs:
    one, two = ({**a, **b} for a, b in (read_state(received), read_state(previous)))
    return Inputs({**{RECEIVED + k: v for k, v in one.items()}, **{PREVIOUS + k: v for k, v in two.items()}})


def test_reference_features_leave_the_trained_model_unchanged() -> None:
    model, other = models(2)
    before = copy.deepcopy(model.state_dict())
    images = torch.randn(6, 1, 8, 8)
    references = {RECEIVED + key: value for key, value in other.state_dict(keep_vars=True).items()}
    batch = Batch(images, torch.zeros(6, dtype=torch.long), references, torch.mean)
    with masked_batchnorm(model, torch.tensor([1.0, 1, 1, 1, 0, 0])):  # as in a padded short batch
        found = reference_features(model, batch, RECEIVED)
    assert torch.equal(found, other.eval().body(images))  # type: ignore[operator]
    assert not found.requires_grad
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_updates_batchnorm_statistics_once() -> None:
    model, other, third = models(3)
    plain = copy.deepcopy(model)
    batch = Batch(torch.randn(6, 1, 8, 8), torch.arange(6), given(other, third).constants, torch.mean)
    ContrastiveObjective(5.0, 0.5).loss(model, batch)
    CROSS_ENTROPY.loss(plain, batch)
    for (key, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), key


@pytest.mark.parametrize("samples", [40, 64, 70, 7])
def test_both_engines_take_the_same_steps(samples: int) -> None:
    model, previous, other_previous = models(3)
    recipe, normalise = (
        LocalTrainingConfig(epochs=2, batch_size=32, learning_rate=0.05),
        Normaliser((0.3,), (0.4,), "cpu"),
    )
    objective = ContrastiveObjective(5.0, 0.5)
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, "cpu", objective)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", "cpu", objective)
    plain = EagerEngine(copy.deepcopy(model), recipe, normalise, "cpu")
    rng = np.random.default_rng(samples)
    images = torch.tensor(rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8))
    labels, start = torch.tensor(rng.integers(0, 10, samples)), read_state(model)
    for seed, last in ((0, previous), (1, other_previous)):  # no state of the first call may remain in the second
        inputs = given(model, last)
        one, *first = eager.train(*start, images, labels, np.random.default_rng(seed), inputs)
        two, *second = graphed.train(*start, images, labels, np.random.default_rng(seed), inputs)
        _, *without = plain.train(*start, images, labels, np.random.default_rng(seed))
        assert one.loss == pytest.approx(two.loss, rel=1e-4)
        for mine, theirs in zip(first, second, strict=True):
            for key in mine:
                torch.testing.assert_close(
                    mine[key], theirs[key], rtol=2e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
                )
        assert any(not torch.allclose(first[0][key], without[0][key], atol=1e-3) for key in first[0])


# --------------------------------------------------------------------------------------------- the previous model


def test_previous_model_is_of_last_accepted_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    began: dict[int, dict[int, State]] = defaultdict(dict)
    ended: dict[int, dict[int, State]] = defaultdict(dict)
    original_prepare, original_finish = MoonClient.prepare, MoonClient.finish

    def noted_prepare(part: MoonClient, task: ClientRound) -> Inputs:
        inputs = original_prepare(part, task)
        began[task.client][task.number] = {
            key.removeprefix(PREVIOUS): value for key, value in inputs.constants.items() if key.startswith(PREVIOUS)
        }
        if not task.memory:  # in a client's first round it is the received model
            assert all(
                torch.equal(v, inputs.constants[RECEIVED + k]) for k, v in began[task.client][task.number].items()
            )
        return inputs

    def noted_finish(part: MoonClient, task: ClientRound, trainable: State, buffers: State) -> ClientAlgorithmResult:
        ended[task.client][task.number] = {**trainable, **buffers}
        return original_finish(part, task, trainable, buffers)

    monkeypatch.setattr(MoonClient, "prepare", noted_prepare)
    monkeypatch.setattr(MoonClient, "finish", noted_finish)
    config = quick(
        tmp_path, strategy="moon", policy="none", min_replies=0.1, rounds=7, model="users_models:with_features"
    )
    run = federation(config, lossy_app(lambda client, number: "lost" if number == 4 and client % 2 else ""))
    state, checked, refused, skipped = Checkpoint(0, *split_state(build_network(config))), 0, 0, 0
    for number in range(1, 8):
        accepted = state.accepted
        state, outcome = run.training.train_round(state)
        refused += len(outcome.failures)
        for client in run.training.sample(number):
            if client not in accepted:
                continue
            last, previous = ended[client][accepted[client]], began[client][number]
            assert all(np.array_equal(last[key], value.cpu().numpy()) for key, value in previous.items())
            assert last.keys() == previous.keys()
            checked, skipped = checked + 1, skipped + (accepted[client] < number - 1)
    assert checked > 4
    assert skipped > 0
    assert refused > 0


def test_first_round_equals_fedavg_and_later_ones_do_not(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"policy": "none", "participation": 1.0}
    moon = {"strategy": "moon", **keys}
    assert weights(finish(quick(tmp_path / "a", rounds=1, **moon))) == weights(
        finish(quick(tmp_path / "b", rounds=1, **keys))
    )
    assert weights(finish(quick(tmp_path / "a", rounds=2, resume=True, **moon))) != weights(
        finish(quick(tmp_path / "b", rounds=2, resume=True, **keys))
    )


# --------------------------------------------------------------------------------------------- whole runs


def test_moon_with_mu_zero_is_fedavg_bitwise_and_stores_nothing(tmp_path: Path) -> None:
    fedavg = finish(quick(tmp_path / "fedavg", policy="none"))
    zero = finish(quick(tmp_path / "zero", policy="none", strategy="moon", moon_mu=0.0))
    assert weights(zero) == weights(fedavg)
    states = [client_state(zero, int(path.parent.name), 2) for path in zero.path.glob("clients/*/state-000002.*")]
    assert states and not any(state.memory for state in states)


@pytest.mark.parametrize("policy", ["none", "fedeas"])
def test_resume_and_passing_by_reference_give_equal_weights(
    tmp_path: Path, digits_generator: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    keys: dict[str, Any] = {"strategy": "moon", "policy": policy, "beta": 1.0, "model": "users_models:with_features"}
    whole = finish(quick(tmp_path / "whole", rounds=4, **keys))
    finish(quick(tmp_path / "parts", rounds=2, **keys))
    assert weights(finish(quick(tmp_path / "parts", rounds=4, resume=True, **keys))) == weights(whole)
    assert (whole.summary()["total_generated"] > 0) == (policy == "fedeas")
    pass_models_by_reference(monkeypatch)
    finish(quick(tmp_path / "live", rounds=2, **keys))
    assert weights(finish(quick(tmp_path / "live", rounds=4, resume=True, **keys))) == weights(whole)


def test_moon_rejects_model_without_fc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    config = quick(tmp_path, strategy="moon", model="users_models:with_batchnorm")
    with pytest.raises(ConfigError, match="model = 'users_models:with_batchnorm': strategy = 'moon'") as refused:
        prepare(config, Console(file=io.StringIO()))
    assert "\n" not in str(refused.value)


def test_moon_rejects_batchnorm_without_running_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    config = quick(tmp_path, strategy="moon", policy="none", model="users_models:with_batch_statistics")
    with pytest.raises(ConfigError, match=r"model = '\S*with_batch_statistics': .* body\.1 must have track") as refused:
        prepare(config, Console(file=io.StringIO()))
    assert "\n" not in str(refused.value)
    build_moon(config.with_changes(model="users_models:with_group_norm"))
