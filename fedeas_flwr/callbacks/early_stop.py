"""End a run when it has reached a target accuracy, or has not improved for some rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedeas_flwr.callbacks.interface import StopRun
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig


class EarlyStop:
    """Ends a run by its accuracy; a resumed run counts the rounds before it was interrupted.

    The first round that reaches the accuracy ``target``, from 0 to 1, is the last, and so is the last of ``patience``
    rounds in a row without a new best accuracy.
    """

    def __init__(self, target: float | None = None, patience: int | None = None) -> None:
        if target is None and patience is None:
            raise ConfigError("callbacks = 'early-stop': needs target, patience or both, as in early-stop(target=0.8)")
        if target is not None and not (type(target) in (int, float) and 0 < target <= 1):
            raise ConfigError(f"callbacks = 'early-stop(target={target})': target must be 0 < x ≤ 1")
        if patience is not None and not (type(patience) is int and patience >= 1):
            raise ConfigError(f"callbacks = 'early-stop(patience={patience})': patience must be a whole number ≥ 1")
        self._target, self._patience = target, patience
        self._best, self._best_round = -1.0, 0

    def on_run_start(self, config: RunConfig, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Look at the rounds already done; raise `StopRun` if the last of them ends the run."""
        self._best, self._best_round = -1.0, 0
        for record in rounds[:-1]:
            self._note(record)
        for record in rounds[-1:]:
            self.on_round_end(record)

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Raise `StopRun` if this round ends the run."""
        self._note(record)
        accuracy, number = record["accuracy"], record["round"]
        if self._target is not None and accuracy >= self._target:
            raise StopRun(f"accuracy {accuracy:.4f} has reached target = {self._target:g}")
        if self._patience is not None and number - self._best_round >= self._patience:
            best = f"{self._best:.4f} of round {self._best_round}"
            raise StopRun(f"patience = {self._patience} rounds without an accuracy above {best}")

    def _note(self, record: Mapping[str, Any]) -> None:
        if record["accuracy"] > self._best:
            self._best, self._best_round = record["accuracy"], record["round"]
