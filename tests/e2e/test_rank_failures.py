"""What a user sees when a rank fails, a checkpoint of ranks is damaged, or Ctrl-C comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_runs import ranks_of
from fake_plugins import install_plugin
from run_helpers import Config, KillableProcess, Spurline, on_ranks, read_metrics, train, wait_for

pytestmark = pytest.mark.processes


CTRL_C = 128 + signal.SIGINT
"""Exit code of a command that it ended."""


@pytest.fixture
def failing(base_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config of a run whose rank 1 fails in its third step, after a checkpoint. Called with how, and
    settings of the backend."""

    def make(how: str, **backend: Any) -> Config:
        return on_ranks(base_config | {"plugins": ["failing_losses"], "loss": {"name": "fails", "how": how}}, **backend)

    install_plugin(tmp_path / "site", monkeypatch, "failing_losses", "failing_losses")
    return make


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("value", 1, r"failed during `update`: ValueError: broken on purpose"),
        ("kill", 1, r"was killed by SIGKILL, as the system does when memory runs out, during `update`"),
        ("data", 2, r"rows.jsonl:3: prompt is empty. Remove the row."),
    ],
)
def test_the_rank_that_failed_is_named_and_how_to_go_on(
    spurline: Spurline, failing: Any, how: str, code: int, said: str
) -> None:
    config = failing(how)
    result, _, err = spurline("train", config)
    assert result == code
    assert said in err
    assert "ank 1 of 2 (process " in err
    assert ("Traceback" in err) == (how == "value")
    assert ("in _raises_a_value_error" in err) == (how == "value")
    run_dir = Path(config["run_dir"])
    go_on = f"The last checkpoint is {run_dir}/checkpoints/step-00000002. Go on with: spurline train {run_dir.parent}/"
    assert (go_on in err) == (how != "data"), "an error of ours says itself what to do"
    assert len(read_metrics(run_dir)) == 2
    assert ranks_of(os.getpid()) == []


def test_ctrl_c_in_a_terminal_finishes_the_step_and_saves_it(
    base_config: Config, killable_process: Callable[..., KillableProcess]
) -> None:
    run_dir = Path(base_config["run_dir"])
    config = on_ranks(base_config | {"steps": 100_000, "checkpoint": {}})
    process = killable_process(config, warm_children=True)
    process.wait_for_steps(1)
    family = psutil.Process(process.pid).children(recursive=True)
    # As a terminal sends it: to all processes of the group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == CTRL_C, process.said()
    assert "and saving; press Ctrl-C again to stop now" in process.said()
    done = len(read_metrics(run_dir))
    assert (run_dir / f"checkpoints/step-{done:08d}").is_dir()
    wait_for(lambda: not any(process.is_running() for process in family), "the end of all processes", 25)
    assert train(config, steps=done + 1, allow_change=["steps"]).step == done + 1


def test_a_second_ctrl_c_ends_a_step_that_stands_still_at_once(
    failing: Any, killable_process: Callable[..., KillableProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, standing = failing("sleep"), tmp_path / "standing"
    monkeypatch.setenv("STANDS_STILL", str(standing))
    process = killable_process(config, warm_children=True)
    saved = Path(config["run_dir"]) / "checkpoints/step-00000002"
    wait_for(lambda: standing.exists() or process.poll() is not None, "the third step, which never ends")
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: "press Ctrl-C again" in process.said(), "the answer to the first one", 10)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == CTRL_C, process.said()
    assert "Traceback" not in process.said()
    assert f"Stopped at once, after step 2. The last checkpoint is {saved}. Go on with: spur" in process.said()
    wait_for(lambda: not any(process.is_running() for process in family), "the end of all processes", 25)
