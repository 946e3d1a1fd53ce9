"""Write a run's rounds for TensorBoard (the extra ``tensorboard``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedeas_flwr.callbacks.interface import curves
from fedeas_flwr.common.import_path import check_installed
from fedeas_flwr.config import RunConfig


class TensorBoard:
    """Writes every number of a round's record to the folder ``tensorboard`` of the run directory."""

    def __init__(self) -> None:
        check_installed("tensorboard", "tensorboard", "callbacks = 'tensorboard'")
        self._writer: Any = None

    def on_run_start(self, config: RunConfig, rounds: Sequence[Mapping[str, Any]]) -> None:
        """Open the log; what an interrupted run wrote after these ``rounds`` is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(Path(config.run_dir) / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=len(rounds) + 1)  # type: ignore[no-untyped-call, unused-ignore]

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a round."""
        for name, value in curves(record):
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
