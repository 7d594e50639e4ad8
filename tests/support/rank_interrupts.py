"""Ctrl-C in runs on several ranks: how to start and interrupt them, and what must be true afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from run_helpers import num_lines, read_metrics, train_command, wait_for

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]

CTRL_C = 128 + signal.SIGINT
"""Exit code of a command that it ended."""


@contextmanager
def started(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`spurline train` as a shell starts it in the foreground, with the modules that this process has. log: what it
    says."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("w") as said:
        # A shell gives a group of its own to each command.
        process = subprocess.Popen(train_command(config), stdout=said, stderr=said, process_group=0, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def assert_the_step_is_finished_and_saved(
    changes: dict[str, Any], write_config: WriteConfig, spurline: Spurline, folder: Path
) -> None:
    """Interrupt a long run of this config after its first step; none of its processes is left, and it goes on."""
    run_dir, log = Path(changes["run_dir"]), folder / "log"
    config = write_config(changes | {"steps": 100_000, "checkpoint": {}})
    with started(config, log) as process:
        metrics = run_dir / "metrics.jsonl"
        wait_for(lambda: num_lines(metrics) > 0 or process.poll() is not None, "the first step")
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == CTRL_C, log.read_text()
    assert "and saving; press Ctrl-C again to stop now" in log.read_text()
    done = len(read_metrics(run_dir))
    assert (run_dir / f"checkpoints/step-{done:08d}").is_dir()
    wait_for(lambda: not any(process.is_running() for process in family), "the end of all processes", 25)
    code, out, _ = spurline("train", config, "--set", f"steps={done + 1}", "--allow-change", "steps")
    assert code == 0, out
    assert len(read_metrics(run_dir)) == done + 1


def assert_a_second_one_ends_it_at_once(changes: dict[str, Any], write_config: WriteConfig, folder: Path) -> None:
    """Interrupt twice a run of this config, whose third step stands still."""
    config, log = write_config(changes), folder / "log"
    with started(config, log) as process:
        saved = Path(changes["run_dir"]) / "checkpoints/step-00000002"
        wait_for(lambda: saved.is_dir() or process.poll() is not None, "two steps")
        # The next step has begun by then, and never ends.
        time.sleep(1)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: "press Ctrl-C again" in log.read_text(), "the answer to the first one", 10)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == CTRL_C, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    assert f"Stopped at once, after step 2. The last checkpoint is {saved}. Go on with: spurline train {config}" in said
    wait_for(lambda: not any(process.is_running() for process in family), "the end of all processes", 25)
