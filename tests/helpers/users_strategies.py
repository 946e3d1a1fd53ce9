"""Custom strategies, named in run configs by import path."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy as flower

from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.checkpoints import StrategyState
from fedeas_flwr.strategies.fedavg import FedAvg
from fedeas_flwr.strategies.fedprox import FedProxClient
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm


def adam(eta: float = 1.0) -> flower.Strategy:
    """Build FedAdam with Flower's defaults, which wait for two nodes."""
    return flower.FedAdam(eta=eta)


class OwnAverage(flower.FedAvg):
    """FedAvg under another name."""


class OwnAdam(flower.FedAdam):
    """FedAdam under another name."""


class SlowStart(flower.FedAvg):
    """Move by 1/2, 2/3, 3/4 … of the mean update: the step depends on how many rounds there were."""

    def __init__(self, first: int = 1, **keys: Any) -> None:
        super().__init__(**keys)
        self.rounds, self.sent = first, ArrayRecord()

    def configure_train(self, server_round: int, arrays: ArrayRecord, *others: Any) -> Iterable[Message]:
        self.sent = arrays
        return super().configure_train(server_round, arrays, *others)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        mean, metrics = super().aggregate_train(server_round, replies)
        assert mean is not None
        part, self.rounds = self.rounds / (self.rounds + 1), self.rounds + 1
        pairs = zip(self.sent.to_numpy_ndarrays(), mean.to_numpy_ndarrays(), strict=True)
        moved = [np.asarray(old + part * (new - old), np.float32) for old, new in pairs]
        return ArrayRecord(dict(zip(mean, ArrayRecord(moved).values(), strict=True))), metrics


class SlowStartWithState(SlowStart):
    """The same, with its state in the checkpoint."""

    def state(self) -> StrategyState:
        return StrategyState({"rounds": np.array([self.rounds])}, {"rounds": float(self.rounds)})

    def load_state(self, state: StrategyState) -> None:
        if state.numbers:
            self.rounds = int(state.numbers["rounds"])
            assert state.arrays["rounds"].tolist() == [self.rounds]


def proximal_client(config: RunConfig, mu: float = 0.0) -> ClientAlgorithm:
    return FedProxClient(config.with_changes(fedprox_mu=mu))


PROXIMAL = Algorithm(FedAvg, proximal_client)
"""FedProx, whose μ is one of `strategy-args`."""


class WithExtra(flower.FedAvg):
    """Sends arrays besides the model, which `dp` does not cover."""

    def extra(self) -> dict[str, Any]:
        return {}

    def expected_extra(self) -> dict[str, Any]:
        return {}


class FailsInRound(flower.FedAvg):
    """Raises an error when it aggregates the first round."""

    def aggregate_train(self, *_: Any) -> Any:
        raise RuntimeError("my bug")


NUMBER = 5


def fails(reason: str = "no luck") -> flower.Strategy:
    raise RuntimeError(f"first line\n{reason}")


def returns_number() -> int:
    return 5


WRONG_CLIENT = Algorithm(FedAvg, returns_number)  # type: ignore[arg-type]
UNCALLABLE_CLIENT = Algorithm(FedAvg, dict)
