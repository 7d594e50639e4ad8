"""Trackers that send to a store: what it lacks reaches it once, in order, and never holds up training."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers import configs, sending
from spurline_trackers.mlflow import metric_name
from spurline_trackers.opentelemetry import instrument_name
from spurline_trackers.sending import NO_STEP, LastStep, SendingTracker


class ListTracker(SendingTracker):
    """A store in this process: the values by metric and step, each as often as it was written."""

    name = "list"
    fix = "Start the list."

    def __init__(self, values: list[tuple[str, int, float]]) -> None:
        super().__init__()
        self.values = values
        self.failures: list[Exception] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.finished: bool | None = None

    def open_run(self, info: RunInfo) -> LastStep:
        if self.failures:
            raise self.failures.pop()
        assert self.goes_on.wait(60)
        return lambda name: max((step for held, step, _ in self.values if held == name), default=NO_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.goes_on.wait(60)
        if self.failures:
            raise self.failures.pop()
        self.values += [(name, step, value) for name, value in metrics.items()]

    def close_run(self, *, is_finished: bool) -> None:
        self.finished = is_finished


def started(run_dir: Path, tracker: ListTracker, resume_step: int = 0) -> ListTracker:
    tracker.start(RunInfo(run_dir, resume_step, 4, {}))
    return tracker


def test_step_0_and_all_steps_reach_a_new_store_once(tmp_path: Path) -> None:
    tracker = started(tmp_path, ListTracker([]))
    tracker.log(0, {"eval/loss": 9.0})
    for step in range(1, 5):
        tracker.log(step, {"step": float(step), "loss": float(step)})
    tracker.close()
    tracker.close()
    assert tracker.values == [("eval/loss", 0, 9.0), *(("loss", step, float(step)) for step in range(1, 5))]
    assert tracker.finished is True


def test_a_resume_sends_what_the_store_lacks_and_nothing_that_it_holds(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0, "eval/loss": 2.5}, {"step": 3, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Step 2 was cut off by the kill, between two of its metrics.
    tracker = started(tmp_path, ListTracker([("loss", 1, 1.0), ("loss", 2, 2.0)]), resume_step=2)
    tracker.log(3, {"loss": 30.0})
    tracker.close()
    assert tracker.values == [("loss", 1, 1.0), ("loss", 2, 2.0), ("eval/loss", 2, 2.5), ("loss", 3, 30.0)]
    assert tracker.finished is False


def test_a_repeated_step_keeps_its_first_values(tmp_path: Path) -> None:
    tracker = started(tmp_path, ListTracker([("loss", 3, 3.0)]), resume_step=2)
    tracker.log(3, {"loss": 30.0})
    tracker.log(4, {"loss": 4.0})
    tracker.close()
    assert tracker.values == [("loss", 3, 3.0), ("loss", 4, 4.0)]


def test_a_store_that_fails_is_told_of_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = started(tmp_path, ListTracker([]))
    tracker.failures.append(ConnectionError("connection refused"))
    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 2.0})
    tracker.close()
    assert tracker.values == [("loss", 1, 1.0), ("loss", 2, 2.0)]
    assert "list: step 1 could not be sent: connection refused." in capsys.readouterr().err


def test_a_store_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sending, "_CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr(sending, "_LONGEST_QUEUE", 2)
    tracker = started(tmp_path, ListTracker([]))
    tracker.goes_on.clear()
    for step in range(1, 5):
        tracker.log(step, {"loss": float(step)})
    tracker.close()
    told = capsys.readouterr().err
    tracker.goes_on.set()
    assert "2 steps wait to be sent, so later ones are not kept" in told
    assert "2 steps were not sent. They are in metrics.jsonl" in told


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_is_down_at_the_start_is_an_error_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(sending, "_START_WAIT_S", 0.05)
    tracker = ListTracker([])
    if hangs:
        tracker.goes_on.clear()
    else:
        tracker.failures.append(ConnectionError("connection refused"))
    with pytest.raises(ConfigError, match=r"'list' cannot start a run: (no answer|connection refused).*Start the list"):
        started(tmp_path, tracker)
    tracker.close()
    tracker.goes_on.set()


def test_a_store_that_opens_after_the_start_gave_up_has_its_run_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_START_WAIT_S", 0.05)
    tracker = ListTracker([])
    tracker.goes_on.clear()
    with pytest.raises(ConfigError, match="no answer"):
        started(tmp_path, tracker)
    (opening,) = [thread for thread in threading.enumerate() if thread.name == "list-tracker"]
    tracker.goes_on.set()
    opening.join(10)
    assert tracker.finished is False


def test_a_time_limit_of_the_library_is_told_in_its_own_words(tmp_path: Path) -> None:
    tracker = ListTracker([])
    tracker.failures.append(TimeoutError("the read timed out"))
    with pytest.raises(ConfigError, match=r"cannot start a run: the read timed out\. Start the list"):
        started(tmp_path, tracker)


@pytest.mark.parametrize("kind", ["mlflow", "trackio", "swanlab", "opentelemetry", "prometheus"])
def test_a_missing_library_is_a_config_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class_name = "OpenTelemetry" if kind == "opentelemetry" else kind.capitalize()
    tracker: Any = getattr(importlib.import_module(f"spurline_trackers.{kind}"), f"{class_name}Tracker")
    libraries = {"opentelemetry": "opentelemetry.sdk.metrics.export", "prometheus": "prometheus_client"}
    monkeypatch.setitem(__import__("sys").modules, libraries.get(kind, kind), None)
    with pytest.raises(ConfigError, match=rf"pip install 'spurline-trackers\[{kind}\]'"):
        tracker(getattr(configs, f"{class_name}TrackerConfig")())


def test_names_become_what_the_store_takes() -> None:
    assert metric_name("eval/pass@4") == "eval/pass_4"
    assert metric_name("../a//b") == "a/b"
    assert instrument_name("eval/pass@4") == "spurline.eval/pass_4"
