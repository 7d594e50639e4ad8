"""Send metrics to an MLflow run, and the settings of the training run as its parameters.

The id of the MLflow run is kept in RUN_DIR/mlflow_run_id.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import MlflowTrackerConfig
from spurline_trackers.sending import SendingTracker, kept_run_id, tracker_library

ID_FILE = "mlflow_run_id"

_ENVIRONMENT = {
    # By default MLflow tries to connect for four minutes, without a message.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# MLflow's limits for one request.
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000
_LONGEST_NAME = 250


class MlflowTracker(SendingTracker):
    """A tracker that sends metrics to an MLflow server or database."""

    name = "mlflow"
    fix = (
        "Start the server that trackers.mlflow.tracking_uri or MLFLOW_TRACKING_URI names, or set "
        "trackers.mlflow.tracking_uri to `sqlite:///mlflow.db` for a local database. "
        f"If the run was deleted there, remove {ID_FILE} from the run directory."
    )

    def __init__(self, config: MlflowTrackerConfig) -> None:
        super().__init__()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._mlflow = tracker_library("mlflow")
        self._entities = tracker_library("mlflow", "mlflow.entities")
        self._config = config
        self._client: Any = None
        self._run_id = ""

    def open_run(self, info: RunInfo) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._config.tracking_uri)
        self._run_id = kept_run_id(info, ID_FILE, partial(self._create_run, info))
        self._client.update_run(self._run_id, status="RUNNING")

    def _create_run(self, info: RunInfo) -> str:
        name = self._config.experiment
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_name = self._config.display_name(info.run_dir)
        run = self._client.create_run(experiment_id, run_name=run_name, tags=dict(self._config.tags))
        settings = {metric_name(key): str(value)[:_LONGEST_PARAMETER] for key, value in _flat(info.config)}
        for part in _parts([self._entities.Param(*setting) for setting in settings.items()], _MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=part)
        return run.info.run_id

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        values = {metric_name(name): value for name, value in metrics.items()}
        entries = [self._entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        for part in _parts(entries, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def close_run(self, *, is_finished: bool) -> None:
        # MLflow prints the address of its page, but stdout is reserved for the progress of the run.
        with redirect_stdout(sys.stderr):
            self._client.set_terminated(self._run_id, status="FINISHED" if is_finished else "KILLED")


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts. Characters that it refuses become `_`, and parts such as `..` are removed."""
    parts = re.sub(r"[^\w. :/-]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part for part in parts if part.strip(".")).strip()[:_LONGEST_NAME] or "_"


def _parts(entries: list[Any], size: int) -> Iterator[list[Any]]:
    return (entries[first : first + size] for first in range(0, len(entries), size))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
