"""What a plan says of engines outside of the trainer's process, from their settings alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_batches import run_config, write_model_folder

from spurline_async_rl.engines import configs
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, VllmEngineConfig
from spurline_models.memory import count_parameters, estimate_cache


def test_a_child_process_holds_its_own_copy_and_cache(tmp_path: Path) -> None:
    # Two layers of 2,048 keys and values: 64 responses of 1,024 tokens are half a GiB.
    folder = write_model_folder(tmp_path / "model", num_attention_heads=32, num_key_value_heads=32, head_dim=16)
    run = run_config(folder)
    size = 4 * count_parameters(run.model) + estimate_cache(run.model, 64 * 1024, precision="fp32")
    [line] = ChildProcessEngineConfig(engines=2).describe(run, 128, 1024)
    assert f"2 processes of {size / 2**30:.1f} GiB" in line
    assert size > 2**29
    assert "each decodes 64 responses together" in line
    assert ChildProcessEngineConfig().estimate_memory(run, 128, 1024) == {}, "it is not the trainer's memory"


def test_vllm_says_nothing_of_gpus_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config(write_model_folder(tmp_path / "model"))
    monkeypatch.setattr(configs, "num_gpus", lambda: 0)
    [line] = VllmEngineConfig().describe(run, 128, 1024)
    assert line.startswith("engine vllm: 1 engine without a GPU here, 4 GiB of keys and values")
    assert "%" not in line


def test_vllm_takes_its_share_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "num_gpus", lambda: 8)
    run = run_config(write_model_folder(tmp_path / "model"))
    config = VllmEngineConfig(engines=2, tensor_parallel_size=4, gpu_memory_utilization=0.4, max_model_len=4096)
    [line] = config.describe(run, 128, 1024)
    assert "2 engines on 4 GPUs each" in line
    assert "40% of each of its GPUs (gpu_memory_utilization);" in line
    [line] = VllmEngineConfig(kv_cache_gb=2.5, placement="ray").describe(run, 128, 1024)
    assert "GPUs (gpu_memory_utilization), 2.5 GiB of keys and values each" in line
    assert line.startswith("engine vllm on the Ray cluster: 1 engine on 1 GPU each")
    assert config.context_tokens == 4096
    assert VllmEngineConfig().context_tokens is None
    server = VllmEngineConfig(mode="server", urls=("http://a", "http://b"))
    assert "2 servers that run already" in server.describe(run, 128, 1024)[0]
