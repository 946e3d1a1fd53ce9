"""Learning algorithms by their run-config name: how each is built, and what it sends and discloses.

An algorithm is a Flower strategy. It sees only the clients sampled for the round, and only trainable arrays.
`Federation` samples clients, checks and orders replies, averages buffers, checks the quorum and resumes runs.
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
    """A strategy: its builders for server and client, and its row in the table of strategies."""

    build: Callable[[RunConfig], Strategy]
    summary: str
    discloses: str
    """What a client discloses in addition to its model update and number of real samples, which FedAvg needs."""
    extra_models: float
    """Traffic per client and round beyond sending the model and receiving it back, in units of one model."""
    client: Callable[[RunConfig], ClientAlgorithm] = lambda config: ClientAlgorithm()
    """Builds the algorithm's part on a client."""
    disclosure: Disclosure | None = None
    """What every client discloses before training; None: nothing. The run-config must set `Disclosure.key` to true."""


ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": Algorithm(adapt_if_dp(build_fedavg), "mean of the client models, weighted by real samples", "nothing", 0),
    "fedprox": Algorithm(
        adapt_if_dp(build_fedavg),
        "FedAvg with a proximal term that keeps clients near the received model",
        "nothing",
        0,
        FedProxClient,
    ),
    "scaffold": Algorithm(
        build_scaffold,
        "control variates correct the clients' steps; unweighted mean of the models",
        "nothing: the change of its control variate follows from its update and its number of steps",
        2,
        ScaffoldClient,
    ),
    "moon": Algorithm(
        adapt_if_dp(build_moon),
        "FedAvg with a contrastive loss: features move towards the received model's and away from the client's last",
        "nothing",
        0,
        moon_client,
    ),
    "fedavgm": Algorithm(adapt(flower.build_fedavgm), "FedAvg with momentum on the server", "nothing", 0),
    "fedadam": Algorithm(adapt(flower.build_fedadam), "Adam on the mean update", "nothing", 0),
    "fedadagrad": Algorithm(adapt(flower.build_fedadagrad), "Adagrad on the mean update", "nothing", 0),
    "fedyogi": Algorithm(adapt(flower.build_fedyogi), "Yogi on the mean update", "nothing", 0),
    "fedmedian": Algorithm(adapt(flower.build_fedmedian), "unweighted coordinate-wise median", "nothing", 0),
    "fedtrimmedavg": Algorithm(
        adapt(flower.build_fedtrimmedavg), "unweighted coordinate-wise trimmed mean", "nothing", 0
    ),
    "krum": Algorithm(adapt(flower.build_krum), "the single client model nearest to the others", "nothing", 0),
    "multikrum": Algorithm(
        adapt(flower.build_multikrum),
        "mean of the client models nearest to the others, weighted by real samples",
        "nothing",
        0,
    ),
    "bulyan": Algorithm(
        adapt(flower.build_bulyan),
        "MultiKrum, then for every weight the mean of the values nearest to the median",
        "nothing",
        0,
    ),
    "qfedavg": Algorithm(
        adapt(flower.build_qfedavg),
        "updates weighted by the client's training loss to the power q",
        "nothing: FedAvg also sends the training loss, which sets the client's weight here",
        0,
    ),
    "fedmix": Algorithm(
        build_fedmix,
        "FedAvg whose clients mix in other clients' mean images, by a first-order Taylor term",
        MEAN_IMAGES.what,
        0.03,
        FedMixClient,
        MEAN_IMAGES,
    ),
    "fedgen": Algorithm(
        build_fedgen,
        "FedAvg with a feature generator: the server trains it on the clients' heads, the clients learn from it",
        LABEL_COUNTS.what,
        0.015,
        FedGenClient,
        LABEL_COUNTS,
    ),
}


def build_strategy(config: RunConfig) -> Strategy:
    """Build and return the strategy that the run-config names; its `clients` must be the size of the federation.

    Raises
    ------
    ConfigError
        If the algorithm needs more replies per round than the run-config guarantees, cannot be combined with `dp`, or
        needs a disclosure that the run-config does not allow.
    """
    algorithm = ALGORITHMS[config.strategy]
    if algorithm.disclosure is not None:
        algorithm.disclosure.check_allowed(config)
    strategy = algorithm.build(config)
    if config.dp != "none" and not isinstance(strategy, FlowerStrategyAdapter):
        raise ConfigError(
            f"dp = '{config.dp}' does not cover all that strategy = '{config.strategy}' sends: set dp = none, or "
            "choose a strategy other than scaffold, fedmix and fedgen"
        )
    return strategy


@lru_cache(maxsize=8)
def client_part(config: RunConfig) -> ClientAlgorithm:
    """Build and return the client part of the run's algorithm."""
    return ALGORITHMS[config.strategy].client(config)


TABLE_HEAD = ("strategy", "what it does", "keys of its own", "discloses beyond FedAvg", "models per client and round")


def table_rows() -> list[tuple[str, ...]]:
    """Return one row per algorithm, for `fedeas strategies` and docs/strategies.md."""
    return [
        (name, a.summary, ", ".join(STRATEGY_KEYS.get(name, ())) or "none", a.discloses, f"{2 + a.extra_models:g}")
        for name, a in ALGORITHMS.items()
    ]
