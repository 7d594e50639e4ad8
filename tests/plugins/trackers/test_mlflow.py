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
from spurline_trackers.configs import MlflowTrackerConfig
from spurline_trackers.mlflow import ID_FILE, MlflowTracker


class DeletedExperiments:
    """A client of a store whose experiments, and so their runs, were all deleted."""

    def __init__(self, tracking_uri: str | None) -> None:
        pass

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7", lifecycle_stage="deleted")

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(lifecycle_stage="deleted"))


def standing_in(monkeypatch: pytest.MonkeyPatch, client: type) -> None:
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.__dict__.update(MlflowClient=client, MlflowException=type("MlflowException", (Exception,), {}))
    entities.__dict__.update(Param=SimpleNamespace, Metric=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)


@pytest.mark.parametrize("resume_step", [0, 2])
def test_a_deleted_experiment_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_step: int
) -> None:
    standing_in(monkeypatch, DeletedExperiments)
    (tmp_path / ID_FILE).write_text("a run\n")
    tracker = MlflowTracker(MlflowTrackerConfig(experiment="sorting"))
    with pytest.raises(ConfigError, match=r"'sorting' was deleted.*restore --experiment-id 7.*another name") as caught:
        tracker.start(RunInfo(tmp_path, resume_step, 4, {}))
    assert "Start the server" not in str(caught.value)


def test_what_mlflow_prints_at_the_end_leaves_stdout_to_the_progress_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Printing(DeletedExperiments):
        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7", lifecycle_stage="active")

        def create_run(self, experiment_id: str, **options: Any) -> Any:
            data = SimpleNamespace(to_proto=lambda: SimpleNamespace(metrics=[]))
            return SimpleNamespace(info=SimpleNamespace(run_id="a"), data=data)

        def set_terminated(self, run_id: str, status: str) -> None:
            print("View run at http://127.0.0.1:5000")

    standing_in(monkeypatch, Printing)
    tracker = MlflowTracker(MlflowTrackerConfig())
    tracker.start(RunInfo(tmp_path, 0, 4, {}))
    tracker.close()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "View run at http://127.0.0.1:5000\n")
