"""Small run directories whose settings, curves and evaluations differ, for comparisons."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def write_run(folder: Path, steps: int = 12, *, lr: float = 1e-4, more: dict[str, Any] | None = None) -> Path:
    """Write a supervised run with step 0. more: further metrics of every step."""
    noise = random.Random(lr)
    folder.mkdir(parents=True)
    config = {
        "run_dir": str(folder),
        "seed": 7,
        "model": {"path": "models/tiny"},
        "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.95]},
        "evaluations": {"hard": {}},
    }
    lines: list[dict[str, Any]] = [{"step": 0, "eval/loss": 3.0, "eval/hard/exact_match": 0.0}]
    for step in range(1, steps + 1):
        loss = 3 / (1 + lr * 1000 * step) + noise.uniform(0, 0.2)
        lines.append(
            {"step": step, "loss": loss, "grad_norm": noise.random(), "lr": lr, "tokens": 100, "time/step": 0.5}
            | {"time/batch": noise.random(), **(more or {})}
        )
        if step % 4 == 0:
            lines[-1] |= {"eval/loss": loss + 0.1, "eval/hard/exact_match": step / (steps + 1)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "total_steps": steps}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
