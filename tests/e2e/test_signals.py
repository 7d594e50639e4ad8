"""Signals to whole runs: one whose code hangs ends all the same, and one whose terminal closes saves its step."""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from living_processes import is_alive
from reward_functions import in_process
from run_helpers import num_lines, read_metrics, wait_for
from warm_runs import WarmRuns

from spurline.run.endings.second_signal import TOGETHER_S

pytestmark = pytest.mark.processes

WriteConfig = Callable[[dict[str, Any]], Path]

HANGS_IN_C = """
from collections import deque
from itertools import repeat
from pathlib import Path

def score(answer):
    (Path(__file__).parent / "called").touch()
    # Lets no other thread run.
    deque(repeat(0), maxlen=0)
"""


def test_a_run_ends_whose_reward_never_gives_the_interpreter_back(
    warm_runs: WarmRuns, rl_config: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    rewards = tmp_path / "modules/hanging_rewards.py"
    rewards.write_text(HANGS_IN_C)
    rl_config["source"]["environment"]["rewards"] = {
        # A thread of the run's own process, not a worker that would be killed.
        "score": in_process("hanging_rewards:score")
    }
    rl_config["source"]["reward_weights"] = {}
    log = tmp_path / "log"
    run = warm_runs.start("train", write_config(rl_config), output=log)
    wait_for(lambda: (rewards.parent / "called").exists() or run.poll() is not None, "the first call of the reward")
    family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
    for _ in range(3):
        os.kill(run.pid, signal.SIGTERM)
        # Those that come together are one.
        time.sleep(4 * TOGETHER_S)
    assert run.wait(30) == -signal.SIGKILL, log.read_text()
    assert "Killed at the third signal, with all that it had started." in log.read_text()
    wait_for(lambda: not any(map(is_alive, family)), "the end of all processes", 25)


def test_a_run_whose_terminal_closes_finishes_and_saves_its_step(
    warm_runs: WarmRuns, base_config: dict[str, Any], write_config: WriteConfig
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
