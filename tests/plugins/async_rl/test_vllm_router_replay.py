"""The experts that vLLM itself tells, against the trainer's model: one engine on this machine's CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from backend_batches import local_backend, run_config
from expert_models import replaying_source
from generated_rollouts import batch_of, largest_mismatch
from transformers import AutoModelForCausalLM
from vllm_engines import LIMIT_S, START_S, publish, vllm_expert_models

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.testing.rollout_engine_contract import PROMPTS, model_logprobs, request
from spurline_text.tokenizer import load_tokenizer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("warm_vllm")]

Result = TypeVar("Result")
LAYERS, TOP_K = 2, 2


class Engine:
    """One engine that notes experts, with the published weights of a model."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._start(model, folder))

    async def _start(self, model: Path, folder: Path) -> None:
        config = VllmEngineConfig(kv_cache_gb=0.25, max_num_seqs=64, start_timeout_s=START_S, cpu_threads=1)
        model_config = ModelConfig(path=str(model))
        run = run_config(model, model=model_config, run_dir=folder, source=replaying_source())
        self.engine: Any = VllmEngine(config, run=run, tokenizer=load_tokenizer(model_config))
        await self.engine.start()
        await publish(self.engine, 1, model)

    def use(self, use: Callable[[Any], Awaitable[Result]]) -> Result:
        async def main() -> Result:
            return await asyncio.wait_for(use(self.engine), LIMIT_S)

        return self._runner.run(main())

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        async def use(engine: Any) -> list[GenerationResult]:
            return list(await asyncio.gather(*map(engine.generate, requests)))

        return self.use(use)

    def close(self) -> None:
        self._runner.run(self.engine.close())
        self._runner.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_expert_models(tmp_path_factory.mktemp("experts"), width=16).new


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    opened = Engine(model, tmp_path_factory.mktemp("vllm"))
    yield opened
    opened.close()


def assert_experts_of(model: Path, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> None:
    """Every token but the last has the experts that transformers' model chooses, in every layer, and the logprobs are
    those of that model."""
    causal: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for asked, result in zip(requests, results, strict=True):
        tokens = torch.tensor([[*asked.prompt_ids, *result.token_ids.tolist()]])
        with torch.no_grad():
            logits = causal(tokens, output_router_logits=True).router_logits
        experts = result.routed_experts
        assert experts is not None
        assert experts.shape == (tokens.shape[1], LAYERS, TOP_K)
        assert (experts[-1] == -1).all()
        expected = torch.stack([layer.topk(TOP_K, dim=-1).indices for layer in logits], dim=1).numpy()
        assert np.array_equal(np.sort(experts[:-1], -1), np.sort(expected[:-1], -1))
        logprobs = model_logprobs(model, asked.prompt_ids, result.token_ids.tolist(), 1.0)
        assert np.abs(result.logprobs - logprobs).max() <= 1e-4


REQUESTS = [request(prompt, seed=seed, max_new_tokens=20, temperature=1.0) for seed in range(4) for prompt in PROMPTS]


def test_experts_are_those_of_the_model_and_the_trainer_agrees(engine: Engine, model: Path) -> None:
    results = engine.generate(REQUESTS)
    assert_experts_of(model, REQUESTS, results)
    backend = local_backend(model, run={"model": ModelConfig(path=str(model)), "source": replaying_source()})
    assert largest_mismatch(backend, batch_of(REQUESTS, results)) <= 1e-4


def test_a_prompt_that_was_read_before_has_its_experts_too(engine: Engine, model: Path) -> None:
    prompt = list(range(10, 90))
    requests = [request(prompt, seed=seed, max_new_tokens=3, temperature=1.0) for seed in range(3)]
    results = [engine.generate([asked])[0] for asked in requests]
    assert_experts_of(model, requests, results)


def test_a_pause_leaves_no_gap(engine: Engine, model: Path) -> None:
    asked = request(PROMPTS[0], seed=3, max_new_tokens=60, temperature=1.0)

    async def use(engine: Any) -> GenerationResult:
        writing = asyncio.ensure_future(engine.generate(asked))
        for _ in range(3):
            await asyncio.sleep(0.1)
            await engine.pause()
            await engine.resume()
        return await writing

    assert_experts_of(model, [asked], [engine.use(use)])


def test_a_response_cut_at_a_stop_text_has_its_experts(engine: Engine, model: Path) -> None:
    [free] = engine.generate([request(PROMPTS[0], seed=5, max_new_tokens=20, temperature=1.0)])
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    text = tokenizer.decode(free.token_ids[4:7].tolist())
    asked = request(PROMPTS[0], seed=5, max_new_tokens=20, temperature=1.0, stop=(text,))
    [result] = engine.generate([asked])
    assert result.finish_reason == "stop"
    assert len(result.token_ids) < 20
    assert result.routed_experts is not None
    assert len(result.routed_experts) == len(asked.prompt_ids) + len(result.token_ids)
    # vLLM was ahead: the last token may have been read already, those before it were.
    assert (result.routed_experts[:-1] >= 0).all()
