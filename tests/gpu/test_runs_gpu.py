"""Whole runs on one GPU: rollouts in process, adapters, mixtures of experts, and vLLM in bf16 with CUDA graphs.

SPURLINE_GPU_TESTS_ON=cpu runs what a CPU can of it, to try the tests out.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import Sample, cross_entropy, lay_out, local_backend, make_samples, write_model_folder
from expert_models import write_expert_model
from reward_functions import in_process
from run_helpers import train

from spurline.config.loading import load_config
from spurline_async_rl.weights.configs import CudaIpcSyncConfig, SharedMemorySyncConfig
from spurline_async_rl.weights.cuda_ipc import CudaIpcSync
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_models.configs import LoraConfig
from spurline_models.testing import write_tiny_model
from spurline_rl.testing.rollout_engine_contract import PROMPTS, request

DEVICE: Any = os.environ.get("SPURLINE_GPU_TESTS_ON", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def rollout_run(tmp_path: Path, precision: str) -> dict[str, Any]:
    """Return the config of a run whose reward any model can learn."""
    rows = [{"messages": [{"role": "user", "content": f"write {n}"}]} for n in range(32)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(write_tiny_model(tmp_path / "model", **SHAPE))},
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "steps": 20,
        "source": {
            "name": "rollouts",
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "environment": {"name": "single_turn", "rewards": {"early": in_process("reward_functions:early_letters")}},
            "advantage": "grpo",
            "sampling": {"max_new_tokens": 16},
        },
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"name": "constant"},
        "backend": {"name": "local", "device": DEVICE, "precision": precision, "num_threads": 1},
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rollouts_on_the_device_raise_the_reward_and_agree_with_the_trainer(tmp_path: Path, precision: str) -> None:
    lines = train(rollout_run(tmp_path, precision)).lines
    rewards = [line["reward/mean"] for line in lines]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.05, rewards
    # Generation uses keys and values that were kept, and other kernels than training does.
    limit = 1e-4 if precision == "fp32" else 0.2
    assert max(line["mismatch/logprob_diff"] for line in lines) < limit


def test_adapters_over_a_half_precision_base_learn_and_leave_the_base_as_it_is(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", head_dim=16)
    lora = LoraConfig(rank=4, base_dtype="bf16")
    backend = local_backend(folder, device=DEVICE, precision="bf16", lora=lora, probe=True)
    batch = lay_out(make_samples([33, 7, 64, 18]), [[0, 1], [2, 3]])
    weights = dict(backend._model.causal.named_parameters())
    frozen = {name: value.clone() for name, value in weights.items() if not value.requires_grad}
    losses = [backend.update(batch, cross_entropy(40.0))["loss"] for _ in range(12)]
    assert losses[-1] < losses[0]
    assert frozen
    assert all(torch.equal(weights[name], value) for name, value in frozen.items())


@pytest.mark.parametrize("weights", ["fp32", "bf16_masters"])
def test_experts_in_half_precision_are_near_those_in_fp32_and_learn(tmp_path: Path, weights: str) -> None:
    folder = write_expert_model(tmp_path / "experts", hidden_size=64, head_dim=16, moe_intermediate_size=32)
    batch = lay_out(make_samples([33, 7, 64, 18]), [[0, 1], [2, 3]])
    exact = local_backend(folder, device=DEVICE)
    half = local_backend(folder, device=DEVICE, precision="bf16", weights=weights, probe=True)
    difference = (half.logprobs(batch) - exact.logprobs(batch)).abs()
    assert float(difference.mean()) < 0.05
    losses = [half.update(batch, cross_entropy(40.0))["loss"] for _ in range(12)]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(DEVICE == "cpu", reason="CPUs have no such kernel")
@pytest.mark.parametrize("write", [write_model_folder, write_expert_model], ids=["dense", "experts"])
def test_half_precision_attends_by_the_kernel_for_segments_forwards_and_backwards(tmp_path: Path, write: Any) -> None:
    backend = local_backend(write(tmp_path / "model", head_dim=16), device=DEVICE, precision="bf16")
    batch, objective = lay_out(make_samples([33, 7, 64, 18]), [[0, 1], [2, 3]]), cross_entropy(40.0)
    backend.update(batch, objective)
    with torch.profiler.profile() as profile:
        backend.update(batch, objective)
    operators = {event.key for event in profile.key_averages()}
    assert any("varlen" in name for name in operators), operators
    assert any("varlen" in name and "backward" in name.lower() for name in operators), operators
    assert not any("scaled_dot_product" in name for name in operators), operators


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_vllm_in_bf16_with_graphs_generates_with_the_weights_that_were_trained(tmp_path: Path, transport: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm_engines import vllm_engine

    if transport == "cuda_ipc" and DEVICE == "cpu":
        pytest.skip("hands GPU memory over")
    model = write_tiny_model(tmp_path / "model", **SHAPE)
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    backend = local_backend(model, device=DEVICE, precision=precision, run={"model": model_config(model)})
    sync: Any = {
        "cuda_ipc": lambda: CudaIpcSync(CudaIpcSyncConfig()),
        "shared_memory": lambda: SharedMemorySync(SharedMemorySyncConfig()),
    }[transport]()
    batch = lay_out(make_samples([33, 7, 64, 18]), [[0, 1], [2, 3]])
    memory = {"gpu_memory_utilization": 0.2, "kv_cache_gb": 0.5} if DEVICE == "cuda" else {}

    async def main() -> list[float]:
        # The type is bf16 on GPUs, and graphs are captured there, as in a run without other settings.
        engine = vllm_engine(model, tmp_path, max_model_len=256, **memory)
        found: list[float] = []
        try:
            async with asyncio.timeout(600):
                await engine.start()
                for version in (1, 2, 3):
                    await sync.publish(version, backend, [engine])
                    asked = [request(prompt, seed=seed, max_new_tokens=60) for seed, prompt in enumerate(PROMPTS * 3)]
                    results = await asyncio.gather(*map(engine.generate, asked))
                    assert {number for result in results for number in result.versions.tolist()} == {version}
                    found.append(distance(backend, asked, results))
                    for _ in range(4):
                        backend.update(batch, cross_entropy(40.0))
        finally:
            sync.close()
            await engine.close()
        return found

    # Weights of another version are far away: the optimizer moves each by its learning rate, four times.
    limit = 0.05 if DEVICE == "cuda" else 1e-4
    assert max(asyncio.run(main())) < limit


def model_config(model: Path) -> Any:
    loaded = load_config({"model": {"path": str(model)}, "data": {"train": "unused.jsonl"}, "steps": 1})
    return loaded.config.model


def distance(backend: Any, asked: Any, results: Any) -> float:
    """Return the mean difference of the logprobs of the engine and of the trainer, for the generated tokens."""
    samples = [
        Sample(
            str(number),
            (*wanted.prompt_ids, *result.token_ids.tolist()),
            (*[0.0] * len(wanted.prompt_ids), *[1.0] * len(result.token_ids)),
        )
        for number, (wanted, result) in enumerate(zip(asked, results, strict=True))
    ]
    batch = lay_out(samples)
    trained = backend.logprobs(batch)[batch.tokens["loss_weights"] > 0].double().cpu().numpy()
    return float(np.abs(trained - np.concatenate([result.logprobs for result in results])).mean())
