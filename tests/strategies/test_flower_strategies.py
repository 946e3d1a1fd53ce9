"""Flower's strategies: each works with generated images and tensors, and resumes to bitwise equal weights."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import dp_adaptive_clipping, strategy_utils
from flwr.supercore import differential_privacy
from rich.console import Console
from runners import finish, pass_models_by_reference, quick, weights
from waiting import LONG

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import STRATEGIES, parse_config
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.strategies import flower
from fedeas_flwr.strategies.flower import STATEFUL_ATTRIBUTES, FlowerStrategyAdapter, seeded_flower_rng
from fedeas_flwr.strategies.records import to_arrays, to_record
from fedeas_flwr.strategies.registry import build_strategy

TINY = {"clients": 3, "participation": 1.0, "batch_size": 128, "policy": "none"}
"""Three clients with a few steps each; Krum and Bulyan need at least three."""
DISCLOSE_ALL = {"disclose-mean-images": True, "disclose-label-counts": True}
FLOWER_STRATEGIES = [
    name
    for name in STRATEGIES
    if isinstance(build_strategy(parse_config({"strategy": name, "clients": 6, **DISCLOSE_ALL})), FlowerStrategyAdapter)
]


def test_ten_strategies_are_flowers() -> None:
    assert len(FLOWER_STRATEGIES) == 10


LINEAR = {**TINY, "model": "users_models:with_dropout"}
"""The model that trains fastest; its dropout draws random numbers."""


@pytest.fixture(autouse=True)
def import_helper_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_resumed_run_equals_uninterrupted_bitwise(tmp_path: Path, name: str) -> None:
    whole = finish(quick(tmp_path / "whole", strategy=name, rounds=4, **LINEAR))
    finish(quick(tmp_path / "parts", strategy=name, rounds=2, **LINEAR))
    np.random.rand(7), random.random()  # the global random state must have no effect
    resumed = finish(quick(tmp_path / "parts", strategy=name, rounds=4, resume=True, **LINEAR))
    assert weights(whole) == weights(resumed)


@pytest.mark.parametrize("name", ["fedadam", "fedavgm"])
def test_resume_without_strategy_state_differs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = finish(quick(tmp_path / "whole", strategy=name, rounds=4, **LINEAR))
    finish(quick(tmp_path / "parts", strategy=name, rounds=2, **LINEAR))
    monkeypatch.setattr(flower, "STATEFUL_ATTRIBUTES", {})
    without_state = finish(quick(tmp_path / "parts", strategy=name, rounds=4, resume=True, **LINEAR))
    assert weights(whole) != weights(without_state)


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_every_strategy_works_with_generated_images(tmp_path: Path, digits_generator: Path, name: str) -> None:
    run = finish(quick(tmp_path / "r", strategy=name, rounds=2, **{**TINY, "policy": "fedeas", "beta": 1.0}))
    assert run.summary()["total_generated"] > 0
    assert len(run.rounds()) == 2


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_models_passed_as_tensors_give_same_weights(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**TINY, "strategy": name, "rounds": 2}
    keys["model"] = "users_models:with_batchnorm"  # it has statistics and an integer counter besides the weights
    sent = finish(quick(tmp_path / "bytes", **keys))
    pass_models_by_reference(monkeypatch)
    by_reference = finish(quick(tmp_path / "live", **keys))
    assert weights(sent) == weights(by_reference)
    model = by_reference.load_model()
    assert model["1.num_batches_tracked"].dtype == np.int64
    assert model["0.weight"].dtype == np.float32


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_attributes_changed_by_a_round_are_stateful(name: str) -> None:
    """Detect a Flower release that keeps new state between rounds, which a resume would lose."""
    strategy = build_strategy(parse_config({"strategy": name, "clients": 3, "participation": 1.0}))
    assert isinstance(strategy, FlowerStrategyAdapter)
    before = {key: repr(value) for key, value in vars(strategy.inner).items()}
    one_round(strategy, 1)
    changed = {key for key, value in vars(strategy.inner).items() if repr(value) != before.get(key)}
    # The stateful attributes, and what `configure_train` always overwrites.
    assert changed <= {*STATEFUL_ATTRIBUTES.get(type(strategy.inner), ()), "current_arrays"}
    assert changed >= set(STATEFUL_ATTRIBUTES.get(type(strategy.inner), ()))


def one_round(
    strategy: FlowerStrategyAdapter, number: int, updates: Sequence[float] = (0.1, 0.2, 0.3)
) -> dict[str, Any]:
    """Aggregate one round of clients that add known updates to a model of two arrays; return the new model."""
    grid = InlineGrid(ClientApp(), len(updates), {})
    start = {"w": np.full(3, number, np.float32), "b": np.zeros(2, np.float32)}
    out = strategy.configure_train(number, to_record(start), ConfigRecord(), grid)
    replies = []
    for message in out:
        client = message.metadata.dst_node_id - 1
        trained = {key: value + np.float32(updates[client]) for key, value in start.items()}
        report = messages.TrainReport(client, 10 * (client + 1), 0.5, 1, 0, 0, 0.0, 0.0)
        reply = messages.train_reply(message, report, trained, {}, {})
        messages.read_train_reply(reply, client, start, {}, {})
        replies.append(reply)
    arrays, _ = strategy.aggregate_train(number, replies)
    assert arrays is not None
    return to_arrays(arrays)


MEAN = (10 * 0.1 + 20 * 0.2 + 30 * 0.3) / 60  # of the three updates, weighted by real samples
FIRST_STEP: dict[str, tuple[dict[str, Any], float]] = {
    "fedavgm": ({"strategy-args": "server_learning_rate=0.5"}, 0.5 * MEAN),
    "fedadam": (
        {"strategy-args": "tau=0.01"},
        0.1 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2) * 0.1 * MEAN / (0.1 * MEAN + 0.01),
    ),
    "fedadagrad": ({"strategy-args": "tau=0.01"}, 0.1 * MEAN / (MEAN + 0.01)),
    "fedyogi": ({"strategy-args": "beta_1=0.5 tau=0.01"}, 0.01 * 0.5 * MEAN / (0.1 * MEAN + 0.01)),
    "fedmedian": ({}, 0.2),
    "fedtrimmedavg": ({"strategy-args": "beta=0.4"}, 0.2),
    "multikrum": ({}, MEAN),
    "qfedavg": (
        {"strategy-args": "q=2", "learning-rate": 0.5},  # L = 2, F_k = 0.5; Δ_k = 2 u F², h_k = 2 F · 5 (2 u)² + 2 F²
        2 * 0.6 * 0.25 / sum(2 * 0.5 * 5 * (2 * u) ** 2 + 2 * 0.25 for u in (0.1, 0.2, 0.3)),
    ),
}


@pytest.mark.parametrize("name", FIRST_STEP)
def test_first_step_matches_hand_computed_value(name: str) -> None:
    keys, step = FIRST_STEP[name]
    strategy = build_strategy(parse_config({"strategy": name, "clients": 3, "participation": 1.0, **keys}))
    assert isinstance(strategy, FlowerStrategyAdapter)
    assert one_round(strategy, 1)["w"] == pytest.approx(np.full(3, 1 + step), rel=1e-5)


@pytest.mark.parametrize("name", ["krum", "multikrum", "bulyan", "fedmedian", "fedtrimmedavg"])
def test_robust_strategy_ignores_one_outlier_client(name: str) -> None:
    known = {"strategy-args": "num_malicious_nodes=1"} if name in ("krum", "multikrum", "bulyan") else {}
    strategy = build_strategy(parse_config({"strategy": name, "clients": 7, "participation": 1.0, **known}))
    assert isinstance(strategy, FlowerStrategyAdapter)
    moved = one_round(strategy, 1, updates=(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1e5))["w"]
    assert moved == pytest.approx(np.full(3, 1.1), rel=1e-5)


def test_seeded_flower_rng_leaves_global_generators_alone() -> None:
    def draw_globally() -> tuple[float, float]:
        return random.random(), np.random.normal()

    def draw_as_flower() -> tuple[Any, ...]:
        noise = [np.zeros(3)]
        differential_privacy.add_gaussian_noise_inplace(noise, 1.0)
        count = dp_adaptive_clipping.np.random.normal(10, 2.0)  # type: ignore[attr-defined]
        return (*noise[0], count, *strategy_utils.random.sample(range(100), 5))  # type: ignore[attr-defined]

    random.seed(5)
    np.random.seed(5)
    expected = [draw_globally() for _ in range(2)]
    with seeded_flower_rng(stream(1, "test", 3)):
        drawn = draw_as_flower()
    random.seed(5)
    np.random.seed(5)
    with seeded_flower_rng(stream(1, "test", 3)):
        in_block = draw_globally()  # as a background thread could
        assert draw_as_flower() == drawn
    assert [in_block, draw_globally()] == expected
    with seeded_flower_rng(stream(1, "test", 4)):
        assert draw_as_flower() != drawn
    assert strategy_utils.random is random  # type: ignore[attr-defined]
    assert differential_privacy.np is dp_adaptive_clipping.np is np  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"strategy": "krum", "clients": 4, "participation": 0.5}, ["krum", "needs 3 replies", "guarantee only 2"]),
        (
            {"strategy": "krum", "clients": 4, "strategy-args": "num_malicious_nodes=1"},
            ["num_malicious_nodes = 1", "needs 5 replies"],
        ),
        (
            {"strategy": "bulyan", "clients": 6, "strategy-args": "num_malicious_nodes=1"},
            ["needs 7 replies", "4 · num_malicious_nodes + 3"],
        ),
        (
            {"strategy": "bulyan", "clients": 8, "strategy-args": "num_malicious_nodes=1", "min-replies": 0.7},
            ["min-replies = 0.7"],
        ),
        (
            {"strategy": "krum", "clients": 4, "strategy-args": "num_malicious_nodes=-1"},
            ["strategy-args: num_malicious_nodes = -1", "0 or more"],
        ),
        (
            {"strategy": "multikrum", "clients": 4, "strategy-args": "num_nodes_to_select=5"},
            ["num_nodes_to_select = 5", "from 1 to 4"],
        ),
        ({"strategy": "fedsgd"}, ["strategy", "fedsgd", "multikrum", "package.module:name"]),
        ({"strategy": "fedadm"}, ["strategy = 'fedadm'", "did you mean 'fedadam'?"]),
        ({"strategy": "fedtrimmedavg", "strategy-args": "beta=0.5"}, ["'fedtrimmedavg' raised ValueError", "beta"]),
        ({"strategy": "fedadam", "strategy-args": "tau=nan"}, ["strategy-args: tau = nan", "a finite number"]),
        ({"strategy": "fedadam", "strategy-args": "tau=tiny"}, ["strategy-args: tau = 'tiny'", "a finite number"]),
        ({"strategy": "fedadam", "strategy-args": "eta"}, ["strategy-args = 'eta'", "NAME=VALUE"]),
        (
            {"strategy": "fedadam", "strategy-args": "lr=1"},
            ["has no argument 'lr'; it has eta, eta_l, beta_1"],
        ),
        ({"strategy": "fedadam", "strategy-args": "min_train_nodes=3"}, ["no argument 'min_train_nodes'"]),
        ({"strategy": "fedprox", "strategy-args": "mu=1"}, ["'fedprox' has no argument 'mu'; it has none"]),
    ],
)
def test_invalid_strategy_settings_are_rejected_at_start(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(
            parse_config({"policy": "none", "participation": 1.0, "clients": 3, **keys}), Console(file=io.StringIO())
        )
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.slow
def test_strategies_benchmark_writes_its_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    words = ["--small", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "strategies.py"), *words],
        capture_output=True,
        text=True,
        timeout=LONG,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert {"fedavg", *FLOWER_STRATEGIES, "Γ̂"} <= set(json.loads((tmp_path / "out.json").read_text())["seconds"])
    assert "bulyan" in done.stdout
