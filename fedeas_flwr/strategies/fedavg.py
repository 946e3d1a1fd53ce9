"""FedAvg: θ ← Σ_k (N_k / Σ_j N_j) θ_k over the round's clients (Algorithm 1, lines 16 and 17)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy as flower

from fedeas_flwr.strategies.averaging import weighted_average
from fedeas_flwr.strategies.interface import Algorithm
from fedeas_flwr.strategies.records import ARRAYS, CONFIG, METRICS, WEIGHT, to_arrays, to_record

TRAIN_ALL = {"fraction_train": 1.0, "min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
"""Arguments and attributes of Flower's strategies: the grid holds the round's clients only, and all of them train."""


def settings() -> dict[str, Any]:
    """Return the arguments of every Flower strategy."""
    return {**TRAIN_ALL, "weighted_by_key": WEIGHT, "arrayrecord_key": ARRAYS, "configrecord_key": CONFIG}


class FedAvg(flower.FedAvg):
    """Flower's FedAvg with an average in place, of arrays in messages or of tensors on a GPU."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the mean of the replies' arrays, weighted by real samples."""
        contents = [reply.content for reply in replies]
        weights = [float(content.metric_records[METRICS][self.weighted_by_key]) for content in contents]  # type: ignore[arg-type]
        states = [to_arrays(content.array_records[ARRAYS]) for content in contents]
        return to_record(weighted_average(states, weights)), None


FEDAVG = Algorithm(FedAvg)
