"""How the clients' models become one: algorithms by the name the run-config gives them.

An algorithm is a Flower strategy. It sees a grid with only the round's chosen clients, and only trainable arrays;
sampling, checks, order, buffers, quorum and resume are `Federation`'s, the same for every algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_keys import STRATEGY_KEYS
from fedeas_flwr.strategies import flower
from fedeas_flwr.strategies.fedavg import build_fedavg
from fedeas_flwr.strategies.fedgen import LABEL_COUNTS, FedGenClient, build_fedgen
from fedeas_flwr.strategies.fedmix import MEAN_IMAGES, FedMixClient, build_fedmix
from fedeas_flwr.strategies.fedprox import FedProxClient
from fedeas_flwr.strategies.flower import FlowerStrategyAdapter, adapt, adapt_if_dp
from fedeas_flwr.strategies.interface import ClientAlgorithm, Disclosure
from fedeas_flwr.strategies.moon import build_moon, moon_client
from fedeas_flwr.strategies.scaffold import ScaffoldClient, build_scaffold


@dataclass(frozen=True)
class Algorithm:
    """A strategy, how it is built, and what choosing it means."""

    build: Callable[[RunConfig], Strategy]
    summary: str
    discloses: str
    """What a client reveals beyond what FedAvg takes: its model update and its number of real samples."""
    extra_bytes: float
    """What crosses the wire for a client of a round beyond model out and model back, in models."""
    client: Callable[[RunConfig], ClientAlgorithm] = lambda config: ClientAlgorithm()
    """Its part on a client."""
    disclosure: Disclosure | None = None
    """What it asks of every client's data before training; it starts only with the key that allows that."""


ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": Algorithm(adapt_if_dp(build_fedavg), "mean of the models by real samples", "nothing", 0),
    "fedprox": Algorithm(
        adapt_if_dp(build_fedavg),
        "FedAvg whose clients keep near the model they received",
        "nothing",
        0,
        FedProxClient,
    ),
    "scaffold": Algorithm(
        build_scaffold,
        "clients' steps corrected by control variates; plain mean of the models",
        "nothing: the change of its control variate follows from its update and its steps",
        2,
        ScaffoldClient,
    ),
    "moon": Algorithm(
        adapt_if_dp(build_moon),
        "FedAvg whose clients' features keep near the received model's, away from their own last one's",
        "nothing",
        0,
        moon_client,
    ),
    "fedavgm": Algorithm(adapt(flower.build_fedavgm), "FedAvg with momentum on the server", "nothing", 0),
    "fedadam": Algorithm(adapt(flower.build_fedadam), "Adam on the mean update", "nothing", 0),
    "fedadagrad": Algorithm(adapt(flower.build_fedadagrad), "Adagrad on the mean update", "nothing", 0),
    "fedyogi": Algorithm(adapt(flower.build_fedyogi), "Yogi on the mean update", "nothing", 0),
    "fedmedian": Algorithm(adapt(flower.build_fedmedian), "median of every weight, clients alike", "nothing", 0),
    "fedtrimmedavg": Algorithm(
        adapt(flower.build_fedtrimmedavg), "mean of every weight without its extremes, clients alike", "nothing", 0
    ),
    "krum": Algorithm(adapt(flower.build_krum), "the one reply that lies nearest to the others", "nothing", 0),
    "multikrum": Algorithm(
        adapt(flower.build_multikrum),
        "mean by real samples of the replies that lie nearest to the others",
        "nothing",
        0,
    ),
    "bulyan": Algorithm(
        adapt(flower.build_bulyan),
        "MultiKrum, then of every weight the mean of those nearest the median",
        "nothing",
        0,
    ),
    "qfedavg": Algorithm(
        adapt(flower.build_qfedavg),
        "updates weighted by the client's training loss to the power q",
        "nothing; the loss, sent anyway, decides its weight",
        0,
    ),
    "fedmix": Algorithm(
        build_fedmix,
        "FedAvg whose clients mix their images with other clients' means, to first order",
        MEAN_IMAGES.what,
        0.03,
        FedMixClient,
        MEAN_IMAGES,
    ),
    "fedgen": Algorithm(
        build_fedgen,
        "FedAvg whose clients learn from a generator of features, which the server learns from their heads",
        LABEL_COUNTS.what,
        0.015,
        FedGenClient,
        LABEL_COUNTS,
    ),
}


def build_strategy(config: RunConfig) -> Strategy:
    """Build the algorithm the run-config names, for a federation of `clients` clients.

    Raises
    ------
    ConfigError
        If the algorithm cannot work with so few replies or with `dp`, or needs a disclosure that is not allowed, in
        one line.
    """
    algorithm = ALGORITHMS[config.strategy]
    if algorithm.disclosure is not None:
        algorithm.disclosure.check_allowed(config)
    strategy = algorithm.build(config)
    if config.dp != "none" and not isinstance(strategy, FlowerStrategyAdapter):
        raise ConfigError(
            f"dp = '{config.dp}' does not cover all that strategy = '{config.strategy}' sends: must be none with it, "
            "or with a strategy other than scaffold, fedmix and fedgen"
        )
    return strategy


@lru_cache(maxsize=8)
def client_part(config: RunConfig) -> ClientAlgorithm:
    """Build the part of the run's algorithm that a client runs."""
    return ALGORITHMS[config.strategy].client(config)


TABLE_HEAD = ("strategy", "what it does", "keys of its own", "discloses beyond FedAvg", "models sent, a client a round")


def table_rows() -> list[tuple[str, ...]]:
    """One row an algorithm: the table of `fedeas strategies` and of docs/strategies.md."""
    return [
        (name, a.summary, ", ".join(STRATEGY_KEYS.get(name, ())) or "none", a.discloses, f"{2 + a.extra_bytes:g}")
        for name, a in ALGORITHMS.items()
    ]
