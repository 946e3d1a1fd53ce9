"""Flower's strategies, unmodified: an adapter to run them in `Federation`, and a builder for each.

They take NumPy arrays in messages, draw from global random generators, and keep state in attributes.
`FlowerStrategyAdapter` converts models to NumPy arrays, seeds their random numbers, and saves and restores the state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import dp_adaptive_clipping, strategy_utils
from flwr.supercore import differential_privacy

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.randomness import Noise, stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.checkpoints import Checkpoint, StrategyState
from fedeas_flwr.strategies.fedavg import settings
from fedeas_flwr.strategies.privacy import privacy_spent, with_privacy
from fedeas_flwr.strategies.records import ARRAYS, LOSS, METRICS, WEIGHT, encoded, to_arrays, to_record

STATEFUL_ATTRIBUTES: dict[type[flower.Strategy], tuple[str, ...]] = {
    flower.FedAvgM: ("current_arrays", "momentum_vector"),
    flower.FedAdam: ("m_t", "v_t"),
    flower.FedAdagrad: ("m_t", "v_t"),
    flower.FedYogi: ("m_t", "v_t"),
    flower.DifferentialPrivacyServerSideAdaptiveClipping: ("clipping_norm",),
    flower.DifferentialPrivacyClientSideAdaptiveClipping: ("clipping_norm",),
}
"""Attributes that carry over from one round to the next. All others are constant or set again by `configure_train`.
tests/strategies/test_flower_strategies.py fails if an attribute is missing here."""


class FlowerStrategyAdapter(flower.Strategy):
    """Run one of Flower's strategies inside `Federation`.

    Parameters
    ----------
    inner
        Flower's strategy.
    config
        The run's config.
    """

    def __init__(self, inner: flower.Strategy, config: RunConfig) -> None:
        self.inner, self.config = inner, config
        self.noise = Noise()
        """Source of the noise of `dp`. `Federation` replaces it by the run's, whose key is stored."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages. It sees NumPy arrays; the clients get the model unchanged."""
        with seeded_flower_rng(stream(self.config.seed, "flower configure", server_round)):
            out = list(self.inner.configure_train(server_round, encoded(arrays), config, grid))
        for message in out:
            message.content = RecordDict({**message.content, ARRAYS: arrays})
        return out

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the inner strategy's aggregate as NumPy arrays; `Federation` casts it like the model."""
        replies = list(replies)
        for reply in replies:
            arrays, metrics = reply.content.array_records[ARRAYS], reply.content.metric_records[METRICS]
            if self.config.dp != "none":
                metrics = MetricRecord({**metrics, WEIGHT: 1})  # equal weights: see privacy.py
            reply.content = RecordDict({ARRAYS: encoded(arrays), METRICS: metrics})
        with seeded_flower_rng(self._rng_for_round(server_round, replies)):
            return self.inner.aggregate_train(server_round, replies)

    def _rng_for_round(self, server_round: int, replies: Sequence[Message]) -> np.random.Generator:
        if self.config.dp == "none":
            return stream(self.config.seed, "flower aggregate", server_round)
        # The server adds all noise, also if clients clip, and also the noise on the count of clipped updates. It is
        # determined by the run's key, the round and the replies, which depend on the model they were trained from.
        records = (reply.content.array_records[ARRAYS] for reply in replies)
        return self.noise.draws(server_round, (array.data for record in records for array in record.values()))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: `Federation` evaluates, in the same way for every strategy."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: `Federation` evaluates."""
        return None

    def summary(self) -> None:
        """Log the inner strategy's settings."""
        self.inner.summary()

    def privacy_spent(self, state: Checkpoint) -> dict[str, Any] | None:
        """Return the privacy spent up to ``state``; None without `dp`."""
        if self.config.dp == "none":
            return None
        releases = max(state.round, self.noise.releases(state.round))
        return privacy_spent(self.config, self.inner, releases, state.trainable, state.buffers)

    def state(self) -> StrategyState:
        """Return the stateful attributes of the strategy and, under `dp`, of the strategy that it wraps."""
        state = StrategyState()
        for owner, name in self._stateful_attributes():
            value = getattr(owner, name)
            if isinstance(value, float):
                state.numbers[name] = value
                continue
            for position, (key, array) in enumerate(_named_arrays(value)):
                # Checkpoints sort array names; the position restores the model's order, which Flower's lists need.
                state.arrays[f"{name}/{position:06d}/{key}"] = array
        return state

    def load_state(self, state: StrategyState) -> None:
        """Restore the attributes; one that ``state`` lacks was not set yet and is left as it is."""
        for owner, name in self._stateful_attributes():
            found = sorted(key for key in state.arrays if key.startswith(f"{name}/"))
            if name in state.numbers:
                setattr(owner, name, state.numbers[name])
            elif found:
                arrays = {key.split("/", 2)[2]: state.arrays[key] for key in found}
                setattr(owner, name, _to_attribute(name, arrays))

    def _stateful_attributes(self) -> Iterator[tuple[flower.Strategy, str]]:
        for owner in (self.inner, getattr(self.inner, "strategy", None)):  # a DP wrapper and its strategy
            for name in STATEFUL_ATTRIBUTES.get(type(owner), ()):  # type: ignore[arg-type]
                yield owner, name  # type: ignore[misc]


def _named_arrays(value: Any) -> Iterable[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, ArrayRecord):
        return to_arrays(value).items()
    return value.items() if isinstance(value, Mapping) else ((str(i), array) for i, array in enumerate(value))


def _to_attribute(name: str, arrays: Arrays) -> Any:
    if name == "current_arrays":
        return to_record(arrays)
    return list(arrays.values()) if name == "momentum_vector" else arrays


class _NumPy(ModuleType):
    """NumPy with its functions of `numpy.random` drawing from one bit generator."""

    def __init__(self, bit_generator: np.random.BitGenerator) -> None:
        super().__init__("numpy")
        self.random = np.random.RandomState(bit_generator)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@contextmanager
def seeded_flower_rng(draws: np.random.Generator) -> Iterator[None]:
    """Make Flower's strategies draw from ``draws``, so that a resumed run draws the same numbers.

    Flower calls `random.sample` and `numpy.random.normal`, and takes no generator. The names `random` and `np` are
    therefore replaced in Flower's modules alone: a background thread may use the global generators at the same time.
    """
    python = random.Random(draws.bytes(32))
    numpy = _NumPy(draws.bit_generator)
    strategy_utils.random = python  # type: ignore[attr-defined, assignment]
    differential_privacy.np = dp_adaptive_clipping.np = numpy  # type: ignore[attr-defined]
    try:
        yield
    finally:
        strategy_utils.random = random  # type: ignore[attr-defined]
        differential_privacy.np = dp_adaptive_clipping.np = np  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ builders


def build_fedavgm(config: RunConfig) -> flower.Strategy:
    """Build FedAvgM: v ← μ v + (θ − mean θ_k), θ ← θ − η v (Hsu et al. 2019)."""
    rate = config.server_learning_rate or 1.0
    return flower.FedAvgM(**settings(), server_learning_rate=rate, server_momentum=config.server_momentum)


def build_fedadam(config: RunConfig) -> flower.Strategy:
    """Build FedAdam: Adam on the mean update (Reddi et al. 2021, Algorithm 2)."""
    moments: dict[str, Any] = {"beta_1": config.beta_1, "beta_2": config.beta_2, "tau": config.tau}
    return flower.FedAdam(**settings(), eta=config.server_learning_rate or 0.1, **moments)


def build_fedadagrad(config: RunConfig) -> flower.Strategy:
    """Build FedAdagrad: Adagrad on the mean update (Reddi et al. 2021, Algorithm 2), in Flower without momentum."""
    return flower.FedAdagrad(**settings(), eta=config.server_learning_rate or 0.1, tau=config.tau)


def build_fedyogi(config: RunConfig) -> flower.Strategy:
    """Build FedYogi: Yogi on the mean update (Reddi et al. 2021, Algorithm 2)."""
    moments: dict[str, Any] = {"beta_1": config.beta_1, "beta_2": config.beta_2, "tau": config.tau}
    return flower.FedYogi(**settings(), eta=config.server_learning_rate or 0.01, **moments)


def build_fedmedian(config: RunConfig) -> flower.Strategy:
    """Build FedMedian: the coordinate-wise median (Yin et al. 2018)."""
    return flower.FedMedian(**settings())


def build_fedtrimmedavg(config: RunConfig) -> flower.Strategy:
    """Build FedTrimmedAvg: the coordinate-wise trimmed mean (Yin et al. 2018)."""
    return flower.FedTrimmedAvg(**settings(), beta=config.trim_fraction)


def build_krum(config: RunConfig) -> flower.Strategy:
    """Build Krum: the single model nearest to its neighbours (Blanchard et al. 2017)."""
    _need_replies(config, 2 * config.malicious_clients + 3, "2 · malicious-clients + 3")
    return flower.Krum(**settings(), num_malicious_nodes=config.malicious_clients)


def build_multikrum(config: RunConfig) -> flower.Strategy:
    """Build MultiKrum: the mean of the models with the best Krum scores (Blanchard et al. 2017)."""
    _need_replies(config, 2 * config.malicious_clients + 3, "2 · malicious-clients + 3")
    replies = config.min_replies_per_round
    selected = config.selected_clients or replies - config.malicious_clients
    if selected > replies:
        raise ConfigError(
            f"selected-clients = {selected}: must be at most {replies}, the minimum number of replies per round"
        )
    return flower.MultiKrum(**settings(), num_malicious_nodes=config.malicious_clients, num_nodes_to_select=selected)


def build_bulyan(config: RunConfig) -> flower.Strategy:
    """Build Bulyan: MultiKrum, then the mean of the values nearest to the median (El Mhamdi et al. 2018)."""
    _need_replies(config, 4 * config.malicious_clients + 3, "4 · malicious-clients + 3")
    return flower.Bulyan(**settings(), num_malicious_nodes=config.malicious_clients)


def build_qfedavg(config: RunConfig) -> flower.Strategy:
    """Build q-FedAvg: updates weighted by F_k^q (Li et al. 2020, Algorithm 2), L = 1/η of the clients."""
    return flower.QFedAvg(client_learning_rate=config.learning_rate, q=config.q, train_loss_key=LOSS, **settings())


def _need_replies(config: RunConfig, needed: int, rule: str) -> None:
    if config.min_replies_per_round < needed:
        raise ConfigError(
            f"strategy = '{config.strategy}' with malicious-clients = {config.malicious_clients} needs {needed} "
            f"replies per round ({rule}), but clients = {config.clients}, participation = {config.participation:g} and "
            f"min-replies = {config.min_replies:g} guarantee only {config.min_replies_per_round}"
        )


def adapt(build: Callable[[RunConfig], flower.Strategy]) -> Callable[[RunConfig], flower.Strategy]:
    """Return a builder that wraps Flower's strategy, and its DP wrapper if `dp` is on, in the adapter."""
    return lambda config: FlowerStrategyAdapter(with_privacy(build(config), config), config)


def adapt_if_dp(build: Callable[[RunConfig], flower.Strategy]) -> Callable[[RunConfig], flower.Strategy]:
    """Return a builder that adapts one of our strategies only if `dp` is on; otherwise it takes tensors as it is."""
    return lambda config: build(config) if config.dp == "none" else adapt(build)(config)
