"""The quickstart's reinforcement learning, from its own warm-up: nine in ten held-out prompts, whatever the seed, and
whether one process trains or ranks. In every run it has fewer steps, and gets that much less far."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from every_run import SOAK
from run_helpers import Spurline, read_metrics

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2) if SOAK else (0,)
STEPS, REACHED = (80, 0.9) if SOAK else (12, 0.75)
ON_RANKS = {"plugins": "[collation_fast,fsdp_backend]", "backend.name": "fsdp", "backend.ranks": 2}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
# That ranks learn what one process learns is in `test_rank_runs.py`, step by step.
@pytest.mark.parametrize("backend", [{}, ON_RANKS] if SOAK else [{}], ids=["local", "fsdp"] if SOAK else ["local"])
def test_grpo_makes_a_weak_sorter_a_good_one(
    spurline: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: dict[str, object], seed: int
) -> None:
    def train(example: str, overrides: dict[str, object]) -> None:
        settings = {**overrides, **backend, "seed": seed, "evaluation.every_steps": "null"}
        options = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
        code, _, err = spurline("train", f"examples/{example}", *options)
        assert code == 0, err

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", str(tmp_path / "tiny"), "--seed", str(seed)])
    with torch.random.fork_rng():
        runpy.run_path("examples/make_tiny_model.py", run_name="__main__")
    overrides: dict[str, object] = {"run_dir": tmp_path / "warmup", "model.path": tmp_path / "tiny"}
    train("sft_sort.yaml", overrides | {"steps": 180, "schedule": "constant"})
    train("rl_sort.yaml", {"run_dir": tmp_path / "rl", "model.path": tmp_path / "warmup/model", "steps": STEPS})
    before = read_metrics(tmp_path / "warmup")[-1]["eval/exact_match"]
    after = read_metrics(tmp_path / "rl")[-1]["eval/pass@1"]
    assert 0.1 <= before <= 0.65, f"the warm-up should leave a model that is right now and then, not {before:.0%}"
    assert after >= REACHED, (before, after)
    assert (tmp_path / "rl/report.html").exists()
