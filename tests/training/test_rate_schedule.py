"""The learning-rate schedule: rates per round as torch's schedulers, and the same weights as rates set by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import finish, quick, run_in_process, weights
from torch.optim import lr_scheduler as torchs
from users_models import with_batchnorm

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import parse_config
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.training.build import common_inputs
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LEARNING_RATE, LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import NO_INPUTS, Inputs


@pytest.mark.parametrize(
    ("schedule", "scheduler", "arguments"),
    [
        ("constant", torchs.ConstantLR, {"factor": 1.0}),
        ("cosine", torchs.CosineAnnealingLR, {"T_max": 30}),
        ("exponential 0.9", torchs.ExponentialLR, {"gamma": 0.9}),
        ("step 0.1 10 20 40", torchs.MultiStepLR, {"gamma": 0.1, "milestones": [10, 20, 40]}),
    ],
)
def test_rates_equal_those_of_torchs_schedulers(schedule: str, scheduler: Any, arguments: dict[str, Any]) -> None:
    config = parse_config({"rounds": 30, "learning-rate": 0.2, "learning-rate-schedule": schedule})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    theirs = scheduler(optimizer, **arguments)
    assert config.learning_rate_in(1) == 0.2
    for number in range(1, 31):
        assert config.learning_rate_in(number) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_rates_by_hand() -> None:
    rates = [
        parse_config({"rounds": 4, "learning-rate": 1.0, "learning-rate-schedule": schedule}).learning_rate_in
        for schedule in ("cosine", "exponential 0.5", "step 0.5 1 3")
    ]
    found = [[rate(number) for number in (1, 2, 3, 4)] for rate in rates]
    half = 0.5**0.5
    assert found[0] == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2])
    assert found[1:] == [[1, 0.5, 0.25, 0.125], [1, 0.5, 0.5, 0.25]]


@pytest.mark.parametrize(
    "schedule",
    [
        *("", "linear", "cosine 10", "exponential", "exponential x", "exponential 0", "exponential 1.1"),
        *("exponential nan", "exponential 0.9 3", "step 0.1", "step 0.1 x", "step 0.1 2.5", "step 0.1 0"),
        *("step 0.1 9 3", "step 0.1 3 3"),
    ],
)
def test_bad_schedule_is_one_line(schedule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"learning-rate-schedule": schedule})
    line = f"learning-rate-schedule = {schedule!r}: must be constant, cosine, 'exponential FACTOR', or 'step FACTOR"
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)
    assert "did you mean 'exponential'" not in str(refused.value)


def test_vanishing_rate_is_one_line() -> None:
    keys = {"learning-rate-schedule": "exponential 0.01", "learning-rate": 1.0}
    assert parse_config({**keys, "rounds": 15}).learning_rate_in(15) == pytest.approx(1e-28)
    with pytest.raises(ConfigError, match="must stay at or above 1e-30, but would be 1e-38 in round 20"):
        parse_config({**keys, "rounds": 20})


def test_only_a_schedule_adds_an_input() -> None:
    labels, folder = torch.zeros(5, dtype=torch.long), Path("/nowhere")
    assert common_inputs(quick(folder), 10, labels, 2, 0) == NO_INPUTS
    inputs = common_inputs(quick(folder, learning_rate_schedule="step 0.5 1"), 10, labels, 2, 0)
    assert {name: float(value) for name, value in inputs.constants.items()} == {LEARNING_RATE: pytest.approx(0.025)}


@pytest.mark.parametrize(
    "keys", [{"momentum": 0.9, "weight_decay": 0.01}, {"strategy": "scaffold"}, {"strategy": "qfedavg"}], ids=str
)
def test_scheduled_run_equals_rates_set_by_hand(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"policy": "none", "rounds": 2, **keys}
    scheduled = finish(quick(tmp_path / "scheduled", **keys, learning_rate_schedule="step 0.5 1"))
    finish(quick(tmp_path / "hand", **{**keys, "rounds": 1}))
    monkeypatch.setattr(RunDirectory, "_check_same", lambda *_: None)  # it would reject the other learning rate
    by_hand = finish(quick(tmp_path / "hand", **keys, learning_rate=0.025, resume=True))
    assert weights(scheduled) == weights(by_hand)
    assert weights(scheduled) != weights(finish(quick(tmp_path / "constant", **keys)))


def test_scheduled_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    keys = {"policy": "none", "strategy": "scaffold", "learning_rate_schedule": "exponential 0.5"}
    whole = finish(quick(tmp_path / "whole", **keys))
    finish(quick(tmp_path / "parts", **keys, rounds=1))
    assert weights(whole) == weights(finish(quick(tmp_path / "parts", **keys, resume=True)))


def test_cosine_run_keeps_its_rounds_on_resume(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "run", policy="none", rounds=1, learning_rate_schedule="cosine"))
    done = run_in_process("resume", str(run.path), "rounds=2")
    line = f"error: rounds = 2: must be 1, as in the run to resume in {run.path}; its learning-rate-schedule = 'cosine'"
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(line)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_engines_follow_the_schedule(precision: str, momentum: float, decay: float, device: str) -> None:
    """One engine trains with three rates: a captured graph reads the rate of each call."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model, rng = with_batchnorm(10, (8, 8, 1)).to(device), np.random.default_rng(0)
    images = torch.tensor(rng.integers(0, 256, (70, 8, 8, 1), dtype=np.uint8), device=device)
    labels = torch.tensor(rng.integers(0, 10, 70), device=device)
    start, normalise = read_state(model), Normaliser((0.3,), (0.4,), device)

    def engines(rate: float) -> list[Any]:
        recipe = LocalTrainingConfig(2, 32, rate, momentum, decay)
        return [
            EagerEngine(copy.deepcopy(model), recipe, normalise, device, precision=precision),
            GraphedEngine(copy.deepcopy(model), recipe, normalise, precision, device),
        ]

    def train(engine: Any, inputs: Inputs = NO_INPUTS) -> torch.Tensor:
        _, trained, _ = engine.train(*start, images, labels, np.random.default_rng(1), inputs)
        return torch.cat([(trained[key] - start[0][key]).flatten() for key in trained])

    scheduled = engines(1.0)
    for rate in (0.05, 0.005, 0.02):
        inputs = Inputs({LEARNING_RATE: torch.tensor(rate, device=device)})
        (eager, graphed), (fixed, fixed_graph) = ([train(e, inputs) for e in scheduled], map(train, engines(rate)))
        if device == "cpu":  # cuDNN's sums differ from call to call
            assert torch.equal(eager, fixed), "the eager engine's step depends on where its rate is from"
        apart = [float((other - eager).norm() / eager.norm()) for other in (fixed, graphed, fixed_graph)]
        assert max(apart) < (1e-3 if precision == "fp32" else 0.03)
