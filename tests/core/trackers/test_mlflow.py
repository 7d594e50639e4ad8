"""The MLflow tracker against a stand-in: the kill test of trackers has the real one."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline.trackers.configs import MlflowTrackerConfig
from spurline.trackers.mlflow import ID_FILE, MlflowTracker


class DeletedExperiments:
    """A client of a store whose experiments, and so their runs, were all deleted."""

    def __init__(self, tracking_uri: str | None) -> None:
        pass

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7", lifecycle_stage="deleted")

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(lifecycle_stage="deleted"))


@pytest.mark.parametrize("resume_step", [0, 2])
def test_a_deleted_experiment_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_step: int
) -> None:
    module = types.ModuleType("mlflow")
    module.__dict__.update(MlflowClient=DeletedExperiments, MlflowException=type("MlflowException", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.ModuleType("mlflow.entities"))
    (tmp_path / ID_FILE).write_text("a run\n")
    tracker = MlflowTracker(MlflowTrackerConfig(experiment="sorting"))
    with pytest.raises(ConfigError, match=r"'sorting' was deleted.*restore --experiment-id 7.*another name") as caught:
        tracker.start(RunInfo(tmp_path, resume_step, 4, {}))
    assert "Start the server" not in str(caught.value)
