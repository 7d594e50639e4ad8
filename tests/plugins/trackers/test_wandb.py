"""The W&B tracker against a recording stand-in: the real service needs an account."""

from __future__ import annotations

import atexit
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers import wandb
from spurline_trackers.configs import WandbTrackerConfig
from spurline_trackers.run_id import stored_run_id
from spurline_trackers.wandb import ID_FILE, WandbTracker


class RecordingRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.num_finishes = 0
        self.finishing = lambda: None

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.num_finishes += 1
        self.finishing()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RecordingRun]:
    """Every run that was opened, in order."""
    opened: list[RecordingRun] = []

    def init(**options: Any) -> RecordingRun:
        opened.append(RecordingRun(**options))
        return opened[-1]

    module = types.ModuleType("wandb")
    module.__dict__.update(init=init, Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


def opened_tracker(run_dir: Path, resume_step: int = 0, **settings: Any) -> WandbTracker:
    tracker = WandbTracker(WandbTrackerConfig(**settings))
    tracker.start(RunInfo(run_dir, resume_step, 10, {"seed": 1}))
    return tracker


def test_settings_config_and_metrics_reach_the_run(tmp_path: Path, runs: list[RecordingRun]) -> None:
    tracker = opened_tracker(tmp_path, project="p", entity="team", mode="offline")
    tracker.log(1, {"loss": 2.0})
    tracker.flush()
    tracker.close()
    tracker.close()
    (run,) = runs
    assert run.options["project"] == "p"
    assert run.options["entity"] == "team"
    assert run.options["mode"] == "offline"
    assert run.options["name"] == tmp_path.name
    assert run.options["config"] == {"seed": 1}
    assert run.options["resume"] == "allow"
    assert run.logged == [(1, {"loss": 2.0})]
    assert run.num_finishes == 1


def test_a_resumed_run_continues_under_the_stored_id(tmp_path: Path, runs: list[RecordingRun]) -> None:
    opened_tracker(tmp_path).close()
    opened_tracker(tmp_path, resume_step=5).close()
    assert runs[0].options["id"] == runs[1].options["id"] == (tmp_path / "wandb_run_id").read_text().strip()


def test_a_run_that_starts_over_gets_a_new_id(tmp_path: Path, runs: list[RecordingRun]) -> None:
    opened_tracker(tmp_path).close()
    opened_tracker(tmp_path).close()
    assert runs[0].options["id"] != runs[1].options["id"]


def test_the_id_holds_only_characters_that_wandb_accepts(tmp_path: Path) -> None:
    folder = tmp_path / "my run: 50% #1"
    folder.mkdir()
    run_id = stored_run_id(folder, ID_FILE, is_resumed=False)
    assert run_id.startswith("my-run-50-1-")
    assert not set(run_id) & set("/\\#?%: ")


def test_the_id_is_stored_before_the_run_is_opened(tmp_path: Path, runs: list[RecordingRun]) -> None:
    def refuse(**options: Any) -> RecordingRun:
        assert (tmp_path / "wandb_run_id").read_text().strip() == options["id"]
        raise sys.modules["wandb"].Error("no API key.")

    sys.modules["wandb"].init = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no API key") as caught:
        opened_tracker(tmp_path)
    assert "mode: offline" in str(caught.value)


def test_a_service_that_does_not_answer_holds_up_neither_the_end_of_the_run_nor_of_the_process(
    tmp_path: Path, runs: list[RecordingRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "0.02")
    monkeypatch.setattr(wandb, "_SLACK_S", 0.03)
    module: Any = sys.modules["wandb"]
    open_run, unregister = module.init, atexit.unregister

    def init(**options: Any) -> RecordingRun:
        atexit.register(waiting.wait, 60)
        return open_run(**options)

    module.init = init
    waiting = threading.Event()
    undone: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", lambda hook: (undone.append(hook), unregister(hook)))
    tracker = opened_tracker(tmp_path)
    runs[0].finishing = lambda: waiting.wait(60)
    tracker.close()
    assert not waiting.is_set()
    assert undone == [waiting.wait]
    threads = [thread for thread in threading.enumerate() if thread.name == "wandb-tracker"]
    assert [thread.daemon for thread in threads] == [True]
    waiting.set()
    told = capsys.readouterr().err
    assert f"did not take the rest of the run within 0.02 s (WANDB_FINISH_TIMEOUT). It is in {tmp_path}/wandb" in told


def test_a_run_that_wandb_cannot_finish_is_told_of_and_is_no_failure(
    tmp_path: Path, runs: list[RecordingRun], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConnectionResetError("the service is gone")

    tracker = opened_tracker(tmp_path)
    runs[0].finishing = fail
    tracker.close()
    assert "could not finish its run (ConnectionResetError: the service is gone)" in capsys.readouterr().err


def test_a_missing_library_is_a_config_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'spurline-trackers\[wandb\]'"):
        WandbTracker(WandbTrackerConfig())
