"""MLflow: one run in an experiment, whose id is kept in RUN_DIR/mlflow_run_id.

Metrics go under their own names; settings become parameters. The library is imported when the tracker is built.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

from spurline.errors import ConfigError, Problem
from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import MlflowTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.run_id import earlier_run_id, store_run_id
from spurline_trackers.sending import NO_STEP, LastStep, SendingTracker

ID_FILE = "mlflow_run_id"
"""Name of the file inside the run directory that holds the MLflow run id."""

# MLflow retries for four minutes by default, in which a start says nothing.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# Of one request.
_MOST_METRICS = 1000
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 6000
_LONGEST_NAME = 250


class MlflowTracker(SendingTracker):
    """Send metrics to an MLflow server or database."""

    name = "mlflow"
    fix = "Start the server that trackers.mlflow.tracking_uri or MLFLOW_TRACKING_URI names, or give `sqlite:///mlflow.db`."

    def __init__(self, config: MlflowTrackerConfig) -> None:
        super().__init__()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._mlflow = tracker_library("mlflow")
        self._entities = tracker_library("mlflow", "mlflow.entities")
        self._config = config
        self._client: Any = None
        self._run_id = ""
        self._sending: tuple[int, int] = (NO_STEP, 0)

    def open_run(self, info: RunInfo) -> LastStep:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._config.tracking_uri)
        run = self._earlier_run(info) or self._new_run(info)
        self._run_id = run.info.run_id
        # Parameters cannot change in MLflow: those of the first start stand.
        steps = {metric.key: int(metric.step) for metric in run.data.to_proto().metrics}
        return lambda name: steps.get(metric_name(name), NO_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._sending[0] != step:
            self._sending = (step, time.time_ns() // 1_000_000)
        # A second try with the same time stands there once: MLflow tells values apart by name, step, time and value.
        values = {metric_name(name): float(value) for name, value in metrics.items()}
        entries = [self._entities.Metric(name, value, self._sending[1], step) for name, value in values.items()]
        for part in _parts(entries, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def close_run(self, *, is_finished: bool) -> None:
        # Stdout belongs to the progress of the run; MLflow tells the address of its page there.
        with redirect_stdout(sys.stderr):
            self._client.set_terminated(self._run_id, status="FINISHED" if is_finished else "KILLED")

    def _earlier_run(self, info: RunInfo) -> Any:
        """The run that is resumed; None where the store has none, such as another store than before."""
        run_id = earlier_run_id(info, ID_FILE)
        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run

    def _new_run(self, info: RunInfo) -> Any:
        name = self._config.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage != "active":
            raise _deleted(name, experiment.experiment_id)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_name = self._config.display_name(info.run_dir)
        run = self._client.create_run(experiment_id, run_name=run_name, tags=dict(self._config.tags))
        store_run_id(info.run_dir, ID_FILE, run.info.run_id)
        settings = {metric_name(key): str(value)[:_LONGEST_PARAMETER] for key, value in _flat(info.config)}
        for part in _parts([self._entities.Param(*setting) for setting in settings.items()], _MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=part)
        return run


def _deleted(name: str, experiment_id: str) -> ConfigError:
    text = (
        f"'mlflow' cannot start a run: the experiment '{name}' was deleted, and MLflow keeps its name. Restore it "
        f"(mlflow experiments restore --experiment-id {experiment_id}, where MLFLOW_TRACKING_URI is its store), or "
        "give another name in trackers.mlflow.experiment."
    )
    return ConfigError([Problem("trackers", text)])


def metric_name(name: str) -> str:
    """The name as MLflow takes it: characters that it refuses become `_`, and the parts of it are no `.`, `..` or
    nothing."""
    parts = re.sub(r"[^\w. :/-]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part for part in parts if part.strip(".")).strip()[:_LONGEST_NAME] or "_"


def _parts(entries: list[Any], size: int) -> Iterator[list[Any]]:
    return (entries[first : first + size] for first in range(0, len(entries), size))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their path: `optimizer.learning_rate`, `data.train.0.path`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(entry, Mapping) for entry in value):
            yield from _flat(_numbered(value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _numbered(values: Iterable[Any]) -> dict[str, Any]:
    return {str(position): value for position, value in enumerate(values)}
