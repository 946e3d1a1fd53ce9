"""Log a run to MLflow (the extra ``mlflow``)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedeas_flwr.callbacks.interface import curves
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import check_installed
from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import portable_config

_MAX_PARAMS = 100
"""Number of parameters that MLflow accepts in one request."""
_TAG = "fedeas.run"
"""Tag of an MLflow run with the id of its run directory."""


class MLflow:
    """Logs the config without paths, every number of a round's record, and the summary.

    The MLflow run is tagged with the id of the run directory. A resumed run finds it by the tag, and continues it after
    its last round. A missing ``experiment`` is created. ``uri`` is that of the tracking server, such as
    http://localhost:5000, or an absolute path; by default that of ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, experiment: str = "fedeas", uri: str = "") -> None:
        check_installed("mlflow", "mlflow", "callbacks = 'mlflow'")
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if "://" not in self._uri and not Path(self._uri).is_absolute():  # the ServerApp starts in another folder
            raise ConfigError(
                f"callbacks = 'mlflow(uri={self._uri})': uri, or MLFLOW_TRACKING_URI, must be the address of a "
                "tracking server, such as http://localhost:5000, or an absolute path"
            )
        self.needs_network = "://" in self._uri and not self._uri.startswith(("file://", "sqlite://"))
        self._experiment = str(experiment)
        self._client: Any = None
        self._run, self._logged, self._ended = "", 0, False

    def on_run_start(self, config: RunConfig) -> None:
        """Create the MLflow run, or continue it."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        run, client = RunDirectory(Path(config.run_dir)), MlflowClient(tracking_uri=self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._experiment)
        if found := client.search_runs([experiment], f"tags.`{_TAG}` = '{run.identity()}'"):
            self._run, self._logged = found[0].info.run_id, int(found[0].data.metrics.get("round", 0))
            client.update_run(self._run, status="RUNNING")
        else:
            self._run = client.create_run(experiment, tags={_TAG: run.identity()}, run_name=run.path.name).info.run_id
            params = [Param(key, str(value)) for key, value in portable_config(config).items()]
            for first in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._run, params=params[first : first + _MAX_PARAMS])
        self._client = client

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a round, unless they were logged before the run was resumed."""
        if record["round"] > self._logged:
            self._log({"round": record["round"], **dict(curves(record))}, record["round"])

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Log the numbers of the summary, and mark the MLflow run as finished."""
        self._log(dict(curves(summary, "summary/")), summary["rounds"])
        self._client.set_terminated(self._run, "FINISHED")
        self._ended = True

    def close(self) -> None:
        """Mark the MLflow run of a run that did not finish as failed."""
        if self._client is not None and not self._ended:
            self._client.set_terminated(self._run, "FAILED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])
