"""Losses against label skew: values by hand, identities, and the same steps in both engines."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import finish, quick, weights
from torch.nn import functional as F
from users_models import with_batchnorm

from fedeas_flwr.strategies.fedprox import ProximalObjective
from fedeas_flwr.training.build import common_inputs
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.losses import OFFSETS, WEIGHTS, class_weights, logit_offsets, loss_constants, sample_losses
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import CROSS_ENTROPY, Inputs, Objective

COUNTS = torch.tensor([6, 2, 0])  # N = 8, two classes held
LABELS = torch.tensor([0] * 6 + [1] * 2)


def gradient(given: dict[str, torch.Tensor], label: int) -> torch.Tensor:
    """Return the gradient of one sample's loss by its logits, all of which are 0."""
    logits = torch.zeros(1, 3, requires_grad=True)
    (found,) = torch.autograd.grad(sample_losses(logits, torch.tensor([label]), given).sum(), logits)
    return found[0]


def test_class_weights_by_hand() -> None:
    # 8 / (2 · 6), 8 / (2 · 2); the mean over the samples is (6 · 2/3 + 2 · 2) / 8 = 1.
    torch.testing.assert_close(class_weights(COUNTS), torch.tensor([2 / 3, 2.0, 1.0]))
    weights = class_weights(COUNTS)[LABELS]
    assert float(weights.mean()) == pytest.approx(1)
    assert float(weights[:6].sum()) == pytest.approx(float(weights[6:].sum()))  # both classes have equal weight
    given = {WEIGHTS: class_weights(COUNTS)}
    losses = sample_losses(torch.zeros(2, 3), torch.tensor([0, 1]), given)
    torch.testing.assert_close(losses, math.log(3) * torch.tensor([2 / 3, 2.0]))
    # softmax of zeros is 1/3 each: the plain gradient (−2/3, 1/3, 1/3), times the weight
    torch.testing.assert_close(gradient(given, 0), 2 / 3 * torch.tensor([-2 / 3, 1 / 3, 1 / 3]))
    torch.testing.assert_close(gradient(given, 1), 2 * torch.tensor([1 / 3, -2 / 3, 1 / 3]))


def test_logit_offsets_by_hand() -> None:
    # π = 6/8, 2/8 and, for the class that is absent, one sample's 1/8.
    expected = torch.tensor([math.log(6 / 8), math.log(2 / 8), math.log(1 / 8)])
    torch.testing.assert_close(logit_offsets(COUNTS, 1), expected)
    torch.testing.assert_close(logit_offsets(COUNTS, 2), 2 * expected)
    given = {OFFSETS: logit_offsets(COUNTS, 1)}
    # With all logits 0 the softmax is π over its sum, (6, 2, 1) / 9.
    losses = sample_losses(torch.zeros(2, 3), torch.tensor([0, 1]), given)
    torch.testing.assert_close(losses, torch.tensor([math.log(9 / 6), math.log(9 / 2)]))
    torch.testing.assert_close(gradient(given, 1), torch.tensor([6 / 9, 2 / 9 - 1, 1 / 9]))
    # The rare class is raised more than with plain cross-entropy, and the absent one lowered less, but lowered.
    plain, adjusted = gradient({}, 1), gradient(given, 1)
    assert adjusted[1] < plain[1]
    assert 0 < adjusted[2] < plain[2]


def test_equal_counts_and_tau_zero_equal_cross_entropy_bitwise() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 10), torch.randint(0, 10, (50,))
    plain = F.cross_entropy(logits, labels, reduction="none")
    for held in (torch.full((10,), 7), torch.tensor([7] * 9 + [0])):
        weighted = {WEIGHTS: class_weights(held)}
        assert torch.equal(sample_losses(logits, labels, weighted), plain)
    counts = torch.tensor([5, 0, 3, 900, 1, 0, 0, 2, 2, 40])
    assert torch.equal(sample_losses(logits, labels, {OFFSETS: logit_offsets(counts, 0.0)}), plain)
    assert torch.equal(sample_losses(logits, labels, {}), plain)
    assert loss_constants("cross-entropy", labels, 10, 1.0) == {}


def test_client_without_samples_gets_finite_constants() -> None:
    nothing = torch.zeros(3, dtype=torch.long)
    assert class_weights(nothing).tolist() == [1, 1, 1]
    assert logit_offsets(nothing, 1.0).isfinite().all()


@pytest.mark.parametrize("objective", [CROSS_ENTROPY, ProximalObjective(0.5)], ids=["fedavg", "fedprox"])
@pytest.mark.parametrize("loss", ["class-weighted", "logit-adjusted"])
@pytest.mark.parametrize("samples", [64, 70])  # a full last batch and a short one
@pytest.mark.parametrize("device", DEVICES)
def test_both_engines_take_the_same_steps(objective: Objective, loss: str, samples: int, device: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = with_batchnorm(10, (8, 8, 1)).to(device)
    start, recipe, normalise = (
        read_state(model),
        LocalTrainingConfig(2, 32, 0.05, 0.9),
        Normaliser((0.3,), (0.4,), device),
    )
    eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device, objective)
    graphed = GraphedEngine(copy.deepcopy(model), recipe, normalise, "fp32", device, objective)
    config = quick(Path("/nowhere"), loss=loss)
    received = Inputs({f"start/{name}": value.clone() for name, value in start[0].items()})
    for client in (0, 1):  # the second client's counts must replace the first's
        rng = np.random.default_rng(client)
        images = torch.from_numpy(rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8)).to(device)
        labels = torch.from_numpy(np.minimum(rng.geometric(0.4, samples) - 1, 9 - client)).to(device)
        inputs = received | common_inputs(config, 10, labels, 1, client)
        one, *first = eager.train(*start, images, labels, np.random.default_rng(7), inputs)
        two, *second = graphed.train(*start, images, labels, np.random.default_rng(7), inputs)
        plain = EagerEngine(copy.deepcopy(model), recipe, normalise, device, objective)
        other, *_ = plain.train(*start, images, labels, np.random.default_rng(7), received)
        assert one.loss == pytest.approx(two.loss, rel=1e-4)
        assert abs(one.loss - other.loss) > 1e-3
        for mine, theirs in zip(first, second, strict=True):
            for key in mine:
                torch.testing.assert_close(mine[key], theirs[key], rtol=2e-4, atol=2e-5)


LOSSES: list[dict[str, Any]] = [{"loss": "class-weighted"}, {"loss": "logit-adjusted"}]


@pytest.mark.parametrize("keys", LOSSES, ids=lambda k: k["loss"])
def test_run_with_other_loss_resumes_to_the_same_weights(tmp_path: Path, keys: dict[str, Any]) -> None:
    whole = finish(quick(tmp_path / "whole", policy="none", rounds=2, **keys))
    finish(quick(tmp_path / "parts", policy="none", rounds=1, **keys))
    resumed = finish(quick(tmp_path / "parts", policy="none", rounds=2, resume=True, **keys))
    assert weights(whole) == weights(resumed)
    assert weights(whole) != weights(finish(quick(tmp_path / "plain", policy="none", rounds=2)))
    assert whole.summary()["total_generated"] == 0


def test_tau_zero_equals_fedavg_bitwise(tmp_path: Path) -> None:
    plain = finish(quick(tmp_path / "plain", policy="none", rounds=2))
    zero = quick(tmp_path / "zero", policy="none", rounds=2, loss="logit-adjusted", logit_adjustment_tau=0.0)
    assert weights(finish(zero)) == weights(plain)
