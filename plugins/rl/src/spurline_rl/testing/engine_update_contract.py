"""Check that an engine takes new weights, and reports the right weight version for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from spurline.errors import RunFailedError
from spurline_models.testing.inputs import write_tiny_model
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.testing.rollout_engine_contract import PROMPTS, EngineContract, Result, all_of, model_logprobs, request

if TYPE_CHECKING:
    from torch import Tensor

    from spurline.protocols.backend import Backend
    from spurline_rl.protocols.weight_sync import SyncReport, WeightSync


@dataclass(frozen=True)
class ModelPair:
    """Folders of two models that differ only in their weights."""

    old: Path
    new: Path


@dataclass(frozen=True)
class WeightsOf:
    """A substitute for the backend in `publish`, with the weights of a model folder. It yields a tied weight once.

    Attributes:
        change: A function that changes the weights before they are published.
    """

    model: Path
    change: Callable[[dict[str, Tensor]], object] | None = None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors.torch import load_file

        weights = load_file(self.model / "model.safetensors")
        if self.change is not None:
            self.change(weights)
        yield from weights.items()


class EngineUpdateContract(EngineContract):
    """A test suite for engines with `TakesWeights`: define `make_sync()` and `make_engine(model)` in a subclass.

    Every test publishes the old weights before its first request, as sources do. `EngineContract` describes
    `logprob_tolerance` and `limit_s`.
    """

    def make_sync(self) -> WeightSync:
        """Return a weight sync that the engine supports, with buckets so small that the model needs several."""
        raise NotImplementedError("subclass EngineUpdateContract with make_sync(self)")

    @pytest.fixture(params=["untied", "tied"])
    def models(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
        """Return two models with a separate output head, or two models whose head is tied to the embedding."""
        return _model_pair(tmp_path_factory.getbasetemp(), request.param)

    def test_tokens_before_an_update_match_the_old_weights_and_those_after_it_the_new_ones(
        self, models: ModelPair
    ) -> None:
        asked = [
            request(prompt, seed=seed, temperature=0.7, max_new_tokens=300) for seed, prompt in enumerate(PROMPTS * 3)
        ]

        async def use(engine: Any) -> list[GenerationResult]:
            writing = asyncio.gather(*map(engine.generate, asked))
            # When this short response ends, the long responses are still being generated.
            await engine.generate(request(PROMPTS[0], max_new_tokens=4, temperature=0.0))
            await self.publish(engine, 2, models.new)
            return await writing

        across = 0
        for wanted, result in zip(asked, self.run_updated(models, use), strict=True):
            self.check_versions(wanted, result, {1: models.old, 2: models.new}, 0.7)
            across += 1 in result.versions and 2 in result.versions
        assert across > 0

    def test_what_is_asked_after_an_update_comes_from_the_new_weights_alone_and_a_report_says_what_was_published(
        self, models: ModelPair
    ) -> None:
        # An engine must not keep a prefix cache across updates.
        prompt = [10 + number % 200 for number in range(300)]
        asked = [request([*prompt, *own], seed=seed, max_new_tokens=20) for seed, own in enumerate(([], [5], [5, 6]))]

        async def use(engine: Any) -> list[list[GenerationResult]]:
            rounds = [await all_of(engine, asked)]
            for version, model in ((2, models.new), (3, models.old)):
                report = await self.publish(engine, version, model)
                assert report.version == version
                assert report.bytes_sent >= sum(tensor.nbytes for _, tensor in WeightsOf(model).named_weights())
                assert min(report.transfer_s, report.pause_s) > 0
                rounds.append(await all_of(engine, asked))
            return rounds

        rounds = self.run_updated(models, use)
        for version, (results, model) in enumerate(zip(rounds, (models.old, models.new, models.old), strict=True), 1):
            for wanted, result in zip(asked, results, strict=True):
                assert set(result.versions.tolist()) == {version}
                self.check_versions(wanted, result, {version: model}, 1.0)

    def test_nothing_is_generated_during_an_update(self, models: ModelPair) -> None:
        asked = [request(prompt, seed=seed, max_new_tokens=200) for seed, prompt in enumerate(PROMPTS)]

        async def use(engine: Any) -> tuple[int, list[GenerationResult]]:
            writing = [asyncio.ensure_future(engine.generate(wanted)) for wanted in asked]
            await engine.generate(request(PROMPTS[0], max_new_tokens=2, temperature=0.0))
            ended_early, finish_update = 0, engine.finish_update

            async def look_and_finish(version: int) -> None:
                nonlocal ended_early
                before = sum(task.done() for task in writing)
                late = asyncio.ensure_future(engine.generate(request(PROMPTS[1], max_new_tokens=1)))
                writing.append(late)
                await asyncio.wait({late}, timeout=0.3)
                ended_early = sum(task.done() for task in writing) - before
                await finish_update(version)

            engine.finish_update = look_and_finish
            await self.publish(engine, 2, models.new)
            return ended_early, await asyncio.gather(*writing)

        ended_early, results = self.run_updated(models, use)
        assert ended_early == 0
        assert results[-1].versions.tolist() == [2]

    def test_an_update_during_a_pause_lets_nothing_through(self, models: ModelPair) -> None:
        async def use(engine: Any) -> tuple[bool, GenerationResult]:
            await engine.pause()
            waiting = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
            await self.publish(engine, 2, models.new)
            done, _ = await asyncio.wait({waiting}, timeout=0.2)
            await engine.resume()
            return bool(done), await waiting

        ended_early, result = self.run_updated(models, use)
        assert not ended_early
        assert set(result.versions.tolist()) == {2}
        self.check_versions(request(PROMPTS[0]), result, {2: models.new}, 1.0)

    @pytest.mark.parametrize("problem", ["missing", "unknown", "other shape"])
    def test_weights_of_another_model_are_an_error_and_nothing_is_generated_with_them(
        self, models: ModelPair, problem: str
    ) -> None:
        def change(weights: dict[str, Tensor]) -> None:
            name = "model.layers.1.mlp.down_proj.weight"
            tensor = weights[name] if problem == "unknown" else weights.pop(name)
            if problem == "unknown":
                weights["model.layers.7.mlp.down_proj.weight"] = tensor
            elif problem == "other shape":
                weights[name] = tensor[:-1].clone()

        async def use(engine: Any) -> Any:
            with pytest.raises(RunFailedError):
                await self.publish(engine, 2, models.new, change)
            late = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
            done, _ = await asyncio.wait({late}, timeout=0.5)
            late.cancel()
            return late.exception() or late.result() if done else "waits for weights"

        outcome = self.run_updated(models, use)
        assert outcome == "waits for weights" or isinstance(outcome, RunFailedError), f"it still generates: {outcome}"

    def check_versions(
        self, asked: GenerationRequest, result: GenerationResult, models: dict[int, Path], temperature: float
    ) -> None:
        """Check that versions never decrease, and that each token's logprobs match only the model of its version."""
        assert (np.diff(result.versions) >= 0).all()
        assert set(result.versions.tolist()) <= set(models)
        tokens = result.token_ids.tolist()
        for version, model in models.items():
            own = result.versions == version
            difference = np.abs(result.logprobs - model_logprobs(model, asked.prompt_ids, tokens, temperature))
            assert difference[own].max(initial=0.0) <= self.logprob_tolerance, f"version {version}"
            assert not (~own).any() or difference[~own].max() > 100 * self.logprob_tolerance

    async def publish(
        self, engine: Any, version: int, model: Path, change: Callable[[dict[str, Tensor]], object] | None = None
    ) -> SyncReport:
        sync = self.make_sync()
        try:
            return await sync.publish(version, cast("Backend", WeightsOf(model, change)), [engine])
        finally:
            sync.close()

    def run_updated(self, models: ModelPair, use: Callable[[Any], Awaitable[Result]]) -> Result:
        """Return the result of calling `use` with an engine that has the old weights as version 1."""

        async def publish_first(engine: Any) -> Result:
            await self.publish(engine, 1, models.old)
            return await use(engine)

        return self.run(models.old, publish_first)


@cache
def _model_pair(folder: Path, head: str) -> ModelPair:
    old, new = (
        write_tiny_model(folder / f"engine-update-{head}-{name}", seed=seed, tie_word_embeddings=head == "tied")
        for seed, name in enumerate(("old", "new"))
    )
    return ModelPair(old, new)
