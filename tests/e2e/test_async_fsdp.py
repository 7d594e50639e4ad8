"""Reinforcement learning on ranks: the same run as on one process, and no prompt lost, whoever is killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_helpers import deterministic, read_metrics

from spurline import Run, load_config

pytestmark = pytest.mark.processes

FSDP = {"name": "fsdp", "ranks": 2, "device": "cpu", "num_threads": 1}
EVALUATED = {"held_out": {"max_prompts": 3, "success": {"reward": "early"}}}


def metrics_of(config: Mapping[str, Any], name: str, **changed: Any) -> list[dict[str, Any]]:
    """What a run of this config with these sections writes."""
    run_dir = f"{config['run_dir']}-{name}"
    Run(load_config({**config, "run_dir": run_dir, **changed})).train()
    return deterministic(read_metrics(run_dir))


def assert_metrics_close(
    lines: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]], tolerance: float
) -> None:
    """All metrics that both have are equal within this, relative to those above 1."""
    for line, other in zip(lines, expected, strict=True):
        common = [name for name in other if name in line]
        assert {"loss", "grad_norm", "reward/mean", "mismatch/logprob_diff/max"} <= set(common)
        far = {name: (line[name], other[name]) for name in common if not _close(line[name], other[name], tolerance)}
        assert not far, f"step {line['step']}: {far}"


def _close(value: Any, other: Any, tolerance: float) -> bool:
    return value == other or abs(value - other) <= tolerance * max(1.0, abs(other))


def test_on_ranks_zero_staleness_is_synchronous_training_and_both_are_what_one_process_does(
    rl_config: dict[str, Any], spurline_chat_file: Path
) -> None:
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"] |= EVALUATED
    rl_config |= {"evaluation": {"every_steps": 3}, "report": {"enabled": False}, "checkpoint": {"every_steps": 1000}}
    plugins = ["async_rl", "fsdp_backend"]
    zero_staleness = {
        **rl_config["source"],
        "name": "async_rollouts",
        "max_staleness": 0,
        "engine": {"name": "child_process", "deterministic": True, "num_threads": 1},
    }
    local = metrics_of(rl_config, "local")
    synchronous = metrics_of(rl_config, "synchronous", plugins=plugins, backend=FSDP)
    asynchronous = metrics_of(rl_config, "asynchronous", plugins=plugins, backend=FSDP, source=zero_staleness)
    assert_metrics_close(synchronous, local, 1e-5)
    assert_metrics_close(asynchronous, synchronous, 1e-6)
    assert [line["step"] for line in asynchronous if "eval/pass@1" in line] == [3, 6]
    assert all(line["sync/bytes"] > 0 for line in asynchronous[:-1])
