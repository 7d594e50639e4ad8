"""The W&B tracker against a recording stand-in: the real service needs an account."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import WandbTrackerConfig
from spurline_trackers.projects import WandbTracker


class RecordingRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.num_finishes = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.num_finishes += 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RecordingRun]:
    """Every run that was opened, in order."""
    opened: list[RecordingRun] = []

    def init(**options: Any) -> RecordingRun:
        opened.append(RecordingRun(**options))
        return opened[-1]

    module = types.ModuleType("wandb")
    module.__dict__.update(init=init)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


def opened_tracker(run_dir: Path, resume_step: int = 0, **settings: Any) -> WandbTracker:
    tracker = WandbTracker(WandbTrackerConfig(**settings))
    tracker.start(RunInfo(run_dir, resume_step, 10, {"seed": 1}))
    return tracker


def test_settings_config_and_metrics_reach_the_run(tmp_path: Path, runs: list[RecordingRun]) -> None:
    tracker = opened_tracker(tmp_path, project="p", entity="team", mode="offline")
    tracker.log(1, {"loss": 2.0})
    tracker.close()
    (run,) = runs
    expected = {
        "project": "p",
        "entity": "team",
        "mode": "offline",
        "name": tmp_path.name,
        "config": {"seed": 1},
        "resume": "allow",
    }
    assert expected.items() <= run.options.items()
    assert run.logged == [(1, {"loss": 2.0})]
    assert run.num_finishes == 1


def test_a_service_that_refuses_is_an_error_with_the_fix_after_the_id_is_stored(
    tmp_path: Path, runs: list[RecordingRun]
) -> None:
    def refuse(**options: Any) -> RecordingRun:
        assert (tmp_path / "wandb_run_id").read_text().strip() == options["id"]
        raise RuntimeError("no API key.")

    sys.modules["wandb"].init = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"no API key\..*mode: offline"):
        opened_tracker(tmp_path)
