"""The built-in callbacks by name, and the callbacks of a run: open them, call them, survive their failures."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any

from fedeas_flwr.callbacks.interface import METHODS, StopRun
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import (
    accepted_arguments,
    call_with,
    describe_error,
    import_object,
    is_import_path,
    parse_arguments,
)
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig

BUILTIN = {
    "tensorboard": "fedeas_flwr.callbacks.tensorboard:TensorBoard",
    "wandb": "fedeas_flwr.callbacks.wandb:WeightsAndBiases",
    "mlflow": "fedeas_flwr.callbacks.mlflow:MLflow",
    "early-stop": "fedeas_flwr.callbacks.early_stop:EarlyStop",
    "metrics": "fedeas_flwr.callbacks.metrics:MetricsEndpoint",
}
"""Name in the key `callbacks` → import path."""
_CALL = r"\s*([^\s,()]+)\s*(?:\(([^()]*)\)\s*)?"

log = logging.getLogger("flwr").log


def open_callbacks(value: str) -> Callbacks:
    """Return the callbacks that a value of the key `callbacks` names; raise `ConfigError` if one cannot be created."""
    if value.strip() and not re.fullmatch(f"{_CALL}(?:,{_CALL})*", value):
        example = "'tensorboard, early-stop(target=0.8 patience=10)'"
        raise ConfigError(f"callbacks = {value!r}: must be names or import paths, separated by commas, as in {example}")
    return Callbacks([(name, _open(name, arguments)) for name, arguments in re.findall(_CALL, value)])


def _open(name: str, arguments: str) -> Any:
    path = BUILTIN.get(name, name)
    if not is_import_path(path):
        near = difflib.get_close_matches(name.lower(), BUILTIN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"callbacks = {name!r}: must be {', '.join(BUILTIN)} or package.module:name{hint}")
    given = parse_arguments(arguments, f"callbacks: arguments of {name}")
    callback = call_with(import_object(path, "callbacks"), name, "callbacks", given, "callbacks")
    if not any(callable(getattr(callback, method, None)) for method in METHODS):
        raise ConfigError(
            f"callbacks: {name!r} returned {one_line(repr(callback), 80)}, without any of {', '.join(METHODS)}"
        )
    return callback


class Callbacks:
    """The callbacks of a run, by name.

    The first failure of a callback is logged as a warning, later ones are not. It is called again: the next call may
    succeed.
    """

    def __init__(self, callbacks: Sequence[tuple[str, Any]]) -> None:
        self._callbacks = callbacks
        self.warnings: dict[str, str] = {}
        """Name of each callback that failed → method and error of its first failure, in one line."""

    @property
    def names(self) -> list[str]:
        """Return the names of the callbacks."""
        return [name for name, _ in self._callbacks]

    @property
    def need_network(self) -> list[str]:
        """Return the names of the callbacks that need the machine's network."""
        return [name for name, callback in self._callbacks if getattr(callback, "needs_network", False)]

    def start_run(self, config: RunConfig, rounds: Sequence[Mapping[str, Any]]) -> str:
        """Tell that the run starts after these recorded ``rounds``; return why it should stop at once, if it should."""
        reason = self._call("on_run_start", config, rounds=rounds)
        return reason if rounds else ""

    def end_round(self, record: Mapping[str, Any]) -> str:
        """Tell that a round ended; return why it should be the last one, or an empty string."""
        return self._call("on_round_end", record)

    def end_run(self, summary: Mapping[str, Any]) -> None:
        """Tell that the run finished."""
        self._call("on_run_end", summary)

    def close(self) -> None:
        """Close the callbacks."""
        self._call("close")

    def _call(self, method: str, *given: Any, **optional: Any) -> str:
        """Call a method of every callback that has it, with the optional arguments that it has; return why to stop."""
        reasons = []
        for name, callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is None:
                continue
            try:
                accepted = accepted_arguments(function)
                function(*given, **{key: value for key, value in optional.items() if accepted and key in accepted})
            except StopRun as stop:
                reasons.append(f"{name}: {one_line(stop)}")
            except (Exception, SystemExit) as error:  # custom code may raise anything
                if name not in self.warnings:
                    self.warnings[name] = f"{method}: {describe_error(error)}"
                    log(WARNING, "callback %s failed in %s", name, self.warnings[name])
        return "; ".join(reasons)
