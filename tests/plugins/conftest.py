"""A run directory like the one that a finished run leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every_run import leave_out

RunDirMaker = Callable[..., Path]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for folder in ("ranks", "fsdp_backend", "megatron_backend"):
        leave_out(Path(__file__).parent / folder, config, items)


def metrics_of(step: int, num_steps: int) -> dict[str, Any]:
    metrics = {
        "step": step,
        "epoch": step / 50,
        "loss": 0.4 + 3 * math.exp(-step / 10),
        "grad_norm": 0.5 + 2 * math.exp(-step / 8),
        "lr": 3e-4 * (1 - step / num_steps),
        "tokens": 6000,
        "loss_tokens": 2400,
        "packing/fill": 0.95,
        "packing/rows": 6,
        "time/batch": 0.01,
        "time/forward_backward": 0.4,
        "time/optimizer": 0.09,
        "time/step": 0.5,
    }
    if step % 10 == 0 or step == num_steps:
        metrics |= {"eval/loss": 0.5 + 1 / step, "eval/exact_match": step / num_steps, "eval/perplexity": 1.7}
        metrics |= {"time/evaluate": 1.5, "time/step": 2.0}
    return metrics


SUMMARY: dict[str, Any] = {
    "data": {
        "train": {
            "samples": 2400,
            "tokens": 441_234,
            "dropped": {"too_long": 11},
            "truncated": 40,
            "lengths": {"edges": [0, 100, 200, 300], "counts": [700, 1300, 400]},
            "loss_share": 0.41,
        },
        "eval": {"samples": 200, "tokens": 36_500, "dropped": {}, "truncated": 2},
    },
    "versions": {"spurline": "0.1.0", "torch": "2.13.0"},
    "status": "finished",
    "total_steps": 40,
    "parameters": 412_345,
}

CONFIG: dict[str, Any] = {
    "seed": 7,
    "model": {"path": "models/tiny", "revision": None},
    "data": {"train": [{"name": "hf", "path": "data/arith.jsonl"}], "max_length": 300, "order": {"name": "uniform"}},
    "optimizer": {"betas": [0.9, 0.95], "max_grad_norm": 1.0},
    "checkpoint": {"export_hf": True},
    "trackers": [],
}


@pytest.fixture
def make_run_dir(tmp_path: Path) -> RunDirMaker:
    """Write a run directory: `make_run_dir(num_steps=40, config=..., summary=..., samples=[...])`."""

    def make(
        num_steps: int = 40,
        config: dict[str, Any] | None = None,
        summary: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
    ) -> Path:
        run_dir = tmp_path / "arith-sft"
        run_dir.mkdir()
        lines = [metrics_of(step, num_steps) for step in range(1, num_steps + 1)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run_dir / "config.json").write_text(json.dumps(CONFIG if config is None else config))
        (run_dir / "summary.json").write_text(json.dumps(SUMMARY if summary is None else summary))
        if samples is not None:
            (run_dir / "eval_samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        return run_dir

    return make


@pytest.fixture
def panels() -> list[Any]:
    """The panels of a run without further plugins in page order, built the way a run builds them."""
    from spurline.plugins.host import PluginHost
    from spurline_insight.report.page import default_panels

    return default_panels(PluginHost.load([]).registry)
