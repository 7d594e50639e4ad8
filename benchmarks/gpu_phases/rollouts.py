"""Measure generation and the way of weights to engines on one GPU.

- publish: GB/s of one transport. `shared_memory` and `disk` go to an engine `child_process` (`weight_sync.py`). For
  `cuda_ipc`, another process opens the handles and copies the weights, as a worker of vLLM does.
- in_process: tokens per second of the engine `in_process`.
- vllm: an engine in bf16 with CUDA graphs. Its tokens per second, GB/s of publishes from a trainer on the same GPU, and
  the difference of the logprobs of the engine and of the trainer with the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import weight_sync
from gpu_sft import SHAPES

from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.data.token_store import TokenStoreBuilder
from spurline.protocols.collator import ParallelLayout
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling
from spurline_rl.testing.backend_runs import backend_run, opened
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenizer import load_tokenizer

REPEATS = 3


def write_model(folder: Path, tiny: bool, device: str) -> Path:
    """Write a model with random weights in bf16, of the shape of Qwen3-0.6B or tiny, and a small tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    shape = dict(SHAPES["tiny" if tiny else "0.6b"], max_position_embeddings=1024)
    # vLLM wants heads of 32 numbers or more on a CPU.
    shape |= {"vocab_size": len(tokenizer), "head_dim": 64} if tiny else {}
    shape |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(**shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def publish(transport: str, device: str, tiny: bool) -> dict[str, Any]:
    """Return GB/s of one transport, for 2 GiB of fp32 weights in buckets of 512 MiB."""
    gib, bucket_mb = (0.02, 8) if tiny else (2.0, 512)
    if transport == "cuda_ipc":
        return handles(gib, bucket_mb << 20)
    with tempfile.TemporaryDirectory() as folder:
        model = weight_sync.write_large_model(Path(folder) / "model", gib)
        found = asyncio.run(weight_sync.measure(model, 0, [transport], bucket_mb, REPEATS, device))
    cost = found["transports"][transport]
    return {"gb_per_s": 2**30 / 1e9 / cost.seconds_per_gib, "bytes": cost.bytes_sent, "times_copy": cost.times_copy}


def handles(gib: float, bucket_bytes: int) -> dict[str, Any]:
    """Return GB/s at which another process on this GPU copies weights that it gets by handles."""
    from spurline_async_rl.weights.cuda_ipc import HandleMaker

    count = max(1, round(gib * 2**30 / bucket_bytes))
    weights = [torch.randn(bucket_bytes // 4, device="cuda") for _ in range(count)]
    context = torch.multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    reader = context.Process(target=read_buckets, args=(theirs,), daemon=True)
    reader.start()
    maker, seconds = HandleMaker(), list[float]()
    try:
        for _ in range(1 + REPEATS):
            began = time.perf_counter()
            for number, weight in enumerate(weights, 1):
                mine.send(maker.make(1, number, [("w", weight)]).to_plain())
                assert mine.poll(60), "the other process did not answer"
                last = mine.recv()
            seconds.append(time.perf_counter() - began)
        # The copies of the other process are the weights.
        assert last == float(weights[-1][:1000].double().sum()), "the other process read something else"
    finally:
        reader.kill()
        reader.join()
        maker.close()
    sent = count * bucket_bytes
    return {"gb_per_s": sent / float(np.median(seconds[1:])) / 1e9, "bytes": sent}


def read_buckets(pipe: Any) -> None:
    """Copy each bucket in this process, and answer with a sum of its first numbers."""
    from spurline_async_rl.weights.cuda_ipc import read_handles
    from spurline_models.weight_buckets import WeightBucket

    kept: torch.Tensor | None = None
    while True:
        ((_, weight),) = read_handles(WeightBucket.from_plain(pipe.recv()))
        kept = torch.empty_like(weight) if kept is None else kept
        kept.copy_(weight)
        del weight
        pipe.send(float(kept.flatten()[:1000].double().sum()))


def requests(count: int, length: int, new_tokens: int) -> list[GenerationRequest]:
    """Return requests with random prompts."""
    random = np.random.default_rng(0)
    prompts = random.integers(10, 200, (count, length)).tolist()
    sampling = Sampling(max_new_tokens=new_tokens)
    return [GenerationRequest(prompt, sampling, seed, f"prompt {seed}") for seed, prompt in enumerate(prompts)]


async def generate(engine: Any, asked: Sequence[GenerationRequest]) -> tuple[list[GenerationResult], float]:
    """Return the results, and tokens per second. A first round with a few tokens does not count."""
    warm = requests(4, 16, 8)
    await asyncio.gather(*map(engine.generate, warm))
    began = time.perf_counter()
    results = await asyncio.gather(*map(engine.generate, asked))
    return results, sum(len(result.token_ids) for result in results) / (time.perf_counter() - began)


def in_process(device: str, tiny: bool) -> dict[str, Any]:
    """Return tokens per second of the engine `in_process`, with its own copy in bf16."""
    from spurline_rl.engines.configs import InProcessEngineConfig
    from spurline_rl.engines.in_process.engine import InProcessEngine

    asked = requests(4, 16, 16) if tiny else requests(64, 128, 128)

    async def main(folder: Path) -> float:
        run = backend_run(write_model(folder, tiny, device), {"name": "local", "device": device}).config
        config = InProcessEngineConfig(device=device, precision="bf16")  # type: ignore[arg-type]
        engine = InProcessEngine(config, run, load_tokenizer(run.model))
        try:
            return (await generate(engine, asked))[1]
        finally:
            await engine.close()

    with tempfile.TemporaryDirectory() as folder:
        return {"tokens_per_s": asyncio.run(main(Path(folder))), "responses": len(asked)}


def vllm(device: str, tiny: bool) -> dict[str, Any]:
    """Return the figures of an engine of vLLM beside a trainer on the same GPU. Prints them as they come."""
    from spurline_async_rl.engines.configs import VllmEngineConfig
    from spurline_async_rl.engines.vllm.engine import VllmEngine

    figures: dict[str, Any] = {}
    asked = requests(4, 16, 16) if tiny else requests(256, 128, 256)
    cache = {"kv_cache_gb": 0.25} if tiny else {"gpu_memory_utilization": 0.4}
    config = VllmEngineConfig(max_model_len=1024, start_timeout_s=200, **cache)  # type: ignore[arg-type]
    transports = ("cuda_ipc", "shared_memory") if device == "cuda" else ("shared_memory",)

    def note(**found: Any) -> None:
        figures.update(found)
        print(json.dumps(figures), flush=True)

    async def main(model: Path, backend: Any, run: Any) -> None:
        engine = VllmEngine(config, run, load_tokenizer(run.model))
        began, version = time.perf_counter(), 0
        try:
            await engine.start()
            note(start_s=time.perf_counter() - began)
            for name in transports:
                sync, speeds = weight_sync.sync_by(name, run, 512), list[float]()
                try:
                    for _ in range(1 + REPEATS):
                        version += 1
                        report = await sync.publish(version, backend, [engine])
                        speeds.append(report.bytes_sent / report.transfer_s / 1e9)
                finally:
                    sync.close()
                note(**{f"publish_{name}_gb_per_s": float(np.median(speeds[1:]))})
            results, speed = await generate(engine, asked)
            note(tokens_per_s=speed, responses=len(asked), **mismatch(backend, asked, results))
        finally:
            await engine.close()

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", tiny, device)
        precision = "bf16" if device == "cuda" else "fp32"
        settings = {"name": "local", "device": device, "precision": precision, "max_tokens_per_microbatch": 8192}
        loaded = backend_run(model, settings, ("async_rl",))
        run = loaded.config.model_copy(update={"run_dir": Path(folder) / "run"})
        with opened(loaded) as (backend, _):
            asyncio.run(main(model, backend, run))
    return figures


def mismatch(backend: Any, asked: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> dict[str, float]:
    """Return how far the engine's logprobs are from the trainer's for the same tokens and weights."""
    builder = TokenStoreBuilder(["generated"])
    for row, (request, result) in enumerate(zip(asked, results, strict=True)):
        prompt, response = list(request.prompt_ids), result.token_ids.tolist()
        builder.add(prompt + response, [0] * len(prompt) + [1] * len(response), source=0, row=row)
    store = builder.build()
    samples = store.view(np.arange(len(store), dtype=np.int64))
    batch = PaddedCollator(PaddedCollatorConfig(), 0, ParallelLayout()).collate(samples, training=True)
    trained = backend.logprobs(batch)[batch.tokens["loss_weights"] > 0].double().cpu().numpy()
    difference = trained - np.concatenate([result.logprobs for result in results]).astype(np.float64)
    return {
        "mismatch_mean": float(np.abs(difference).mean()),
        "mismatch_max": float(np.abs(difference).max()),
        # The estimate of Schulman (2020), "Approximating KL divergence".
        "mismatch_kl": float((np.expm1(difference) - difference).mean()),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("publish", "in_process", "vllm"))
    parser.add_argument("transport", nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    if given.what == "publish":
        figures = publish(given.transport, given.device, given.tiny)
    else:
        figures = {"in_process": in_process, "vllm": vllm}[given.what](given.device, given.tiny)
    print(json.dumps(figures), flush=True)
