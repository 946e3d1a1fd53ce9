"""Flower's strategies, and a user's with the same interface, unmodified: an adapter to run them in `Federation`.

They take NumPy arrays in messages, draw from global random generators, and keep state in attributes.
`FlowerStrategyAdapter` converts models to NumPy arrays, seeds their random numbers, and saves and restores the state.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.common.randomness import Noise, stream
from fedeas_flwr.common.rate_schedule import CONSTANT
from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.checkpoints import Checkpoint, StrategyState
from fedeas_flwr.strategies.fedavg import FedAvg, settings
from fedeas_flwr.strategies.interface import Stateful
from fedeas_flwr.strategies.privacy import privacy_spent
from fedeas_flwr.strategies.records import ARRAYS, METRICS, WEIGHT, encoded, to_arrays, to_record

STATEFUL_ATTRIBUTES: dict[type[flower.Strategy], tuple[str, ...]] = {
    **dict.fromkeys((FedAvg, flower.FedAvg, flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum), ()),
    **dict.fromkeys((flower.Bulyan, flower.QFedAvg), ()),
    flower.FedAvgM: ("current_arrays", "momentum_vector"),
    flower.FedAdam: ("m_t", "v_t"),
    flower.FedAdagrad: ("m_t", "v_t"),
    flower.FedYogi: ("m_t", "v_t"),
    flower.DifferentialPrivacyServerSideAdaptiveClipping: ("clipping_norm",),
    flower.DifferentialPrivacyClientSideAdaptiveClipping: ("clipping_norm",),
}
"""Strategy → its attributes that carry over from one round to the next. All others are constant or set again by
`configure_train`. A strategy of a user's has those of the class that it derives from, or implements `Stateful`.
tests/strategies/test_flower_strategies.py fails if an attribute is missing here."""


_SET_IN_EACH_ROUND = "current_arrays"


class FlowerStrategyAdapter(flower.Strategy):
    """Run one of Flower's strategies, or one like them, inside `Federation`; in its DP wrapper if `dp` is on."""

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
        for owner in self._owners():
            if isinstance(owner, flower.QFedAvg) and self.config.learning_rate_schedule != CONSTANT:
                owner.client_learning_rate = self.config.learning_rate_in(server_round)
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
        """Return the state of the strategy and, under `dp`, of the strategy that it wraps."""
        state = StrategyState()
        for owner in self._owners():
            if isinstance(owner, Stateful):
                own = owner.state()
                state.arrays.update({f"{_OWN}{key}": array for key, array in own.arrays.items()})
                state.numbers.update({f"{_OWN}{key}": number for key, number in own.numbers.items()})
                continue
            for name in stateful_attributes(owner):
                value = getattr(owner, name)
                if isinstance(value, float):
                    state.numbers[name] = value
                    continue
                for position, (key, array) in enumerate(_named_arrays(value)):
                    # Checkpoints sort array names; the position restores the model's order, which Flower's lists need.
                    state.arrays[f"{name}/{position:06d}/{key}"] = array
        return state

    def load_state(self, state: StrategyState) -> None:
        """Restore the state; an attribute that ``state`` lacks was not set yet and is left as it is."""
        for owner in self._owners():
            if isinstance(owner, Stateful):
                owner.load_state(StrategyState(_own_part(state.arrays), _own_part(state.numbers)))
                continue
            for name in stateful_attributes(owner):
                found = sorted(key for key in state.arrays if key.startswith(f"{name}/"))
                if name in state.numbers:
                    setattr(owner, name, state.numbers[name])
                elif found:
                    arrays = {key.split("/", 2)[2]: state.arrays[key] for key in found}
                    setattr(owner, name, _to_attribute(name, arrays))

    def _owners(self) -> Iterator[flower.Strategy]:
        yield self.inner
        if self.config.dp != "none":
            yield self.inner.strategy  # type: ignore[attr-defined]


_OWN = "own/"
"""Prefix of the state that a `Stateful` strategy returns."""


def _own_part(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(_OWN): value for key, value in values.items() if key.startswith(_OWN)}


def stateful_attributes(strategy: flower.Strategy) -> tuple[str, ...]:
    """Return the attributes that a resume restores: those of the first of its classes that has any listed."""
    return next((STATEFUL_ATTRIBUTES[kind] for kind in type(strategy).__mro__ if kind in STATEFUL_ATTRIBUTES), ())


def unsaved_attributes(strategy: flower.Strategy) -> dict[str, str]:
    """Return hashes of the attributes of a user's strategy that a resume does not restore, by name."""
    if isinstance(strategy, FlowerStrategyAdapter):
        *_, strategy = strategy._owners()
    if type(strategy) in STATEFUL_ATTRIBUTES or isinstance(strategy, Stateful):
        return {}
    restored = {*stateful_attributes(strategy), _SET_IN_EACH_ROUND}
    found = {name: value for name, value in vars(strategy).items() if name not in restored}
    return {name: hashlib.sha256(b"".join(_content(value))).hexdigest() for name, value in found.items()}


def _content(value: Any) -> Iterator[bytes]:
    """Yield the bytes of numbers, arrays, and containers of them; of another object only its repr."""
    if isinstance(value, ArrayRecord):
        value = to_arrays(value)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _content(item)
            yield b","
    elif hasattr(value, "dtype"):
        plain = value.detach().double() if hasattr(value, "detach") else value  # NumPy has no bfloat16
        yield to_numpy({"": plain})[""].tobytes()
    else:
        yield repr(value).encode()


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


# ------------------------------------------------------------------------------------------- Krum and Bulyan


def multikrum(config: RunConfig, num_malicious_nodes: int = 0, num_nodes_to_select: int = 0) -> flower.MultiKrum:
    """Build MultiKrum, which averages all replies but the malicious ones by default; Flower's own default is Krum."""
    selected = num_nodes_to_select or config.min_replies_per_round - num_malicious_nodes
    return flower.MultiKrum(**settings(), num_malicious_nodes=num_malicious_nodes, num_nodes_to_select=selected)


def check_replies(strategy: flower.Strategy, config: RunConfig) -> None:
    """Raise `ConfigError` if a round may have fewer replies than Krum, MultiKrum or Bulyan needs.

    With f malicious replies, Krum and MultiKrum need 2f + 3 (Blanchard et al. 2017), Bulyan 4f + 3 (El Mhamdi et al.
    2018).
    """
    if not isinstance(strategy, flower.MultiKrum | flower.Bulyan):  # Krum is a MultiKrum
        return
    malicious, replies = strategy.num_malicious_nodes, config.min_replies_per_round
    if not isinstance(malicious, int) or malicious < 0:
        raise ConfigError(f"strategy-args: num_malicious_nodes = {malicious!r}: must be an integer, 0 or more")
    factor = 2 if isinstance(strategy, flower.MultiKrum) else 4
    if replies < factor * malicious + 3:
        raise ConfigError(
            f"strategy = '{config.strategy}' with num_malicious_nodes = {malicious} needs {factor * malicious + 3} "
            f"replies per round ({factor} · num_malicious_nodes + 3), but clients = {config.clients}, participation = "
            f"{config.participation:g} and min-replies = {config.min_replies:g} guarantee only {replies}"
        )
    selected = strategy.num_nodes_to_select if isinstance(strategy, flower.MultiKrum) else 1
    if not isinstance(selected, int) or not 1 <= selected <= replies:
        raise ConfigError(
            f"strategy-args: num_nodes_to_select = {selected!r}: must be an integer from 1 to {replies}, the minimum "
            "number of replies per round"
        )
