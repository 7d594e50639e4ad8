"""Reinforcement learning on Megatron's ranks: the same run as on one process, with engines beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once, assert_metrics_close, metrics_of, ranks_of
from run_helpers import read_metrics
from vllm_engines import SMALL_VLLM, vllm_models

from spurline import Run, load_config

pytestmark = pytest.mark.processes

MEGATRON = {"name": "megatron", "ranks": 2, "tensor": 2, "device": "cpu", "num_threads": 1}
ON_RANKS = {"plugins": ["async_rl", "megatron_backend"], "backend": MEGATRON}


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="publishing has tests of its own; SPURLINE_SOAK=1")
def test_on_ranks_an_asynchronous_run_without_staleness_is_what_one_process_does(rl_config: dict[str, Any]) -> None:
    rl_config |= {"report": {"enabled": False}, "checkpoint": {"every_steps": 1000}}
    engine = {"name": "child_process", "deterministic": True, "num_threads": 1}
    source = {**rl_config["source"], "name": "async_rollouts", "max_staleness": 0, "engine": engine}
    local = metrics_of(rl_config, "local")
    on_ranks = metrics_of(rl_config, "on-ranks", source=source, **ON_RANKS)
    assert len(on_ranks) == 6
    assert_metrics_close(on_ranks, local, 1e-5)
    assert all(line["sync/bytes"] > 0 for line in on_ranks[:-1])


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts an engine; SPURLINE_SOAK=1")
@pytest.mark.timeout(2400)
def test_vllm_generates_with_the_weights_that_ranks_have_trained(rl_config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    rl_config["model"] = {"path": str(vllm_models(tmp_path, "untied").old)}
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 0,
        "record_groups": True,
        "sampling": {"max_new_tokens": 12},
        "engine": dict(SMALL_VLLM),
    }
    rl_config |= {"steps": 8, "report": {"enabled": False}, **ON_RANKS}
    Run(load_config(rl_config)).train()
    assert_every_prompt_ended_once(rl_config)
    lines = read_metrics(rl_config["run_dir"])
    assert all(line["sync/bytes"] > 0 for line in lines[:-1])
    # Each step's tokens are of the weights that the step before has left.
    assert [line["staleness/max"] for line in lines] == [0] * 8
    assert all(line["mismatch/logprob_diff/max"] < 1e-4 for line in lines)
    assert ranks_of(os.getpid()) == []
