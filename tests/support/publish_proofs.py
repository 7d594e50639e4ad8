"""Publishes to a vLLM engine that outlives a test, each followed by its proof, and ways to break them silently."""

from __future__ import annotations

import concurrent.futures
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sabotages import FROZEN, IN_FLIGHT, PREFIX_CACHE, WRONG_WEIGHTS, SabotagedWeights, first_broken
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm_engines import LIMIT_S, HeldEngine

from spurline.config.run_config import ModelConfig
from spurline.errors import RunFailedError
from spurline_async_rl.engines.vllm import async_engine
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.server import ServerApi
from spurline_async_rl.proof.proof import ProofSettings, PublishProof
from spurline_async_rl.source.configs import ProofConfig
from spurline_text.tokenizer import load_tokenizer

CONTEXT = 512
"""Tokens of prompt and response of the models that `vllm_models` writes."""


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


def proof_of(engine: Any, loop: Any, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> PublishProof:
    """Return the proofs of a run with this engine, in fp32. `changes` are fields of its settings."""
    settings = ProofSettings(
        ProofConfig(),
        temperature=1.0,
        context=CONTEXT,
        vocabulary=None,
        in_fp32=True,
        crosses=True,
        restarts=True,
        timeout_s=LIMIT_S,
        report_s=LIMIT_S,
    )
    producer: Any = SimpleNamespace(trust=lambda *_: None, distrust=lambda *_: None)
    return PublishProof(engine, replace(settings, **changes), tokenizer, loop, producer, notify=lambda: None)


@dataclass(frozen=True)
class ProvenPublishes:
    """Publishes to the running engine of `held`, each followed by its proof.

    Attributes:
        model: The folder of the engine's model.
        send: Publishes the weights in a folder: `send(engine, version, folder, change=...)`.
        logprobs: Returns the trainer's logprobs of a response: `logprobs(folder, prompt, response, temperature)`.
    """

    held: HeldEngine
    model: Path
    send: Callable[..., Coroutine[Any, Any, Any]]
    logprobs: Callable[[Path, Sequence[int], Sequence[int], float], NDArray[np.float32]]

    def assert_found_out(self, kind: str, published: Sequence[Path]) -> None:
        """Publish the weights in these folders. From `first_broken` on the engine is broken, and must be named then."""
        config, tokenizer = ProofConfig(on_undelivered="stop"), load_tokenizer(ModelConfig(path=str(self.model)))
        proof = proof_of(self.held.engine, HeldLoop(self.held), tokenizer, config=config)
        weights = SabotagedWeights(kind)
        for number, folder in enumerate(published[: first_broken(kind)]):
            found = self._publish(proof, number, folder, partial(_replace, weights, is_broken=False))
            assert found["publish/rejected"] == 0
            assert found["publish/probe_diff"] < 1e-4
            assert 0.99 < found.get("publish/delivered", 1.0) < 1.01
        number = first_broken(kind)
        with pytest.MonkeyPatch.context() as patch:
            break_engines(kind, patch)
            change = partial(_replace, weights, is_broken=True) if kind in (*FROZEN, *WRONG_WEIGHTS) else None
            reason = "a response that it began before the update" if kind == IN_FLIGHT else "its logprobs"
            said = f"the weights of version {number}, which it has confirmed: {reason}"
            with pytest.raises(RunFailedError, match=said):
                self._publish(proof, number, published[number], change)

    def _publish(self, proof: PublishProof, version: int, folder: Path, change: Any) -> Mapping[str, float]:
        """Return the metrics of the proof. If it fails, raise RunFailedError, and keep the engine."""
        proof.before_publish(None)
        self.held.run(self.send(self.held.engine, version, folder, change=change))
        proof.ask(version, None)
        return proof.settle(
            lambda turns: [
                self.logprobs(folder, turn.prompt_ids.tolist(), turn.response_ids.tolist(), 1.0) for turn in turns
            ]
        )


def _replace(weights: SabotagedWeights, sent: dict[str, Tensor], *, is_broken: bool) -> None:
    sent.update(weights.instead_of(sent, is_broken=is_broken))


def moved_model(folder: Path, model: Path, seed: int, only: str = "") -> Path:
    """Write the model with weights moved by 1 % of their tensor's standard deviation, as an update would.

    only: part of the names of the weights that move.
    """
    moved = shutil.copytree(model, folder)
    weights = load_file(moved / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if only in name:
            spread = weight.std() if weight.numel() > 1 else weight.abs()
            weights[name] = weight + 0.01 * spread * torch.randn(weight.shape, generator=generator)
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    return moved


def break_engines(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Break all vLLM engines in this way. For wrong weights, and servers that are frozen, it matters what is sent."""
    stand_still, generate = AsyncEngine._stand_still, AsyncEngine.generate

    async def keep(self: AsyncEngine, *, clear_cache: bool) -> None:
        await stand_still(self, clear_cache=False)

    async def pause(self: ServerApi) -> None:
        await self._call("POST", "/pause", params={"mode": "abort", "clear_cache": "false"})

    def share(self: AsyncEngine, request_id: str, request: Any, salt: str, **more: Any) -> Any:
        return generate(self, request_id, request, "always the same", **more)

    if kind in FROZEN:
        # No worker is told of the update.
        patch.setattr(async_engine, "worker_call", lambda command: None)
    elif kind in (PREFIX_CACHE, IN_FLIGHT):
        patch.setattr(AsyncEngine, "_stand_still", keep)
        patch.setattr(ServerApi, "pause", pause)
        if kind == PREFIX_CACHE:
            patch.setattr(AsyncEngine, "generate", share)
