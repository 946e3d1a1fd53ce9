"""Log a run to Weights & Biases (the extra ``wandb``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedeas_flwr.callbacks.interface import curves
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import check_installed
from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import portable_config

_MODES = ("online", "offline", "disabled")


class WeightsAndBiases:
    """Logs the config without paths, every number of a round's record, and the summary.

    The W&B run has the id of the run directory, so a resumed run continues it. W&B ignores steps that it already has.
    ``mode`` is online, offline (write to the run directory, for `wandb sync`) or disabled; by default that of
    ``WANDB_MODE``.
    """

    def __init__(self, project: str = "fedeas", entity: str | None = None, mode: str | None = None) -> None:
        check_installed("wandb", "wandb", "callbacks = 'wandb'")
        mode = mode or os.environ.get("WANDB_MODE") or "online"
        if mode not in _MODES:
            raise ConfigError(f"callbacks = 'wandb(mode={mode})': mode must be {', '.join(_MODES)}")
        self.needs_network = mode == "online"
        self._where = {"project": str(project), "entity": entity, "mode": mode}
        self._run: Any = None

    def on_run_start(self, config: RunConfig) -> None:
        """Start the W&B run, or continue it."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        run = RunDirectory(Path(config.run_dir))
        self._run = wandb.init(
            **self._where,
            id=run.identity(),
            name=run.path.name,
            resume="allow" if self.needs_network else None,  # a file of its own for each part if offline
            dir=str(run.path),
            config=portable_config(config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a round."""
        self._run.log(dict(curves(record)), step=record["round"])

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Log the numbers of the summary, and finish the W&B run."""
        self._run.summary.update(dict(curves(summary, "summary/")))
        self._run.finish()
        self._run = None

    def close(self) -> None:
        """Mark the W&B run of a run that did not finish as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
