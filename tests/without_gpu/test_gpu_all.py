"""`benchmarks/gpu_all.py` tries a GPU out by one command. Here it runs on the CPU, with phases that hang and crash."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.processes

SPAWNS = """
import subprocess, sys, time
print('{"half": 1}', flush=True)
# A session of its own, as ranks and engines have.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print('{"child": %d}' % child.pid, flush=True)
time.sleep(600)
"""
SLEEPS = """
import os, time
print('{"pid": %d}' % os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that runs phases."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_phases.runner")


def results(out: Path) -> dict[str, dict[str, Any]]:
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {result["phase"]: result for result in map(json.loads, lines)}


def run_phases(runner: Any, out: Path, budget_s: float, phases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run phases of Python code, one at a time, and return their results as they are on the disk."""
    table = importlib.import_module("gpu_phases.table")
    made = [runner.Phase(**{"least_s": 1, "about": {"kind": "extra"}, **phase}) for phase in phases]
    for _ in runner.run_phases(made, runner.Record(out, table.write_tables), budget_s, 2):
        pass
    return results(out)


def phase(name: str, code: str, limit_s: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": ("-c", code), "limit_s": limit_s, **more}


def test_phases_that_hang_crash_or_come_too_late_are_said_and_lose_nothing(runner: Any, tmp_path: Path) -> None:
    phases = [
        phase("fits", "print('{\"speed\": 12.5}')", 60),
        phase("crashes", "print('{\"seen\": 7}'); raise RuntimeError('out of luck')", 60),
        phase("hangs", SPAWNS, 4),
        phase("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, shares=True),
        phase("late", "print('{}')", 60, least_s=100_000),
        phase("lacks", "print('{}')", 60, missing="not installed: vllm"),
        phase("last", "import time; time.sleep(600)", 500),
    ]
    began = time.monotonic()
    found = run_phases(runner, tmp_path, 25, phases)
    assert time.monotonic() - began < 40
    assert {name: result["status"] for name, result in found.items()} == {
        "fits": "ok",
        "crashes": "failed",
        "hangs": "timeout",
        "dies": "failed",
        "late": "skipped",
        "lacks": "skipped",
        "last": "cut",
    }
    assert found["fits"]["figures"] == {"speed": 12.5}
    assert found["crashes"]["figures"] == {"seen": 7}
    assert "RuntimeError: out of luck" in found["crashes"]["error"]
    assert not psutil.pid_exists(found["hangs"]["figures"]["child"]), "a process of a phase outlived its limit"
    assert "the budget was over" in found["last"]["error"]
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| crashes | failed | " in table
    assert "exit code 1: RuntimeError: out of luck" in table
    assert "no time: " in table
    assert "not installed: vllm" in table


def test_a_process_that_cannot_be_killed_holds_up_nothing(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a driver."""
    monkeypatch.setattr(runner, "GONE_WITHIN_S", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(runner.os, "killpg", lambda *_: None)
        found = run_phases(runner, tmp_path, 60, [phase("stuck", SLEEPS, 4), phase("next", "print('{\"a\": 1}')", 30)])
    psutil.Process(found["stuck"]["figures"]["pid"]).kill()
    assert found["stuck"]["status"] == "failed"
    assert "could not be killed" in found["stuck"]["error"]
    assert found["next"]["status"] == "ok"


@pytest.mark.timeout(600)
def test_the_command_measures_on_a_cpu_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_all.py"), "--out", str(tmp_path), "--device", "cpu", "--tiny"]
    command += ["--patience", "4", "--budget", "450", "--only"]
    chosen = ["device", "sft-tiny-all-strong-loop", "weights-disk"]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False, timeout=500)
    found = results(tmp_path)
    said = done.stdout + (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert {name: result["status"] for name, result in found.items()} == dict.fromkeys(chosen, "ok"), said
    assert done.returncode == 0
    assert found["sft-tiny-all-strong-loop"]["figures"]["tokens_per_s"] > 0
    assert "Qwen3-TINY" in (tmp_path / "gpu-results.md").read_text(encoding="utf-8")
    # What was ok is not done again, and the table keeps it.
    again = subprocess.run([*command, *chosen, "--skip-done"], capture_output=True, text=True, check=True, timeout=100)
    assert "ok" not in again.stdout
    assert "| tiny | all | strong loop | " in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_every_smoke_run_and_every_training_candidate_is_a_valid_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are checked for a GPU too, which this machine does not have."""
    from spurline import load_config

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_sft
    from gpu_phases import smoke

    for name in smoke.SMOKES:
        for device in ("cpu", "cuda"):
            for config, settings in smoke.commands(name, device, False, tmp_path):
                load_config(config, settings)
    monkeypatch.setattr(gpu_sft, "capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_sft, "find_spec", lambda _: True)
    for train in ("all", "lora", "qlora"):
        job = gpu_sft.job_of("0.6b", "cuda", 1, train)
        for settings in gpu_sft.candidates(job).values():
            load_config(gpu_sft.run_settings(job, tmp_path, settings))
