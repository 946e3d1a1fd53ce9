"""Row 10: data or code change half-way. As configured, a client with other labels is rejected or plans again."""

from __future__ import annotations

import importlib
import linecache
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runners import client_state, finish, quick

from fedeas_flwr import allocation, client_app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.import_path import source_hash
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import FederatedData, federated_data, local_data
from fedeas_flwr.data.node import Node
from fedeas_flwr.generators.opening import hash_own_inputs
from fedeas_flwr.launch.sweep import SweepRun, check_cell
from fedeas_flwr.partition import Partition
from fedeas_flwr.policies.own import find_policy
from fedeas_flwr.runs.directory import RunDirectory

KEYS: dict[str, Any] = {"policy": "fedeas", "beta": 2.0, "alpha": 0.5, "participation": 1.0}


def lose_samples(monkeypatch: pytest.MonkeyPatch, client: int, kept: int) -> None:
    """Reduce a client's data to its first ``kept`` samples."""

    def changed(config: RunConfig, node: Node) -> FederatedData:
        data = local_data(config, node)
        parts = list(data.partition.train)
        parts[client] = parts[client][:kept]
        return FederatedData(data.dataset, Partition(parts, data.partition.test), data.protocol)

    monkeypatch.setattr(client_app, "local_data", changed)


def test_changed_labels_are_rejected_and_the_client_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**KEYS, "policy": "none"}  # an empty plan counts, too
    finish(quick(tmp_path / "r", rounds=1, **keys))
    lose_samples(monkeypatch, client=2, kept=50)
    with pytest.raises(RunError, match=r"client 2: ValueError: data-change = 'refuse': .* and 50 now") as refused:
        finish(quick(tmp_path / "r", rounds=2, resume=True, **keys))
    assert "[" not in str(refused.value), "the error discloses label counts"


def test_changed_labels_are_replanned_if_configured(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish(quick(tmp_path / "r", rounds=1, data_change="replan", **KEYS))
    before = run.summary()["total_generated"]
    lose_samples(monkeypatch, client=2, kept=50)
    run = finish(quick(tmp_path / "r", rounds=2, resume=True, data_change="replan", **KEYS))
    state = client_state(run, 2, 2)
    data = federated_data(quick(tmp_path, **KEYS), 4)
    counts = np.bincount(data.train_labels(2)[:50], minlength=10)
    expected = allocation.fedeas(counts[None, :], 2.0)[0]
    assert state.generate == tuple(expected.tolist()) and state.counts == tuple(counts.tolist())
    assert run.summary()["total_generated"] != before
    assert "its labels changed" in (tmp_path / "r" / "flower.log").read_text()


def write_images(path: Path, shade: int) -> None:
    labels = np.arange(40) % 2
    np.savez(path, x=np.full((40, 8, 8, 1), shade, np.uint8), y=labels)


def test_changed_images_with_the_same_labels_are_rejected(tmp_path: Path) -> None:
    write_images(path := tmp_path / "photos.npz", shade=1)
    keys: dict[str, Any] = {"dataset": f"own:{path}", "policy": "none", "clients": 2, "alpha": 100.0}
    run = finish(quick(tmp_path / "r", rounds=1, **keys))
    write_images(path, shade=1)
    run = finish(quick(tmp_path / "r", rounds=2, resume=True, **keys))
    write_images(path, shade=200)
    with pytest.raises(RunError, match=r"dataset = 'own:.*photos.npz': .* changed"):
        finish(quick(tmp_path / "r", rounds=3, resume=True, **keys))
    assert run.summary()["rounds"] == 2


def test_changed_code_is_rejected_by_a_resumed_run_and_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_rules(number: int, other: int) -> None:
        text = "from fedeas_flwr.policies.own import matched\n\n\n"
        text += f"@matched\ndef same_total(counts):\n    return counts * {number}\n\n\n"
        text += f"def rule(counts):\n    return counts * {number}\n\n\n"
        text += f"def other(counts):\n    return counts * {other}\n"
        (tmp_path / "changing_rules.py").write_text(text)
        linecache.clearcache()
        sys.modules.pop("changing_rules", None)
        importlib.invalidate_caches()
        find_policy.cache_clear()

    write_rules(0, 0)
    config = quick(tmp_path / "r", rounds=1, policy="changing_rules:rule")
    finish(config)
    write_rules(0, 1)  # a function that the run does not use
    check_cell(SweepRun("r", {}, config, RunDirectory(tmp_path / "r")))
    hashed = source_hash("changing_rules:same_total", "policy")
    own_parts = config.with_changes(partition="changing_rules:rule")
    before = hash_own_inputs(own_parts)["partition"]
    write_rules(1, 1)
    assert hash_own_inputs(own_parts)["partition"] != before
    assert hashed != source_hash("changing_rules:same_total", "policy")
    with pytest.raises(RunError, match="policy = 'changing_rules:rule': its source changed"):
        check_cell(SweepRun("r", {}, config, RunDirectory(tmp_path / "r")))
    with pytest.raises(RunError, match="policy = 'changing_rules:rule': its source changed"):
        finish(config.with_changes(rounds=2, resume=True))
