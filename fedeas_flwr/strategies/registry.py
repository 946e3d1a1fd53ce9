"""Find and build the strategy that a run-config names: a built-in one, or a user's by its import path.

An algorithm's server part is a Flower strategy. It sees only the clients sampled for the round, and only trainable
arrays. `Federation` samples clients, checks and orders replies, averages buffers, checks the quorum and resumes runs.

An import path (``strategy = "package.module:name"``) names

    a Flower `Strategy` class, or a function that returns a strategy    the server part; clients train as with FedAvg
    an `Algorithm`                                                      server and client part
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import accepted_arguments, call_with, import_object, parse_arguments
from fedeas_flwr.config import STRATEGIES, BuiltinStrategy, RunConfig, parse_config
from fedeas_flwr.config_keys import STRATEGY_KEYS
from fedeas_flwr.strategies.fedavg import TRAIN_ALL, FedAvg, settings
from fedeas_flwr.strategies.flower import FlowerStrategyAdapter, check_replies
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm, NeedsDisclosure, SendsExtra
from fedeas_flwr.strategies.privacy import with_privacy
from fedeas_flwr.strategies.records import LOSS


def find_algorithm(strategy: str) -> Algorithm:
    """Return the algorithm that a value of `strategy` names; raise `ConfigError` if there is none."""
    found = import_object(STRATEGIES[strategy].path if strategy in STRATEGIES else strategy, "strategy")
    algorithm = found if isinstance(found, Algorithm) else Algorithm(found)
    with suppress(TypeError, ValueError):  # what cannot be called, or not by keyword, has no signature
        own_arguments(algorithm)
        if not isinstance(found, type) or issubclass(found, Strategy):
            return algorithm
    raise ConfigError(
        f"strategy: {strategy!r} is {found!r}: must be a Flower Strategy, a function that returns one, or an Algorithm"
    )


def build_strategy(config: RunConfig) -> Strategy:
    """Build and return the strategy that the run-config names; its `clients` must be the size of the federation.

    Raise `ConfigError` if the strategy cannot be built, needs more replies per round than the run-config guarantees,
    cannot be combined with `dp`, or needs a disclosure that the run-config does not allow.
    """
    algorithm = find_algorithm(config.strategy)
    if algorithm.disclosure is not None:
        algorithm.disclosure.check_allowed(config)
    if config.task == "generator" and algorithm.client is not ClientAlgorithm:
        raise ConfigError(
            f"strategy = '{config.strategy}': must be one whose clients train as FedAvg's do, with task = 'generator'"
        )
    strategy = _call(algorithm.build, config, offered(config), _arguments(config, algorithm))
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy: {config.strategy!r} returned {strategy!r}: must return a Flower Strategy")
    for name, value in TRAIN_ALL.items():  # a function may have kept Flower's defaults
        if name in getattr(strategy, "__dict__", {}):
            setattr(strategy, name, value)
    check_replies(strategy, config)
    if isinstance(strategy, SendsExtra | NeedsDisclosure):
        if config.dp != "none":
            raise ConfigError(
                f"dp = '{config.dp}' does not cover all that strategy = '{config.strategy}' sends: set dp = none, or "
                "choose a strategy that sends nothing but models (`fedeas strategies`)"
            )
        return strategy
    if isinstance(strategy, FedAvg) and config.dp == "none":
        return strategy  # it takes tensors as they are
    return FlowerStrategyAdapter(with_privacy(strategy, config), config)


@lru_cache(maxsize=8)
def client_part(config: RunConfig) -> ClientAlgorithm:
    """Build and return the client part of the run's algorithm."""
    algorithm = find_algorithm(config.strategy)
    part = _call(algorithm.client, config, {"config": config}, _arguments(config, algorithm))
    if not isinstance(part, ClientAlgorithm):
        raise ConfigError(f"strategy: {config.strategy!r} has {part!r} as client part: must be a ClientAlgorithm")
    return part


# ---------------------------------------------------------------------------------------------- arguments


def offered(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that a server part gets if it names them."""
    return {"config": config, "client_learning_rate": config.learning_rate, "train_loss_key": LOSS, **settings()}


_NOT_ARGUMENTS = frozenset({*offered(parse_config({})), *signature(flower.FedAvg).parameters})
"""Names that `strategy-args` may not have: what the run sets, and what Flower's strategies take besides."""


def own_arguments(algorithm: Algorithm) -> dict[str, Any]:
    """Return the arguments that `strategy-args` may name, with their defaults."""
    found = (each for part in (algorithm.build, algorithm.client) for each in signature(part).parameters.values())
    by_keyword = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {each.name: each.default for each in found if each.kind in by_keyword and each.name not in _NOT_ARGUMENTS}


def _arguments(config: RunConfig, algorithm: Algorithm) -> dict[str, Any]:
    """Return a built-in strategy's arguments and those of `strategy-args`; raise `ConfigError` if one is invalid."""
    given, own = parse_arguments(config.strategy_args, "strategy-args"), own_arguments(algorithm)
    takes_any = None in (accepted_arguments(algorithm.build), accepted_arguments(algorithm.client))
    for name, value in given.items():
        if name in _NOT_ARGUMENTS or not (takes_any or name in own):
            allowed = ", ".join(own) or "none"
            raise ConfigError(f"strategy-args: {config.strategy!r} has no argument {name!r}; it has {allowed}")
        if _is_number(own.get(name)) and not (_is_number(value) and math.isfinite(value)):
            raise ConfigError(f"strategy-args: {name} = {value!r}: must be a finite number")
    builtin = STRATEGIES.get(config.strategy)
    return {**parse_arguments(builtin.arguments if builtin else "", "strategy"), **given}


def _call(part: Callable[..., Any], config: RunConfig, run: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Call a part's builder with those of ``run`` and of the arguments that it takes."""
    names, takes_any = signature(part).parameters, accepted_arguments(part) is None
    chosen = {name: value for name, value in run.items() if name in names}
    chosen |= {name: value for name, value in arguments.items() if takes_any or name in names}
    return call_with(part, config.strategy, "strategy", chosen)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------------- table

TABLE_HEAD = (
    "strategy",
    "what it does",
    "keys or arguments of its own",
    "discloses beyond FedAvg",
    "models per client and round",
)


def table_rows() -> list[tuple[str, ...]]:
    """Return one row per built-in strategy, for `fedeas strategies` and docs/strategies.md."""
    return [_table_row(name, builtin, find_algorithm(name)) for name, builtin in STRATEGIES.items()]


def _table_row(name: str, builtin: BuiltinStrategy, algorithm: Algorithm) -> tuple[str, ...]:
    arguments = own_arguments(algorithm) | parse_arguments(builtin.arguments, "strategy")
    own = (*STRATEGY_KEYS.get(name, ()), *(f"{key}={value}" for key, value in arguments.items() if value is not None))
    discloses = algorithm.disclosure.what if algorithm.disclosure else algorithm.discloses
    return name, builtin.summary, ", ".join(own) or "none", discloses, f"{2 + algorithm.extra_models:g}"
