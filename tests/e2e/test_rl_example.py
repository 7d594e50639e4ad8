"""The quickstart's reinforcement learning, from its own warm-up: nine in ten held-out prompts, whatever the seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import read_metrics

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2) if os.environ.get("SPURLINE_SOAK") else (0,)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_takes_a_weak_sorter_to_nine_in_ten(tmp_path: Path, seed: int) -> None:
    run(str(ROOT / "examples/make_tiny_model.py"), str(tmp_path / "tiny"), "--seed", str(seed))
    overrides = {"run_dir": tmp_path / "warmup", "model.path": tmp_path / "tiny", "seed": seed}
    train("sft_sort.yaml", overrides | {"steps": 180, "schedule": "constant", "evaluation.every_steps": "null"})
    overrides = {"run_dir": tmp_path / "rl", "model.path": tmp_path / "warmup/model", "seed": seed}
    train("rl_sort.yaml", overrides)
    before = read_metrics(tmp_path / "warmup")[-1]["eval/exact_match"]
    scores = [line["eval/pass@1"] for line in read_metrics(tmp_path / "rl") if "eval/pass@1" in line]
    assert 0.1 <= before <= 0.65, f"the warm-up should leave a model that is right now and then, not {before:.0%}"
    assert scores[-1] >= 0.9, (before, scores)
    assert (tmp_path / "rl/report.html").exists()


def train(example: str, overrides: dict[str, object]) -> None:
    options = [argument for key, value in overrides.items() for argument in ("--set", f"{key}={value}")]
    run("-m", "spurline.cli", "train", f"examples/{example}", *options)


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
