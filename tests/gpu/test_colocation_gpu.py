"""vLLM gives the memory of a GPU away while it sleeps, to a trainer that really takes it, and goes on exactly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.weights.configs import SharedMemorySyncConfig
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing.inputs import write_tiny_model
from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.testing.engine_update_contract import WeightsOf
from spurline_rl.testing.rollout_engine_contract import PROMPTS, model_logprobs, request
from spurline_text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {
    "hidden_size": 1024,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
SHARE = 0.4


async def publish(engine: Any, version: int, model: Path) -> None:
    sync = SharedMemorySync(SharedMemorySyncConfig())
    try:
        backend: Any = WeightsOf(model)
        await sync.publish(version, backend, [engine])
    finally:
        sync.close()


def taken_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("keep_weights", [True, False])
def test_a_sleeping_engine_leaves_its_gpu_to_others_and_its_tokens_match_the_weights_of_their_version(
    tmp_path: Path, keep_weights: bool
) -> None:
    old, new = (write_tiny_model(tmp_path / name, seed=seed, **SHAPE) for seed, name in enumerate(("old", "new")))
    config = VllmEngineConfig(placement="colocated", gpu_memory_utilization=SHARE, dtype="float32", max_num_seqs=32)
    model_config = ModelConfig(path=str(old))
    # With a backend on the CPU, the engine sees all GPUs.
    run = run_config(old, model=model_config, run_dir=tmp_path, backend=LocalBackendConfig(device="cpu"))
    total = torch.cuda.mem_get_info()[1]

    async def use() -> list[GenerationResult]:
        engine = VllmEngine(config, run=run, tokenizer=load_tokenizer(model_config))
        try:
            await engine.start()
            await publish(engine, 1, old)
            awake = taken_bytes()
            asked = [request(prompt, seed=seed, max_new_tokens=200) for seed, prompt in enumerate(PROMPTS)]
            under_way = [asyncio.create_task(engine.generate(wanted)) for wanted in asked]
            await asyncio.sleep(0.2)
            await engine.sleep(keep_weights=keep_weights)
            asleep = taken_bytes()
            assert awake - asleep > 0.8 * SHARE * total, f"{awake - asleep:,} bytes of {total:,}"
            # A trainer fills what is there now with numbers of its own.
            others = torch.full((int(0.8 * SHARE * total) // 4,), 7.0, device="cuda")
            assert others.sum().isfinite()
            del others
            torch.cuda.empty_cache()
            await engine.wake("weights")
            if not keep_weights:
                await publish(engine, 2, new)
            assert taken_bytes() - asleep < 0.5 * SHARE * total, "the cache is awake before it was asked for"
            await engine.wake("cache")
            return [await task for task in under_way]
        finally:
            await engine.close()

    results = asyncio.run(use())
    assert not keep_weights or {version for result in results for version in result.versions.tolist()} == {1}
    for prompt, result in zip(PROMPTS, results, strict=True):
        for version, model in ((1, old), (2, new)):
            expected = model_logprobs(model, prompt, result.token_ids.tolist(), 1.0)
            difference = np.abs(result.logprobs - expected)[result.versions == version]
            assert difference.max(initial=0.0) <= 1e-3
