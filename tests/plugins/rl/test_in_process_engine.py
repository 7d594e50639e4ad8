"""The engine in_process: concurrent requests, the thread behind them, the weights it uses, and what can go wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config
from generated_rollouts import batch_of, generate, in_process_engine, largest_mismatch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spurline.config.run_config import ModelConfig
from spurline.errors import RunFailedError
from spurline.protocols.loss import Objective
from spurline_models.local.backend import LocalBackend
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.decoder import Decoder, OwnCacheDecoder
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.engines.in_process.response import Written
from spurline_rl.protocols.rollout_engine import GenerationResult, RolloutEngine
from spurline_rl.testing.rollout_engine_contract import PROMPTS, RolloutEngineContract, model_logprobs, request

Result = TypeVar("Result")


def make_backend(model: Path, **changes: Any) -> LocalBackend:
    return local_backend(model, run={"model": ModelConfig(path=str(model))}, **changes)


def with_engine(engine: InProcessEngine, use: Callable[[InProcessEngine], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        try:
            return await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())


class TestContract(RolloutEngineContract):
    def make_engine(self, model: Path) -> RolloutEngine:
        return in_process_engine(model)


class TestContractDeterministic(RolloutEngineContract):
    def make_engine(self, model: Path) -> RolloutEngine:
        return in_process_engine(model, deterministic=True)


class TestContractInNarrowBatches(RolloutEngineContract):
    def make_engine(self, model: Path) -> RolloutEngine:
        return in_process_engine(model, max_batch=2, max_cache_tokens=30)


class TestContractSharingWeights(RolloutEngineContract):
    def make_engine(self, model: Path) -> RolloutEngine:
        engine = in_process_engine(model)
        engine.share(make_backend(model))
        return engine


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Decode steps wait until the test lets them pass."""
    gate = Gate()
    steps = {kind: kind.step for kind in (Decoder, OwnCacheDecoder)}

    def gated(self: Decoder, version: int) -> None:
        if not self.responses[0].request.name.startswith("start-up"):
            gate.reached.set()
            assert gate.steps.acquire(timeout=30), "the test let no further step pass"
        steps[type(self)](self, version)

    for kind in steps:
        monkeypatch.setattr(kind, "step", gated)
    yield gate
    gate.open()


class Gate:
    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)
        self.reached = threading.Event()

    def open(self) -> None:
        self.steps.release(10_000)

    async def wait_until_reached(self) -> None:
        while not self.reached.is_set():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("temperature", "deterministic", "cuts"),
    [(1.0, False, {}), (0.6, False, {"top_k": 40, "top_p": 0.9}), (1.7, True, {"top_k": 4})],
)
def test_rollout_logprobs_equal_the_trainers(
    spurline_tiny_model: Path, temperature: float, deterministic: bool, cuts: dict[str, float]
) -> None:
    backend = make_backend(spurline_tiny_model)
    engine = in_process_engine(spurline_tiny_model, deterministic=deterministic)
    engine.share(backend)
    requests = [
        request(prompt, seed=seed, max_new_tokens=30, temperature=temperature, support_width=60 if cuts else 0, **cuts)
        for seed in range(4)
        for prompt in PROMPTS
    ]
    results = generate(engine, requests)
    batch = batch_of(requests, results)
    assert ("support" in batch.tokens) == bool(cuts)
    assert int((batch.tokens["loss_weights"] != 0).sum()) == sum(len(result.token_ids) for result in results)
    assert largest_mismatch(backend, batch, temperature) <= 1e-5


def train_a_little(backend: LocalBackend) -> None:
    for _ in range(3):
        backend.update(lay_out(make_samples([9, 12])), Objective(CrossEntropy(CrossEntropyConfig()), 0.05))


def test_a_shared_model_generates_with_each_update_and_its_version(spurline_tiny_model: Path) -> None:
    backend = make_backend(spurline_tiny_model)
    asked = [request(prompt, temperature=0.0) for prompt in PROMPTS]

    async def use(engine: InProcessEngine) -> list[list[GenerationResult]]:
        engine.share(backend)
        before = await asyncio.gather(*map(engine.generate, asked))
        train_a_little(backend)
        engine.set_version(7)
        return [before, await asyncio.gather(*map(engine.generate, asked))]

    before, after = with_engine(in_process_engine(spurline_tiny_model), use)
    assert before[0].token_ids.tolist() != after[0].token_ids.tolist()
    # Written by transformers' own generate.
    assert [result.token_ids.tolist() for result in after] == backend.generate(PROMPTS, max_new_tokens=12)
    assert {version for result in before for version in result.versions.tolist()} == {0}
    assert {version for result in after for version in result.versions.tolist()} == {7}


POOL = [
    request(prompt, seed=seed, temperature=(0.0, 0.7, 1.0)[seed % 3], top_k=(0, 0, 5)[seed % 3], max_new_tokens=length)
    for seed, (prompt, length) in enumerate(product([*PROMPTS, [7] * 70, list(range(10, 45))], (1, 5, 18)))
]


@pytest.fixture(scope="module")
def deterministic_pair(spurline_tiny_model: Path) -> Iterator[tuple[asyncio.Runner, list[InProcessEngine], list[Any]]]:
    """An engine that shares trained weights, one with a copy of them, and what each of POOL gets alone."""
    backend = make_backend(spurline_tiny_model)
    train_a_little(backend)
    sharing, copying = (in_process_engine(spurline_tiny_model, deterministic=True, max_batch=40) for _ in range(2))
    sharing.share(backend)
    with asyncio.Runner() as runner:
        runner.run(update(copying, 1, backend.named_weights()))
        alone = [_bits(runner.run(sharing.generate(asked))) for asked in POOL]
        yield runner, [sharing, copying], alone
        for engine in (sharing, copying):
            runner.run(engine.close())


def _bits(result: GenerationResult) -> tuple[list[int], bytes]:
    return result.token_ids.tolist(), result.logprobs.tobytes()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    clients=st.lists(st.lists(st.sampled_from(range(len(POOL))), min_size=1, max_size=4), min_size=1, max_size=12),
    copies=st.integers(1, 3),
    which=st.sampled_from([0, 1]),
)
def test_a_deterministic_request_gets_the_same_bits_alone_and_in_any_company_shared_or_copied(
    deterministic_pair: tuple[asyncio.Runner, list[InProcessEngine], list[Any]],
    clients: list[list[int]],
    copies: int,
    which: int,
) -> None:
    runner, engines, alone = deterministic_pair

    async def ask(numbers: list[int]) -> list[Any]:
        # One after another, so that requests come and go while others are under way.
        return [_bits(await engines[which].generate(POOL[number])) for number in numbers]

    async def ask_all() -> list[list[Any]]:
        return await asyncio.gather(*map(ask, clients * copies))

    assert runner.run(ask_all()) == [[alone[number] for number in numbers] for numbers in clients * copies]


def test_whoever_asks_again_at_once_joins_the_very_next_step(
    spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    step = Decoder.step

    def counted(self: Decoder, version: int) -> None:
        sizes.append(len(self.responses))
        step(self, version)

    async def use(engine: InProcessEngine) -> None:
        await engine.generate(request(PROMPTS[0], max_new_tokens=1))
        monkeypatch.setattr(Decoder, "step", counted)

        async def ask(times: int, length: int) -> None:
            for _ in range(times):
                await engine.generate(request(PROMPTS[0], temperature=0.0, max_new_tokens=length))

        await asyncio.gather(ask(1, 10), ask(3, 4), ask(3, 4))

    with_engine(in_process_engine(spurline_tiny_model), use)
    assert sizes == [3] * 9


def test_generation_leaves_training_as_it_was(tmp_path: Path) -> None:
    from spurline_models.testing import write_tiny_model

    model = write_tiny_model(tmp_path / "model", attention_dropout=0.2)
    batch, objective = lay_out(make_samples([9, 12])), Objective(CrossEntropy(CrossEntropyConfig()), 5.0)
    expected = make_backend(model).update(batch, objective)["loss"]
    backend = make_backend(model)
    engine = in_process_engine(model)
    engine.share(backend)
    generate(engine, [request(prompt) for prompt in PROMPTS])
    assert backend._model.causal.training
    assert backend._model.causal.config._attn_implementation == "spurline_segments"
    assert backend.update(batch, objective)["loss"] == expected


def test_the_model_is_given_back_during_a_pause(spurline_tiny_model: Path, gate: Gate) -> None:
    backend = make_backend(spurline_tiny_model)

    async def use(engine: InProcessEngine) -> tuple[bool, str | None, GenerationResult]:
        engine.share(backend)
        writing = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
        await gate.wait_until_reached()
        gate.steps.release(1)
        await engine.pause()
        causal = backend._model.causal
        state = causal.training, causal.config._attn_implementation
        engine.set_version(1)
        await engine.resume()
        gate.open()
        return *state, await writing

    training, attention, result = with_engine(in_process_engine(spurline_tiny_model), use)
    assert training
    assert attention == "spurline_segments"
    # The first two tokens came from the prompt and the one step that passed.
    assert result.versions.tolist() == [0, 0, *[1] * (len(result.token_ids) - 2)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_keys_and_values_of_old_weights_are_kept_only_when_asked_for(
    spurline_tiny_model: Path, tmp_path: Path, gate: Gate, deterministic: bool, kv_cache: str
) -> None:
    from spurline_models.testing import write_tiny_model

    other = write_tiny_model(tmp_path / "other", seed=1)
    asked = [request(prompt, temperature=1.0, max_new_tokens=40) for prompt in (*PROMPTS, PROMPTS[2])]

    async def use(engine: InProcessEngine) -> list[GenerationResult]:
        writing = asyncio.gather(*map(engine.generate, asked))
        await gate.wait_until_reached()
        updating = asyncio.ensure_future(update(engine, 5, make_backend(other).named_weights()))
        while not updating.done():
            gate.steps.release(1)
            await asyncio.sleep(0.01)
        gate.open()
        return await writing

    engine = in_process_engine(spurline_tiny_model, kv_cache=kv_cache, deterministic=deterministic)
    errors = []
    for wanted, result in zip(asked, with_engine(engine, use), strict=True):
        expected = model_logprobs(other, wanted.prompt_ids, result.token_ids.tolist(), 1.0)
        assert result.versions[0] == 0
        errors += np.abs(result.logprobs - expected)[result.versions == 5].tolist()
    assert len(errors) > 20
    assert max(errors) <= 1e-5 if kv_cache == "recompute" else max(errors) > 0.1


def test_tokens_are_told_as_they_are_written(spurline_tiny_model: Path) -> None:
    told: list[Written] = []

    async def use(engine: InProcessEngine) -> GenerationResult:
        neighbour = asyncio.ensure_future(engine.generate(request(PROMPTS[1], max_new_tokens=3)))
        result = await engine.generate(request(PROMPTS[0]), told.append)
        await neighbour
        return result

    result = with_engine(in_process_engine(spurline_tiny_model), use)
    assert [token for news in told for token in news.token_ids] == result.token_ids.tolist()
    assert [logprob for news in told for logprob in news.logprobs] == pytest.approx(result.logprobs.tolist())
    assert [news.finish_reason for news in told] == [None] * (len(told) - 1) + [result.finish_reason]
    assert len(told) == len(result.token_ids) - 1  # prompt and first step come together


def test_loading_the_own_copy_draws_nothing_from_the_runs_generator(spurline_tiny_model: Path) -> None:
    before = torch.get_rng_state()
    generate(in_process_engine(spurline_tiny_model), [request(PROMPTS[0])])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_takes_too_long_ends_the_engine_with_the_names_of_those_who_wait(
    spurline_tiny_model: Path, gate: Gate
) -> None:
    async def use(engine: InProcessEngine) -> list[Any]:
        # Loading the model would count as well.
        await engine.generate(request(PROMPTS[1], max_new_tokens=1))
        set_time_limit(engine, 0.3)
        requests = [request(PROMPTS[0], name=name) for name in ("the slow one", "its neighbour")]
        outcomes = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        late = await asyncio.gather(engine.generate(requests[0]), engine.pause(), return_exceptions=True)
        gate.open()
        return [*outcomes, *late]

    outcomes = with_engine(in_process_engine(spurline_tiny_model), use)
    for name, outcome in zip(("the slow one", "its neighbour", "the slow one", "pause"), outcomes, strict=True):
        assert isinstance(outcome, RunFailedError)
        assert f"{name}: " in str(outcome)
        assert "a decode step (0 responses under way, 2 new) did not end within 0.3 s" in str(outcome)
        assert "source.engine.timeout_s" in str(outcome)


def test_a_cancelled_caller_gets_the_model_back_before_it_goes_on(spurline_tiny_model: Path, gate: Gate) -> None:
    backend = make_backend(spurline_tiny_model)

    async def use(engine: InProcessEngine) -> tuple[bool, bool]:
        engine.share(backend)
        unwanted = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
        await gate.wait_until_reached()
        unwanted.cancel()
        done, _ = await asyncio.wait({unwanted}, timeout=0.1)
        gate.open()
        await asyncio.wait({unwanted})
        return bool(done), backend._model.causal.training

    went_on_during_the_step, was_given_back = with_engine(in_process_engine(spurline_tiny_model), use)
    assert not went_on_during_the_step
    assert was_given_back


def test_an_error_while_decoding_reaches_everyone_and_later_requests(
    spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Decoder, version: int) -> None:
        raise ValueError("no memory left on the moon")

    monkeypatch.setattr(Decoder, "step", broken)

    async def use(engine: InProcessEngine) -> list[Any]:
        requests = [request(PROMPTS[0], name=f"number {number}") for number in range(4)]
        first = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        later = await asyncio.gather(
            engine.generate(requests[0]), engine.pause(), engine.begin_update(1), return_exceptions=True
        )
        return [*first, *later]

    outcomes = with_engine(in_process_engine(spurline_tiny_model, max_batch=2), use)
    assert len({id(outcome) for outcome in outcomes}) == len(outcomes) == 7
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, RunFailedError)
        assert "has ended: ValueError: no memory left on the moon" in str(outcome)
        assert isinstance(outcome.__cause__, ValueError)
        assert number >= 4 or f"number {number}:" in str(outcome)


def test_weights_that_are_not_finite_are_reported_with_the_request(spurline_tiny_model: Path) -> None:
    backend = make_backend(spurline_tiny_model)
    with torch.no_grad():
        next(backend._model.head.parameters()).fill_(torch.nan)
    engine = in_process_engine(spurline_tiny_model)
    engine.share(backend)
    with pytest.raises(RunFailedError, match=r"asked by a test.*not finite"):
        generate(engine, [request(PROMPTS[0])])


def test_a_model_that_cannot_be_loaded_is_told_to_whoever_asks(spurline_tiny_model: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path / "nothing"))
    engine = InProcessEngine(
        InProcessEngineConfig(),
        run=run_config("x", model=model),
        tokenizer=in_process_engine(spurline_tiny_model)._tokenizer,
    )
    with pytest.raises(RunFailedError, match=r"asked by a test.*model\.path.*nothing"):
        generate(engine, [request(PROMPTS[0])])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_reported_under_the_engines_own_setting(spurline_tiny_model: Path) -> None:
    with pytest.raises(RunFailedError, match=r"source\.engine\.device.*torch sees none.*device: cpu"):
        generate(in_process_engine(spurline_tiny_model, device="cuda"), [request(PROMPTS[0])])


async def update(engine: InProcessEngine, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    await engine.begin_update(version)
    for name, tensor in weights:
        place = TensorPlace(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        await engine.load_bucket(WeightBucket("in_process", (place,), tensors=(tensor,)))
    await engine.finish_update(version)


def set_time_limit(engine: InProcessEngine, seconds: float) -> None:
    engine._timeout_s = seconds
