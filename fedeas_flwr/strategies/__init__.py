"""How the clients' models become one: algorithms by the name the run-config gives them.

An algorithm is a Flower strategy. It sees a grid with only the round's chosen clients, and only trainable arrays;
sampling, checks, order, buffers, quorum and resume are `Federation`'s, the same for every algorithm.
"""

from __future__ import annotations

from flwr.serverapp.strategy import Strategy

from fedeas_flwr.config import RunConfig
from fedeas_flwr.messages import ARRAYS, CONFIG, WEIGHT
from fedeas_flwr.strategies.fedavg import FedAvg


def build_strategy(config: RunConfig) -> Strategy:
    """Build the algorithm the run-config names."""
    assert config.strategy == "fedavg"
    # The grid it is shown holds the chosen clients alone: all of them, however few.
    return FedAvg(
        fraction_train=1.0,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
        weighted_by_key=WEIGHT,
        arrayrecord_key=ARRAYS,
        configrecord_key=CONFIG,
    )
