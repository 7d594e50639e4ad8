"""What a user sees when a rank of a run fails, and that Ctrl-C finishes the step with all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from failing_losses import installed
from run_helpers import num_lines, on_ranks, read_metrics, train_command, wait_for

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]

pytestmark = pytest.mark.processes


@pytest.fixture
def failing(base_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config of a run whose rank 1 fails in its third step, after a checkpoint. Called with how, and settings of the
    backend."""

    def make(how: str, **backend: Any) -> dict[str, Any]:
        config = on_ranks(base_config | {"plugins": ["failing_losses"], "loss": {"name": "fails", "how": how}})
        return config | {"backend": config["backend"] | backend}

    with installed(tmp_path / "site", monkeypatch):
        yield make


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("value", 1, r"failed during `update`: ValueError: broken on purpose"),
        ("kill", 1, r"was killed by SIGKILL, as the system does when memory runs out, during `update`"),
        ("data", 2, r"rows.jsonl:3: prompt is empty. Remove the row."),
    ],
)
def test_the_rank_that_failed_is_named_and_how_to_go_on(
    spurline: Spurline, write_config: WriteConfig, failing: Any, how: str, code: int, said: str
) -> None:
    config = write_config(failing(how))
    began = psutil.Process().children(recursive=True)
    result, _, err = spurline("train", config)
    assert result == code
    assert said in err
    assert "ank 1 of 2 (process " in err
    assert ("Traceback" in err) == (how == "value")
    assert ("in _raises_a_value_error" in err) == (how == "value")
    run_dir = Path(failing(how)["run_dir"])
    go_on = f"The last checkpoint is {run_dir}/checkpoints/step-00000002. Go on with: spurline train {config}"
    assert (go_on in err) == (how != "data"), "an error of ours says itself what to do"
    assert len(read_metrics(run_dir)) == 2
    # The process that they are forked from stays for the next ones.
    left = set(psutil.Process().children(recursive=True)) - set(began)
    assert len(left) <= 1


def test_a_rank_that_stands_still_is_named_with_its_stack(
    spurline: Spurline, write_config: WriteConfig, failing: Any
) -> None:
    began = time.monotonic()
    code, _, err = spurline("train", write_config(failing("sleep", call_timeout_s=3)))
    assert time.monotonic() - began < 40
    assert code == 1
    assert "`update` was not done within 3 s, its limit by backend.call_timeout_s" in err
    assert "rank 1 of 2" in err
    assert "micro-batch 1 of 1" in err
    assert "in _stands_still" in err.partition("Stack of rank 1:")[2]


def test_ctrl_c_in_a_terminal_finishes_the_step_and_saves_it(
    base_config: dict[str, Any], write_config: WriteConfig, spurline: Spurline, tmp_path: Path
) -> None:
    run_dir = Path(base_config["run_dir"])
    config = write_config(on_ranks(base_config | {"steps": 100_000, "checkpoint": {}}))
    with (tmp_path / "log").open("w") as log:
        # A group of its own, as a shell gives to what it starts in the foreground.
        process = subprocess.Popen(train_command(config), stdout=log, stderr=log, process_group=0)
    try:
        metrics = run_dir / "metrics.jsonl"
        wait_for(lambda: num_lines(metrics) > 0 or process.poll() is not None, "the first step")
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT, (tmp_path / "log").read_text()
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    assert "and saving; press Ctrl-C again to stop now" in said
    done = len(read_metrics(run_dir))
    assert (run_dir / f"checkpoints/step-{done:08d}").is_dir()
    wait_for(lambda: not any(process.is_running() for process in family), "the end of all processes", 5)
    code, out, _ = spurline("train", config, "--set", f"steps={done + 1}", "--allow-change", "steps")
    assert code == 0, out
    assert len(read_metrics(run_dir)) == done + 1


def test_a_second_ctrl_c_ends_a_step_that_stands_still_at_once(
    failing: Any, write_config: WriteConfig, tmp_path: Path
) -> None:
    config = write_config(failing("sleep"))
    with (tmp_path / "log").open("w") as log:
        path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
        process = subprocess.Popen(
            train_command(config), stdout=log, stderr=log, process_group=0, env={**os.environ, "PYTHONPATH": path}
        )
    try:
        saved = Path(failing("sleep")["run_dir"]) / "checkpoints/step-00000002"
        wait_for(lambda: saved.is_dir() or process.poll() is not None, "two steps")
        # The next step has begun by then, and never ends.
        time.sleep(1)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: "press Ctrl-C again" in (tmp_path / "log").read_text(), "the answer to the first one", 10)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT, (tmp_path / "log").read_text()
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said
    assert f"Stopped at once, after step 2. The last checkpoint is {saved}. Go on with: spurline train {config}" in said
    wait_for(lambda: not any(process.is_running() for process in family), "the end of all processes", 5)
