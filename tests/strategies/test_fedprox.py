"""FedProx: two rounds by hand, and μ = 0 equals FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quadratics import train
from runners import finish, quick, weights

from fedeas_flwr.strategies.averaging import weighted_average
from fedeas_flwr.strategies.fedprox import FedProxClient
from fedeas_flwr.strategies.interface import ClientRound


def local(kind: str, start: float, a: float, mu: float) -> float:
    config = quick(Path("/nowhere"), strategy="fedprox", fedprox_mu=mu)
    part, state = FedProxClient(config), {"w": np.array(start, dtype=np.float32)}
    task = ClientRound(config, 1, 0, "cpu", state, {}, {}, {}, torch.zeros(2), 2)
    return float(train(kind, part.objective, start, a, 2, part.prepare(task))["w"])


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_two_rounds_by_hand(kind: str) -> None:
    # f = ½(w−a)², lr ½, μ = 1, two steps: from 0 with a = 4 to 2 and 2 (FedAvg: 2 and 3).
    assert local(kind, 0, 4, mu=1) == 2
    assert local(kind, 0, 4, mu=0) == 3
    # Client 2 does not take part in round 1; then y = (3, ½), weights N = (3, 1).
    first = local(kind, 0, 4, mu=1)
    second: list[Any] = [{"w": np.float32(local(kind, first, a, mu=1))} for a in (4, -1)]
    assert [float(s["w"]) for s in second] == [3, 0.5]
    assert float(weighted_average(second, [3, 1])["w"]) == 2.375


def test_fedprox_with_mu_zero_is_fedavg_bitwise(tmp_path: Path) -> None:
    fedavg = finish(quick(tmp_path / "fedavg"))
    assert weights(finish(quick(tmp_path / "zero", strategy="fedprox", fedprox_mu=0.0))) == weights(fedavg)
    assert weights(finish(quick(tmp_path / "one", strategy="fedprox", fedprox_mu=1.0))) != weights(fedavg)
