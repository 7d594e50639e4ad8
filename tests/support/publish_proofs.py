"""Publishes to a vLLM engine that outlives a test, each followed by its proof, and ways to break them silently."""

from __future__ import annotations

import concurrent.futures
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from vllm_engines import LIMIT_S, HeldEngine

from spurline.config.run_config import ModelConfig
from spurline.errors import RunFailedError
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.proof.proof import ProofSettings, PublishProof
from spurline_async_rl.source.configs import ProofConfig
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_text.tokenizer import load_tokenizer

CONTEXT = 512
"""Tokens of prompt and response of the models that `vllm_models` writes."""

Logprobs = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]
"""Returns the trainer's logprobs of a response, from the prompt and the response."""


class HeldLoop:
    """The part of `LoopThread` that a proof needs, on the event loop of a `HeldEngine`."""

    def __init__(self, held: HeldEngine) -> None:
        self._held = held

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(self._held.run(coroutine))
        return future

    def run(self, coroutine: Coroutine[Any, Any, Any], *_: Any) -> Any:
        return self._held.run(coroutine)

    def wait(self, future: concurrent.futures.Future[Any], *_: Any, **__: Any) -> Any:
        return future.result()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class ProvenPublishes:
    """Publishes to the running engine of `held`. A proof that fails raises RunFailedError and keeps the engine."""

    def __init__(self, held: HeldEngine, model: Path) -> None:
        self._held = held
        settings = ProofSettings(
            ProofConfig(on_undelivered="stop"),
            temperature=1.0,
            context=CONTEXT,
            vocabulary=None,
            in_fp32=True,
            crosses=True,
            restarts=True,
            timeout_s=LIMIT_S,
            report_s=LIMIT_S,
        )
        tokenizer = load_tokenizer(ModelConfig(path=str(model)))
        producer: Any = SimpleNamespace(trust=lambda *_: None, distrust=lambda *_: None)
        loop = cast("LoopThread", HeldLoop(held))
        self._proof = PublishProof(held.engine, settings, tokenizer, loop, producer, notify=lambda: None)

    def publish(self, version: int, publishing: Coroutine[Any, Any, Any], logprobs: Logprobs) -> Mapping[str, float]:
        """Publish, and return the metrics of the proof."""
        self._proof.before_publish(None)
        self._held.run(publishing)
        self._proof.ask(version, None)
        return self._proof.settle(
            lambda turns: [logprobs(turn.prompt_ids.tolist(), turn.response_ids.tolist()) for turn in turns]
        )

    def assert_honest(self, version: int, publishing: Coroutine[Any, Any, Any], logprobs: Logprobs) -> None:
        found = self.publish(version, publishing, logprobs)
        assert found["publish/rejected"] == 0
        assert found["publish/probe_diff"] < 1e-4
        assert 0.99 < found.get("publish/delivered", 1.0) < 1.01

    def assert_rejected(self, version: int, publishing: Coroutine[Any, Any, Any], logprobs: Logprobs) -> None:
        with pytest.raises(RunFailedError, match=f"does not generate with the weights of version {version}"):
            self.publish(version, publishing, logprobs)


def moved_model(folder: Path, model: Path, seed: int, share: float = 0.01) -> Path:
    """Write the model with each weight moved by this share of its tensor's standard deviation, as an update would."""
    moved = shutil.copytree(model, folder)
    weights = load_file(moved / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        spread = weight.std() if weight.numel() > 1 else weight.abs()
        weights[name] = weight + share * spread * torch.randn(weight.shape, generator=generator)
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    return moved


def drop_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines confirm every update without telling their workers."""

    async def call(self: AsyncEngine, method: str, *arguments: Any) -> list[Any]:
        return []

    monkeypatch.setattr(AsyncEngine, "_call", call)


def keep_caches(monkeypatch: pytest.MonkeyPatch, *, of_later_requests: bool) -> None:
    """Let engines keep keys and values of older weights, in flight or also for later requests with the same prompt."""
    stand_still, generate = AsyncEngine._stand_still, AsyncEngine.generate

    async def keep(self: AsyncEngine, *, clear_cache: bool) -> None:
        await stand_still(self, clear_cache=False)

    def share(self: AsyncEngine, request_id: str, request: Any, salt: str, **more: Any) -> Any:
        return generate(self, request_id, request, "always the same", **more)

    monkeypatch.setattr(AsyncEngine, "_stand_still", keep)
    if of_later_requests:
        monkeypatch.setattr(AsyncEngine, "generate", share)
