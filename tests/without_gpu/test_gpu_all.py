"""`benchmarks/gpu_all.py` tries a GPU out by one command. Here it runs on the CPU, with phases that hang and crash."""

from __future__ import annotations

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


def phase(name: str, code: str, limit_s: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": ["-c", code], "limit_s": limit_s, "least_s": 1, **more}


def gpu_all(out: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_all.py"), "--out", str(out), "--device", "cpu", "--tiny"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=500)


def results(out: Path) -> dict[str, dict[str, Any]]:
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {result["phase"]: result for result in map(json.loads, lines)}


@pytest.mark.timeout(600)
def test_phases_that_hang_crash_or_come_too_late_are_said_and_lose_nothing(tmp_path: Path) -> None:
    extra = [
        phase("fits", "print('{\"speed\": 12.5}')", 60),
        phase("crashes", "print('{\"seen\": 7}'); raise RuntimeError('out of luck')", 60),
        phase("hangs", SPAWNS, 4),
        phase("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, shares=True),
        phase("late", "print('{}')", 60, least_s=100_000),
        phase("lacks", "print('{}')", 60, missing="not installed: vllm"),
    ]
    (tmp_path / "extra.json").write_text(json.dumps(extra), encoding="utf-8")
    names = [one["name"] for one in extra]
    chosen = ["sft-tiny-all-strong-loop"]
    arguments = ["--budget", 450, "--patience", 4, "--extra-phases", tmp_path / "extra.json", "--only", *names, *chosen]
    out = tmp_path / "out"
    began = time.monotonic()
    done = gpu_all(out, *arguments)
    assert time.monotonic() - began < 460
    assert done.returncode == 1, done.stderr
    found = results(out)
    assert {name: result["status"] for name, result in found.items()} == {
        "fits": "ok",
        "crashes": "failed",
        "hangs": "timeout",
        "dies": "failed",
        "late": "skipped",
        "lacks": "skipped",
        **dict.fromkeys(chosen, "ok"),
    }, (out / "log.txt").read_text(encoding="utf-8")
    assert found["fits"]["figures"] == {"speed": 12.5}
    assert found["crashes"]["figures"] == {"seen": 7}
    assert "RuntimeError: out of luck" in found["crashes"]["error"]
    assert found["hangs"]["seconds"] < 60
    assert not psutil.pid_exists(found["hangs"]["figures"]["child"]), "a process of a phase outlived its limit"
    assert found["sft-tiny-all-strong-loop"]["figures"]["tokens_per_s"] > 0
    table = (out / "table.md").read_text(encoding="utf-8")
    assert "| crashes | failed | " in table
    assert "exit code 1: RuntimeError: out of luck" in table
    assert "no time: " in table
    assert "not installed: vllm" in table
    assert "| tiny | all | strong loop | " in table
    assert "Qwen3-TINY" in (out / "gpu-results.md").read_text(encoding="utf-8")
    # What was ok is not done again, and the table keeps it.
    again = gpu_all(out, *arguments, "--skip-done")
    assert "strong-loop" not in again.stdout
    assert "1/5 crashes failed" in again.stdout
    assert "| tiny | all | strong loop | " in (out / "table.md").read_text(encoding="utf-8")


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
