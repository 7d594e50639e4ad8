"""Weights reach vLLM from GPU to GPU, between two tokens and exactly: by handles on one GPU, by NCCL between two."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline.data.tokenizer import load_tokenizer
from spurline.protocols.rollout_engine import GenerationResult
from spurline.testing.inputs import write_tiny_model
from spurline.testing.rollout_engine_contract import PROMPTS, model_logprobs, request
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.weights.configs import CudaIpcSyncConfig, NcclSyncConfig
from spurline_async_rl.weights.cuda_ipc import CudaIpcSync
from spurline_async_rl.weights.nccl import NcclSync

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


class OnGpu:
    """As much of a backend as a publish needs."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        yield from load_file(self._model / "model.safetensors", device="cuda:0").items()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_tokens_match_the_weights_of_their_version(tmp_path: Path, transport: str, tied: bool) -> None:
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU per rank")
    old, new = (
        write_tiny_model(tmp_path / name, seed=seed, tie_word_embeddings=tied, **SHAPE)
        for seed, name in enumerate(("old", "new"))
    )
    asked = [request(prompt, seed=seed, max_new_tokens=400) for seed, prompt in enumerate(PROMPTS * 2)]
    sync: Any = NcclSync(NcclSyncConfig()) if transport == "nccl" else CudaIpcSync(CudaIpcSyncConfig())
    sync.max_bucket_bytes = 100_000

    async def main() -> list[GenerationResult]:
        engine = _engine(old, tmp_path, sync)
        try:
            async with asyncio.timeout(1800):
                await sync.publish(1, OnGpu(old), [engine])
                writing = asyncio.gather(*map(engine.generate, asked))
                await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
                await sync.publish(2, OnGpu(new), [engine])
                return await writing
        finally:
            sync.close()
            await engine.close()

    results = asyncio.run(main())
    for wanted, result in zip(asked, results, strict=True):
        for version, model in ((1, old), (2, new)):
            expected = model_logprobs(model, wanted.prompt_ids, result.token_ids.tolist(), 1.0)
            difference = np.abs(result.logprobs - expected)[result.versions == version]
            # fp32 on a GPU, with other kernels than the reference's on the CPU.
            assert difference.max(initial=0.0) <= 1e-3
    assert any({1, 2} <= set(result.versions.tolist()) for result in results)


def _engine(model: Path, run_dir: Path, sync: Any) -> VllmEngine:
    """On the trainer's GPU, or on the next one for NCCL."""
    devices = {"device_ids": [1]} if sync.transport == "nccl" else {}
    config = VllmEngineConfig(
        dtype="float32", gpu_memory_utilization=0.2, kv_cache_gb=0.5, enforce_eager=True, engine_args=devices
    )
    model_config = ModelConfig(path=str(model))
    run = run_config(model, model=model_config, run_dir=run_dir)
    # The run's source would say so; here there is none.
    object.__setattr__(
        run, "source", type("Source", (), {"weight_sync": type("Sync", (), {"name": sync.transport})()})()
    )
    return VllmEngine(config, run=run, tokenizer=load_tokenizer(model_config))
