"""Row 10: a client's labels change after its plan. As configured, the client is rejected or its plan recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runners import client_state, finish, quick

from fedeas_flwr import allocation, client_app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import FederatedData, federated_data, local_data
from fedeas_flwr.data.node import Node
from fedeas_flwr.partition import Partition

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
