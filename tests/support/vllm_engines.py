"""One vLLM engine at a time for all tests: it takes a minute to start, and a few GiB."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from backend_batches import run_config
from child_engines import publish as publish
from child_engines import shared_memory as shared_memory
from living_processes import living_below
from transformers import AutoModelForCausalLM

from spurline.config.run_config import ModelConfig
from spurline.errors import DataError
from spurline.protocols.backend import BackendConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig, DiskSyncConfig
from spurline_async_rl.weights.disk import DiskSync
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing.engine_update_contract import ModelPair
from spurline_text.tokenizer import load_tokenizer

Result = TypeVar("Result")

LIMIT_S = 300.0
"""Seconds one test may wait for the engine, its start not counted."""
START_S = 900.0
SMALL_VLLM = {
    "name": "vllm",
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_gb": 0.25,
    "cpu_threads": 1,
    "start_timeout_s": START_S,
}
"""Settings of an engine for a run of the tests' model."""


def vllm_models(folder: Path, head: str) -> ModelPair:
    """Two models that vLLM can compute on a CPU, which wants heads of 32 numbers or more. head: tied or untied."""
    shape = {"head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": head == "tied"}
    old, new = (
        write_tiny_model(folder / f"vllm-{head}-{name}", seed=seed, **shape) for seed, name in enumerate(("old", "new"))
    )
    return ModelPair(old, new)


def vllm_expert_models(folder: Path, width: int) -> ModelPair:
    """The same with experts of that many inner numbers, which vLLM pads on CPUs to a multiple of 32."""
    shape = {"head_dim": 64, "max_position_embeddings": 512, "moe_intermediate_size": width}
    old, new = (
        write_tiny_moe_model(folder / f"vllm-experts-{width}-{name}", seed=seed, **shape)
        for seed, name in enumerate(("old", "new"))
    )
    return ModelPair(old, new)


def vllm_engine(model: Path, run_dir: Path, *, backend: BackendConfig | None = None, **settings: Any) -> VllmEngine:
    """Return an engine that is not started yet. backend: of the run, by default local without adapters."""
    config = VllmEngineConfig(
        **(
            {
                "kv_cache_gb": 0.25,
                "max_num_seqs": 64,
                "start_timeout_s": START_S,
                "cpu_threads": 1,
                # The run is no RL run, which would set this itself.
                "engine_args": {} if "urls" in settings else {"max_logprobs": -1},
            }
            | settings
        )
    )
    model_config = ModelConfig(path=str(model))
    run = run_config(model, model=model_config, run_dir=run_dir, backend=backend or LocalBackendConfig())
    return VllmEngine(config, run=run, tokenizer=load_tokenizer(model_config))


def collective(**settings: Any) -> CollectiveSync:
    """Return a sync by broadcasts."""
    sync = CollectiveSync(CollectiveSyncConfig(**settings))
    sync.max_bucket_bytes = 20_000
    return sync


def disk(folder: Path, **settings: Any) -> DiskSync:
    """Return a sync through files."""
    sync = DiskSync(DiskSyncConfig(folder=str(folder), **settings))
    sync.max_bucket_bytes = 20_000
    return sync


def memorize(model: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Train the model in place until it writes these answers to these prompts, and save it."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.Adam(causal.parameters(), lr=3e-3)
    for _ in range(200):
        losses: list[Any] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer])
            labels = torch.tensor([[-100] * len(prompt) + answer])
            losses.append(causal(input_ids=ids, labels=labels).loss)
        loss: Any = sum(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.1:
            break
    assert loss.item() < 0.1, "the model has not learned its part"
    causal.save_pretrained(model)


class HeldEngine:
    """An engine that outlives a test, on its own event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine: Any = None
        self._runner = asyncio.Runner()

    def run(self, main: Coroutine[Any, Any, Result], *keeps: type[Exception]) -> Result:
        """Return the result of a coroutine that uses the engine. Errors close it, except those of the types `keeps`."""
        try:
            return self._runner.run(main)
        except keeps:
            raise
        except BaseException:
            # The state of the engine is unknown.
            self._runner.run(self.close_engine())
            raise

    def end(self) -> None:
        """Close the engine, if a test has not; the next test gets another one."""
        self._runner.run(self.close_engine())

    def close(self) -> None:
        self.end()
        self._runner.close()

    async def close_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()


class OneEngine(HeldEngine):
    """The engine that runs. A test that needs another engine replaces it."""

    _what: object = None

    def use(self, model: Path, use: Callable[[Any], Awaitable[Result]], **settings: Any) -> Result:
        """Return the result of `use(engine)` with the weights of this model, published as version 1."""

        async def main() -> Result:
            what = (model, tuple(sorted(settings.items())))
            if self.engine is None or self._what != what:
                await self.close_engine()
                self.engine, self._what = vllm_engine(model, self.folder, **settings), what
                async with asyncio.timeout(START_S):
                    await self.engine.start()
            async with asyncio.timeout(LIMIT_S):
                await publish(self.engine, 1, model)
                return await use(self.engine)

        return self.run(main(), DataError)


def engine_processes() -> list[psutil.Process]:
    """Return the processes of vLLM engines that this process has started."""
    return living_below(os.getpid(), "VLLM")
