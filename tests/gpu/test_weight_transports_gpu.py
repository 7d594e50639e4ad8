"""Weights reach vLLM from GPU to GPU, between two tokens and exactly: by handles on one GPU, by NCCL between two."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_engines import vllm_engine

from spurline.config.loading import LoadedConfig, load_config
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig, CudaIpcSyncConfig
from spurline_async_rl.weights.cuda_ipc import CudaIpcSync, HandleMaker, read_handles
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing.inputs import write_tiny_model
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import opened
from spurline_rl.testing.rollout_engine_contract import PROMPTS, model_logprobs, request
from spurline_text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "gpu_memory_utilization": 0.2,
    "kv_cache_gb": 0.5,
    "engine_args": {"enforce_eager": True},
}
NUM_GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 CUDA devices")


class OnGpu:
    """As much of a backend as a publish needs."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        yield from load_file(self._model / "model.safetensors", device="cuda:0").items()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("transport", ["cuda_ipc", "collective"])
def test_tokens_match_the_weights_of_their_version(tmp_path: Path, transport: str, tied: bool) -> None:
    if transport == "collective" and NUM_GPUS < 2:
        pytest.skip("NCCL wants a GPU per rank")
    old, new = (
        write_tiny_model(tmp_path / name, seed=seed, tie_word_embeddings=tied, **SHAPE)
        for seed, name in enumerate(("old", "new"))
    )
    asked = [request(prompt, seed=seed, max_new_tokens=400) for seed, prompt in enumerate(PROMPTS * 2)]
    syncs: Any = {"collective": (CollectiveSync, CollectiveSyncConfig), "cuda_ipc": (CudaIpcSync, CudaIpcSyncConfig)}
    kind, config = syncs[transport]
    sync: Any = kind(config())
    sync.max_bucket_bytes = 100_000
    # On the trainer's GPU, or on the next one for NCCL.
    devices = {"device_ids": [1]} if transport == "collective" else {}
    settings = {**ENGINE, "engine_args": {**ENGINE["engine_args"], **devices}}
    # With a backend on the CPU, the engine sees all GPUs.
    backend = LocalBackendConfig(device="cpu")

    async def main() -> list[GenerationResult]:
        engine = vllm_engine(old, tmp_path, backend=backend, **settings)
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "engines"),
    [
        (1, {"engines": 1}),
        pytest.param(2, {"engines": 2}, marks=two_gpus),
        pytest.param(2, {"tensor_parallel_size": 2}, marks=two_gpus),
        pytest.param(2, {"engines": 1}, marks=two_gpus),
    ],
    ids=["one-gpu", "an-engine-on-each-gpu", "one-engine-on-both-gpus", "an-engine-on-the-first-gpu"],
)
def test_engines_on_the_gpus_of_ranks_generate_with_the_weights_that_these_have_trained(
    tmp_path: Path, ranks: int, engines: dict[str, int]
) -> None:
    model = write_tiny_model(tmp_path / "model", **SHAPE)
    loaded = run_on_gpus(model, tmp_path / "run", ranks, {**ENGINE, **engines})
    run = loaded.config
    source: Any = run.source
    sync = CudaIpcSync(source.weight_sync, run)
    sync.max_bucket_bytes = 100_000

    async def generated(backend: Any) -> list[GenerationResult]:
        engine = VllmEngine(source.engine, run=run, tokenizer=load_tokenizer(run.model))
        try:
            async with asyncio.timeout(1200):
                await engine.start()
                for version in (1, 2):
                    await sync.publish(version, backend, [engine])
                asked = [request(prompt, seed=seed, max_new_tokens=40) for seed, prompt in enumerate(PROMPTS * 2)]
                return await asyncio.gather(*map(engine.generate, asked))
        finally:
            await engine.close()

    with opened(loaded) as (backend, parallel):
        for step in range(3):
            backend.update(*minibatch("packed", parallel, step))
        trained = tmp_path / "trained"
        shutil.copytree(model, trained)
        backend.write_weights(trained, torch.float32, 1 << 30)
        try:
            results = asyncio.run(generated(backend))
        finally:
            sync.close()
    for prompt, result in zip(PROMPTS * 2, results, strict=True):
        expected = model_logprobs(trained, request(prompt).prompt_ids, result.token_ids.tolist(), 1.0)
        assert np.abs(result.logprobs - expected).max(initial=0.0) <= 1e-3


@pytest.fixture
def expandable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether torch's segments of memory may expand, whose handles other processes cannot open in most containers."""
    change: Any = torch._C._accelerator_setAllocatorSettings
    change(f"expandable_segments:{request.param}")
    # Torch 2.11 cannot tell its settings.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{request.param}")
    yield request.param
    change("expandable_segments:False")


@pytest.mark.processes
@pytest.mark.parametrize("expandable", [False, True], indirect=True)
def test_another_process_reads_the_weights_behind_a_handle_bit_for_bit(expandable: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        (f"{name}", torch.randn(shape, generator=generator).to("cuda", dtype))
        for name, (shape, dtype) in enumerate([((300, 700), torch.float32), ((), torch.bfloat16), ((7,), torch.half)])
    ]
    maker = HandleMaker()
    context = torch.multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    reader = context.Process(target=_read_buckets, args=(theirs,), daemon=True)
    reader.start()
    try:
        for number in range(1, 4):
            mine.send(maker.make(1, number, [(name, value * number) for name, value in weights]).to_plain())
            assert mine.poll(120), "the other process did not answer"
            for (name, expected), (got_name, got) in zip(weights, mine.recv(), strict=True):
                assert got_name == name
                assert torch.equal(torch.from_numpy(got), (expected * number).float().cpu())
    finally:
        reader.kill()
        reader.join()
        maker.close()
    read: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    assert read is None or read() == f"expandable_segments:{expandable}"


def test_memory_that_no_engine_has_opened_is_given_back() -> None:
    weights = [("w", torch.ones(8 << 20, device="cuda"))]
    maker = HandleMaker()
    before = torch.cuda.memory_allocated()
    for number in range(1, 9):
        maker.make(1, number, weights)
        assert torch.cuda.memory_allocated() - before <= 40 << 20
    maker.taken()
    assert torch.cuda.memory_allocated() == before


def _read_buckets(pipe: Any) -> None:
    while True:
        read = read_handles(WeightBucket.from_plain(pipe.recv()))
        values = [(name, value.float().cpu().numpy()) for name, value in read]
        # The sender may give the memory back when it has the answer.
        del read
        pipe.send(values)


def run_on_gpus(model: Path, run_dir: Path, ranks: int, engine: dict[str, Any]) -> LoadedConfig:
    """A run whose engines are on the GPUs of its ranks, as a user would write it."""
    return load_config(
        {
            "plugins": ["fsdp_backend", "async_rl"],
            "run_dir": str(run_dir),
            "model": {"path": str(model)},
            "data": {"train": "unused.jsonl"},
            "steps": 8,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
            "source": {
                "name": "async_rollouts",
                "max_staleness": 0,
                "engine": {"name": "vllm", **engine},
                "weight_sync": "cuda_ipc",
                "environment": {"name": "single_turn", "rewards": "exact_match"},
                "advantage": "grpo",
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
            },
            "backend": {"name": "fsdp", "ranks": ranks, "device": "cuda", "precision": "fp32"},
        }
    )
