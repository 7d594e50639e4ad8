"""Runs that train adapters and send them alone to real vLLM: the same as with whole weights, to rounding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once
from run_helpers import read_metrics
from safetensors.torch import load_file
from torch import Tensor
from vllm_engines import SMALL_VLLM, vllm_models

from spurline import Run, load_config
from spurline_models.export import export_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts two engines; SPURLINE_SOAK=1"),
    pytest.mark.processes,
    pytest.mark.timeout(2400),
]

RANK = 4


@pytest.fixture
def lora_config(rl_config: dict[str, Any], tmp_path: Path, spurline_chat_file: Path) -> dict[str, Any]:
    """Three synchronous steps with one vLLM engine, of which each moves the adapters far, and answers to held-out
    prompts."""
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    rl_config["plugins"] = ["async_rl"]
    rl_config["model"] = {"path": str(vllm_models(tmp_path, "tied").old)}
    rl_config["backend"] |= {"lora": {"rank": RANK, "alpha": 9.0}}
    rl_config["optimizer"] = {"learning_rate": 3e-2}
    rl_config["steps"] = 3
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["evaluation"] = {"every_steps": 1}
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 0,
        "record_groups": True,
        "held_out": {"max_prompts": 3, "samples_per_prompt": 1, "success": {"reward": "early"}},
        "sampling": {"max_new_tokens": 12},
        "engine": dict(SMALL_VLLM),
    }
    return rl_config


def train(config: dict[str, Any], run_dir: Path, **sync: Any) -> list[dict[str, Any]]:
    config = {**config, "run_dir": str(run_dir), "source": {**config["source"], "weight_sync": sync}}
    Run(load_config(config)).train()
    assert_every_prompt_ended_once(config)
    return read_metrics(run_dir)


def exported(config: dict[str, Any], run_dir: Path) -> dict[str, Tensor]:
    """The trained weights, adapters merged."""
    export_run(load_config({**config, "run_dir": str(run_dir)}), run_dir / "exported")
    return load_file(run_dir / "exported" / "model.safetensors")


def test_adapters_alone_train_what_whole_weights_train(lora_config: dict[str, Any], tmp_path: Path) -> None:
    alone = train(lora_config, tmp_path / "alone", name="shared_memory", adapters=True)
    merged = train(lora_config, tmp_path / "merged", name="shared_memory", adapters=False)
    # Two layers of seven linear modules, of 32 to 64 numbers in and out, heads of 64.
    inner, queries, keys = 64, 4 * 64, 2 * 64
    sizes = [(32, queries), (32, keys), (32, keys), (queries, 32), (32, inner), (32, inner), (inner, 32)]
    adapter_bytes = 4 * RANK * 2 * sum(map(sum, sizes))
    # After the last step nothing is published.
    sent, sent_merged = ([line["sync/bytes"] for line in lines[:-1]] for lines in (alone, merged))
    assert sent == [adapter_bytes] * 2
    assert min(sent_merged) > adapter_bytes
    for line in (*alone, *merged):
        assert line["staleness/max"] == 0
        # What vLLM samples from is what is trained: the definition of a synchronous run.
        assert line["mismatch/logprob_diff/max"] < 1e-4
    for one, other in zip(alone, merged, strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "loss_tokens"):
            assert one[name] == pytest.approx(other[name], abs=1e-4), name
    weights, others = (exported(lora_config, tmp_path / name) for name in ("alone", "merged"))
    apart = max((weights[name] - others[name]).abs().max().item() for name in others)
    assert apart <= 1e-4
