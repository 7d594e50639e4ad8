"""Trackers that send to a store: steps reach it in order, and never hold up training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers import configs, mlflow, projects, sending, tensorboard
from spurline_trackers.opentelemetry import instrument_name
from spurline_trackers.sending import SendingTracker, kept_run_id, new_run_id


class ListTracker(SendingTracker):
    """A store in this process."""

    name = "list"
    fix = "Start the list."

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[str, int, float]] = []
        self.failures: list[Exception] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.finished: bool | None = None

    def open_run(self, info: RunInfo) -> None:
        if self.failures:
            raise self.failures.pop()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.goes_on.wait(60)
        if self.failures:
            raise self.failures.pop()
        self.values += [(name, step, value) for name, value in metrics.items()]

    def close_run(self, *, is_finished: bool) -> None:
        self.finished = is_finished


def started(run_dir: Path, resume_step: int = 0) -> ListTracker:
    tracker = ListTracker()
    tracker.start(RunInfo(run_dir, resume_step, 4, {}))
    return tracker


@pytest.mark.parametrize("last", [3, 4])
def test_steps_reach_the_store_in_order_and_it_is_told_whether_the_run_is_finished(tmp_path: Path, last: int) -> None:
    tracker = started(tmp_path)
    tracker.log(0, {"eval/loss": 9.0})
    for step in range(1, last + 1):
        tracker.log(step, {"step": float(step), "loss": float(step)})
    tracker.flush()
    tracker.close()
    tracker.close()
    assert tracker.values == [("eval/loss", 0, 9.0), *(("loss", step, float(step)) for step in range(1, last + 1))]
    assert tracker.finished is (last == 4)


def test_a_store_that_fails_is_reported_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = started(tmp_path)
    tracker.failures.append(ConnectionError("connection refused\nfrom there"))
    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 2.0})
    tracker.close()
    assert tracker.values == [("loss", 2, 2.0)]
    assert "list: step 1 could not be sent: connection refused." in capsys.readouterr().err


def test_a_store_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sending, "_CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr(sending, "_LONGEST_QUEUE", 2)
    tracker = started(tmp_path)
    tracker.goes_on.clear()
    for step in range(1, 5):
        tracker.log(step, {"loss": float(step)})
    tracker.close()
    reported = capsys.readouterr().err
    tracker.goes_on.set()
    assert "step 4 is left out" in reported
    assert "did not end within" in reported


def test_a_store_that_does_not_open_is_an_error_with_the_fix(tmp_path: Path) -> None:
    tracker = ListTracker()
    tracker.failures.append(ConnectionError("connection refused"))
    with pytest.raises(ConfigError, match=r"connection refused\. Start the list"):
        tracker.start(RunInfo(tmp_path, 0, 4, {}))
    tracker.close()


def test_a_resumed_run_keeps_its_id_and_one_that_starts_over_gets_another(tmp_path: Path) -> None:
    folder = tmp_path / "my run: 50% #1"
    folder.mkdir()

    def kept(resume_step: int) -> str:
        return kept_run_id(RunInfo(folder, resume_step, 10, {}), "id", partial(new_run_id, folder))

    run_id = kept(5)
    assert run_id.startswith("my-run-50-1-")
    assert kept(5) == run_id
    assert kept(0) != run_id


LIBRARIES: dict[str, tuple[Any, Any, str]] = {
    "mlflow": (mlflow.MlflowTracker, configs.MlflowTrackerConfig, "mlflow"),
    "trackio": (projects.TrackioTracker, configs.TrackioTrackerConfig, "trackio"),
    "tensorboard": (tensorboard.TensorboardTracker, configs.TensorboardTrackerConfig, "torch.utils.tensorboard"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_a_config_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tracker, config, library = LIBRARIES[name]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"pip install 'spurline-trackers\[{name}\]'"):
        tracker(config())


def test_names_become_what_the_store_takes() -> None:
    assert mlflow.metric_name("eval/pass@4") == "eval/pass_4"
    assert mlflow.metric_name("../a//b") == "a/b"
    assert instrument_name("eval/pass@4") == "spurline.eval/pass_4"
