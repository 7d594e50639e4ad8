"""vLLM itself keeps the contracts of engines: one engine on this machine's CPU, for all tests here."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from every_run import SOAK
from listening import listening, reachable
from publish_proofs import ProvenPublishes, moved_model
from sabotages import IN_FLIGHT, KINDS, PREFIX_CACHE
from vllm_engines import (
    OneEngine,
    collective,
    disk,
    engine_processes,
    publish,
    shared_memory,
    vllm_expert_models,
    vllm_models,
)

from spurline.errors import RunFailedError
from spurline_async_rl.weights.configs import SharedMemorySyncConfig
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_concurrency.calls import in_thread
from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.protocols.weight_sync import SyncReport, WeightSync
from spurline_rl.testing import EngineUpdateContract, RolloutEngineContract
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened
from spurline_rl.testing.engine_update_contract import ModelPair, WeightsOf
from spurline_rl.testing.rollout_engine_contract import PROMPTS, model_logprobs, request

pytest.importorskip("vllm")
# Tests of one model follow each other, as another model takes another engine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("warm_vllm")]

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneEngine]:
    one = OneEngine(tmp_path_factory.mktemp("vllm"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def untied(one_engine: OneEngine) -> ModelPair:
    return vllm_models(one_engine.folder, "untied")


class TestContract(RolloutEngineContract):
    one: OneEngine

    @pytest.fixture(autouse=True)
    def tiny_model(self, one_engine: OneEngine, untied: ModelPair) -> Path:
        type(self).one = one_engine
        return untied.old

    def run(self, model: Path, use: Callable[[Any], Awaitable[Result]]) -> Result:
        return self.one.use(model, use)

    @pytest.mark.skip(reason="ends the engine: see below")
    def test_closing_fails_requests_in_flight_and_later_ones(self, tiny_model: Path) -> None: ...

    @pytest.mark.skip(reason="ends the engine: see below")
    def test_closing_leaves_no_thread_and_may_be_repeated(self, tiny_model: Path) -> None: ...


class TestUpdates(EngineUpdateContract):
    one: OneEngine

    @pytest.fixture(autouse=True)
    def models(self, one_engine: OneEngine, untied: ModelPair) -> ModelPair:
        type(self).one = one_engine
        return untied

    def make_sync(self) -> WeightSync:
        return collective()

    def run_updated(self, models: ModelPair, use: Callable[[Any], Awaitable[Result]]) -> Result:
        return self.one.use(models.old, use)

    @pytest.mark.skip(reason="ends the engine, once per problem: see below")
    def test_weights_of_another_model_are_an_error_and_nothing_is_generated_with_them(
        self, models: ModelPair, problem: str
    ) -> None: ...


def test_a_request_gets_the_same_tokens_alone_and_among_others(one_engine: OneEngine, untied: ModelPair) -> None:
    asked = [request(prompt, seed=seed, max_new_tokens=40) for seed, prompt in enumerate(PROMPTS * 4)]

    async def use(engine: Any) -> tuple[list[GenerationResult], list[GenerationResult]]:
        alone = [await engine.generate(wanted) for wanted in asked[:5]]
        return alone, await asyncio.gather(*map(engine.generate, asked))

    for alone, among in zip(*one_engine.use(untied.old, use), strict=False):
        assert alone.token_ids.tolist() == among.token_ids.tolist()
        assert np.abs(alone.logprobs - among.logprobs).max() <= 1e-5


def test_processes_of_an_engine_listen_on_the_loopback_alone(one_engine: OneEngine, untied: ModelPair) -> None:
    async def use(_: Any) -> None:
        heard = listening(engine_processes())
        assert heard, "nothing was looked at"
        assert reachable(heard) == []

    one_engine.use(untied.old, use)


# `test_proof_of_publish` breaks other engines in the same ways.
@pytest.mark.parametrize("kind", KINDS if SOAK else ("one tensor", PREFIX_CACHE, IN_FLIGHT))
def test_an_update_that_is_confirmed_but_not_done_is_found_out(
    one_engine: OneEngine, untied: ModelPair, kind: str, tmp_path: Path
) -> None:
    async def use(_: Any) -> None:
        """Start the engine, if no test has."""

    one_engine.use(untied.old, use)
    models = [untied.old, *(moved_model(tmp_path / str(seed), untied.old, seed) for seed in (1, 2))]
    ProvenPublishes(one_engine, untied.old, publish, model_logprobs).assert_found_out(kind, models)


def test_what_came_of_an_update_that_was_given_up_is_no_part_of_the_next_one(
    one_engine: OneEngine, untied: ModelPair
) -> None:
    """As with a server that outlives a run. Five buckets come of it, of weights that nobody wants later."""
    backend: Any = WeightsOf(untied.new, lambda weights: [tensor.fill_(0.5) for tensor in weights.values()])

    async def use(engine: Any) -> GenerationResult:
        sync = collective()
        await engine.begin_update(2)
        sync.prepare(engine.receivers, is_lost=False)
        for bucket in itertools.islice(sync.make_buckets(2, backend), 5):
            await engine.load_bucket(bucket)
        sync.close()
        await publish(engine, 2, untied.new, collective())
        return await engine.generate(request(PROMPTS[0]))

    result = one_engine.use(untied.old, use)
    assert set(result.versions.tolist()) == {2}
    assert distance(untied.new, PROMPTS[0], result) <= 1e-5


@pytest.mark.parametrize("keep_weights", [True, False])
def test_a_sleeping_engine_generates_nothing_and_goes_on_with_the_weights_it_wakes_up_with(
    one_engine: OneEngine, untied: ModelPair, keep_weights: bool
) -> None:
    """vLLM for CPUs frees nothing while it sleeps, but the order of calls and what becomes of requests are the same."""

    async def use(engine: Any) -> list[GenerationResult]:
        asked = [request(prompt, seed=seed, max_new_tokens=100) for seed, prompt in enumerate(PROMPTS)]
        under_way = [asyncio.create_task(engine.generate(wanted)) for wanted in asked]
        await asyncio.sleep(0.3)
        await engine.sleep(keep_weights=keep_weights)
        under_way.append(asyncio.create_task(engine.generate(request(PROMPTS[0]))))
        await asyncio.sleep(0.3)
        waiting = [task for task in under_way if not task.done()]
        await engine.wake("weights")
        if not keep_weights:
            await publish(engine, 2, untied.new)
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting), "a response ended before the cache was awake"
        assert waiting
        await engine.wake("cache")
        return [await task for task in under_way]

    results = one_engine.use(untied.old, use)
    for prompt, result in zip([*PROMPTS, PROMPTS[0]], results, strict=True):
        for version, model in ((1, untied.old), (2, untied.new)):
            assert distance(model, prompt, result, result.versions == version) <= 1e-4
    newest = 1 if keep_weights else 2
    assert set(results[-1].versions.tolist()) == {newest}


def test_a_killed_engine_is_noticed_and_another_goes_on_with_its_requests(
    one_engine: OneEngine, untied: ModelPair
) -> None:
    asked = [request(prompt, seed=seed, max_new_tokens=450) for seed, prompt in enumerate(PROMPTS * 2)]

    async def use(engine: Any) -> tuple[list[psutil.Process], list[GenerationResult]]:
        awaiting = asyncio.Event()
        engine.on_awaiting_weights = awaiting.set
        writing = [asyncio.ensure_future(engine.generate(wanted)) for wanted in asked]
        await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
        old = engine_processes()
        assert not all(task.done() for task in writing)
        os.kill(next(process.pid for process in old if "EngineCore" in process.cmdline()[0]), signal.SIGKILL)
        await awaiting.wait()
        await publish(engine, 2, untied.new, collective())
        return old, await asyncio.gather(*writing)

    old, results = one_engine.use(untied.old, use)
    assert len(old) == 2
    assert not set(old) & set(engine_processes())
    continued = 0
    for wanted, result in zip(asked, results, strict=True):
        for version, model in ((1, untied.old), (2, untied.new)):
            of_it = result.versions == version
            assert distance(model, wanted.prompt_ids, result, of_it) <= 1e-5
        continued += {1, 2} <= set(result.versions.tolist())
    assert continued > 0


@pytest.mark.parametrize("head", ["untied", "tied"])
def test_tokens_are_those_of_the_weights_that_ranks_broadcast_before_and_after_a_switch(
    one_engine: OneEngine, head: str, tmp_path: Path
) -> None:
    models = vllm_models(one_engine.folder, head)
    asked = [request(prompt, seed=seed, max_new_tokens=450) for seed, prompt in enumerate(PROMPTS)]
    settings = {"name": "fsdp", "ranks": 2, "device": "cpu", "num_threads": 1}
    reports: list[SyncReport] = []

    with opened(backend_run(models.old, settings, ("fsdp_backend",))) as (backend, layout):

        def train(version: int) -> None:
            for _ in range(5):
                backend.update(*minibatch("packed", layout, version))
            folder = tmp_path / str(version)
            shutil.copytree(models.old, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
            backend.write_weights(folder, torch.float32, 1 << 30)

        async def use(engine: Any) -> list[GenerationResult]:
            sync = collective(full_every=2)
            try:
                await in_thread(train, 2)
                reports.append(await sync.publish(2, backend, [engine]))
                writing = [asyncio.ensure_future(engine.generate(wanted)) for wanted in asked]
                await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
                await engine.pause()
                await in_thread(train, 3)
                await engine.resume()
                reports.append(await sync.publish(3, backend, [engine]))
                return await asyncio.gather(*writing)
            finally:
                sync.close()

        results = one_engine.use(models.old, use)
        size = sum(tensor.nbytes for _, tensor in backend.named_weights())
    # The engine keeps fp32 on a CPU; a tied head is sent once.
    assert reports[0].bytes_sent == size
    # Five large steps in fp32 change most bytes, but not all.
    assert 0 < reports[1].bytes_sent < 0.97 * size
    wrong = 0.0
    for wanted, result in zip(asked, results, strict=True):
        assert set(result.versions.tolist()) == {2, 3}
        for version in (2, 3):
            of_it = result.versions == version
            assert distance(tmp_path / str(version), wanted.prompt_ids, result, of_it) <= 1e-4
            wrong = max(wrong, distance(tmp_path / str(5 - version), wanted.prompt_ids, result, of_it))
    assert wrong > 1e-2, "the two versions do not differ enough to tell"


class TestTiedHead(EngineUpdateContract):
    """On CPUs a tied head has a packed copy of its own, which must not be forgotten."""

    one: OneEngine

    @pytest.fixture(autouse=True)
    def models(self, one_engine: OneEngine) -> ModelPair:
        type(self).one = one_engine
        return vllm_models(one_engine.folder, "tied")

    def make_sync(self) -> WeightSync:
        return shared_memory()

    def run_updated(self, models: ModelPair, use: Callable[[Any], Awaitable[Result]]) -> Result:
        return self.one.use(models.old, use)

    @pytest.mark.skip(reason="ends the engine, once per problem: see below")
    def test_weights_of_another_model_are_an_error_and_nothing_is_generated_with_them(
        self, models: ModelPair, problem: str
    ) -> None: ...

    def test_kept_keys_and_values_are_approximate_and_not_given_to_later_requests(
        self, models: ModelPair, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompt = [10 + number % 200 for number in range(200)]
        asked = [request([*prompt, own], seed=own, max_new_tokens=250) for own in range(5, 10)]

        async def use(engine: Any) -> tuple[list[GenerationResult], GenerationResult]:
            (live,) = engine._engines
            live._member._engine.keeps_kv_cache = True
            writing = [asyncio.ensure_future(engine.generate(wanted)) for wanted in asked]
            try:
                await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
                await self.publish(engine, 2, models.new)
                return await asyncio.gather(*writing), await engine.generate(asked[0])
            finally:
                live._member._engine.keeps_kv_cache = False

        results, later = self.run_updated(models, use)
        after = [
            distance(models.new, wanted.prompt_ids, result, result.versions == 2)
            for wanted, result in zip(asked, results, strict=True)
        ]
        for wanted, result in zip(asked, results, strict=True):
            assert distance(models.old, wanted.prompt_ids, result, result.versions == 1) <= 1e-5
        assert distance(models.new, asked[0].prompt_ids, later) <= 1e-5
        assert max(after) > 1e-3
        with capsys.disabled():
            print(f"\nkv_cache: keep, logprobs after an update to a wholly different model: {max(after):.2g} off")


def test_incomplete_weights_end_the_engine_and_closing_while_another_starts_leaves_no_process(
    one_engine: OneEngine,
) -> None:
    models = vllm_models(one_engine.folder, "tied")

    async def use(engine: Any) -> None:
        sync: Any = shared_memory()
        backend: Any = WeightsOf(models.new, lambda weights: weights.pop("model.layers.1.self_attn.q_proj.weight"))
        with pytest.raises(RunFailedError, match=r"qkv_proj"):
            await sync.publish(2, backend, [engine])
        sync.close()
        waiting = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
        while not any("EngineCore" in child.name for child in multiprocessing.active_children()):
            await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(RunFailedError, match="asked by a test"):
            await waiting
        await engine.close()

    one_engine.use(models.old, use)
    assert engine_processes() == []
    one_engine.end()


@pytest.mark.parametrize("width", [32, 16] if SOAK else [16])
def test_experts_are_padded_and_packed_anew_by_every_publish(one_engine: OneEngine, tmp_path: Path, width: int) -> None:
    models = vllm_expert_models(one_engine.folder, width)
    whole = SharedMemorySync(SharedMemorySyncConfig())
    asked = [request(prompt, max_new_tokens=30, temperature=1.0) for prompt in PROMPTS]

    async def use(engine: Any) -> None:
        published = [
            (models.old, None),
            (models.new, shared_memory()),
            (models.old, whole),
            (models.new, disk(tmp_path)),
        ]
        for version, (model, sync) in enumerate(published, start=1):
            if sync is not None:
                await publish(engine, version, model, sync)
            for wanted in asked:
                result = await engine.generate(wanted)
                assert set(result.versions.tolist()) == {version}
                assert distance(model, wanted.prompt_ids, result) <= 1e-5

    one_engine.use(models.old, use)


def distance(model: Path, prompt: Any, result: GenerationResult, which: Any = None) -> float:
    """Largest difference of these tokens' logprobs from the model's own."""
    expected = model_logprobs(model, prompt, result.token_ids.tolist(), 1.0)
    difference = np.abs(result.logprobs - expected)
    return float((difference if which is None else difference[which]).max(initial=0.0))
