"""kill -9 at random instants, then resume: the metrics are those of the uninterrupted run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_weights, config_to_kill, deterministic, read_metrics, train_and_kill
from warm_runs import WarmRuns

from spurline import Run, load_config
from spurline.run.checkpoints.checkpoint import CheckpointStore


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("beside", [False, True])
def test_killed_runs_end_with_the_metrics_of_the_uninterrupted_run(
    base_config: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    beside: bool,
) -> None:
    """beside: checkpoints are written while training goes on, after each step, so that most kills come into a write."""
    kills = (20 if beside else 100) if os.environ.get("SPURLINE_SOAK") else 2 if beside else 4
    config = config_to_kill(base_config, spurline_chat_file, 12 * kills)
    if beside:
        config["checkpoint"] = {"every_steps": 1, "async": True}
    whole = config | {"run_dir": str(tmp_path / "whole")}
    Run(load_config(whole)).train()
    path = write_config(config)
    random_instants = random.Random(7)
    metrics = Path(config["run_dir"]) / "metrics.jsonl"
    for kill in range(kills):
        # Every fourth somewhere in the start: reading, restoring, cutting the metrics back.
        steps = random_instants.randint(1, 6) if kill % 4 != 3 else None
        wait_s = random_instants.uniform(0, 0.4 if steps is None else 0.03)
        train_and_kill(warm_runs, path, metrics, steps=steps, wait_s=wait_s)
        if (Path(config["run_dir"]) / "checkpoints").exists():
            CheckpointStore(Path(config["run_dir"]) / "checkpoints").latest()
    assert Run(load_config(path)).train().status == "finished"
    assert deterministic(read_metrics(config["run_dir"])) == deterministic(read_metrics(tmp_path / "whole"))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
