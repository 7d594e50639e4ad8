"""Signals to whole runs: one whose terminal closes saves its step."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import pytest
from run_helpers import Config, WriteConfig, num_lines, read_metrics, wait_for
from warm_runs import WarmRuns

pytestmark = pytest.mark.processes


def test_a_run_whose_terminal_closes_finishes_and_saves_its_step(
    warm_runs: WarmRuns, base_config: Config, write_config: WriteConfig
) -> None:
    base_config |= {"steps": 4000, "checkpoint": {}}
    run_dir = Path(base_config["run_dir"])
    ours, terminal = pty.openpty()
    run = warm_runs.start("train", write_config(base_config), output=os.ttyname(terminal))
    os.close(terminal)
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 3 or run.poll() is not None, "three steps")
    os.close(ours)
    for _ in range(2):
        os.kill(run.pid, signal.SIGHUP)
        time.sleep(0.1)
    assert run.wait(60) == 128 + signal.SIGHUP
    last = read_metrics(run_dir)[-1]["step"]
    assert (run_dir / f"checkpoints/step-{last:08d}").is_dir()
