"""Source `rollouts`: synchronous reinforcement learning.

A step draws prompts, generates with the weights of the step before, scores, has the models score the tokens, and lays
out; the loop updates. The engine shares the backend's weights, or, where these are in other processes, has a copy that
every update replaces: no token is ever older than its step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import cast

from spurline.data.batch import TrainingBatch
from spurline.errors import ConfigError
from spurline.protocols.backend import Backend
from spurline.protocols.source import SourceContext
from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_rl.configs import HeldOutConfig, RolloutSourceConfig
from spurline_rl.draws import Draw, SkippedRow
from spurline_rl.group_runner import Outcome
from spurline_rl.prompt_source import PromptSource, collect_groups
from spurline_rl.protocols.rollout_engine import RolloutEngine, SharesWeights, TakesWeights


class RolloutSource(PromptSource):
    """Collects the groups of a step when it is built. Its state: the next draw, rows left out, prompts given up."""

    def __init__(self, config: RolloutSourceConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._loop = asyncio.Runner()
        self._next_draw = 0
        self._retries = 0

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ConfigError when it can neither share the backend's weights nor be brought them."""
        config = self._settings.engine
        lends = self._context.config.backend.facts.lends_model or not config.borrows_model
        self._shares = isinstance(engine, SharesWeights) and lends
        if not self._shares and not (isinstance(engine, TakesWeights) and _TENSORS in engine.transports):
            raise ConfigError.at(
                "source.engine.name",
                f"is {config.name}, which generates with weights of its own, but the source '{self._settings.name}' "
                "publishes none. Set engine: in_process, or choose an asynchronous source.",
            )

    def start(self, step: int, backend: Backend) -> None:
        """Lend or bring the backend's weights to the engine."""
        super().start(step, backend)
        engine = self._attempts.engine
        if self._shares:
            lender = cast("SharesWeights", engine)
            lender.share(backend)
            self._weights: _SharedWeights | _CopiedWeights = _SharedWeights(lender)
        else:
            self._weights = _CopiedWeights(cast("TakesWeights", engine), backend, self._loop)
        self._weights.update(step - 1)

    def build(self, step: int) -> TrainingBatch:
        begin = time.perf_counter()
        config = self._config
        collecting = collect_groups(
            self._prompts.take,
            self._run,
            first_draw=self._next_draw,
            count=config.prompts_per_step,
            draw_limit=config.draw_limit,
            filters=config.zero_variance == "refill",
        )
        collected = self._loop.run(collecting)
        seconds = time.perf_counter() - begin
        self._next_draw = collected.next_draw
        retries, self._retries = self._retries, 0
        return self._batch(step, collected, self._backend, retries=retries, seconds=seconds)

    async def _run(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        training = self._attempts.training
        outcomes = await training.run_groups(prompts)
        for outcome in outcomes:
            self._retries += training.take_retries(outcome.uid)
            if isinstance(outcome, SkippedRow):
                self._prompts.skip(outcome)
        return outcomes

    def epoch(self, step: int) -> float:
        # Before the run, which is when a plan asks, no prompt has been drawn yet.
        drawn = self._next_draw or step * self._config.prompts_per_step
        return drawn / self._prompts.prompts_per_epoch

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        return self._weights.update(step)

    def make_attempts(self, prompts: Sequence[Draw], held_out: HeldOutConfig) -> Sequence[Outcome]:
        return self._loop.run(self._attempts.evaluate(prompts, held_out))

    def state_dict(self) -> dict[str, object]:
        return {**self._prompts_state(), "next_draw": self._next_draw}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        # Checkpoints from before rows could be skipped have no such part.
        self._load_prompts_state({"prompts": {"skipped": {}}, **state})
        next_draw = state["next_draw"]
        assert isinstance(next_draw, int), next_draw
        self._next_draw = next_draw

    def close(self) -> None:
        try:
            self._loop.run(self._attempts.close())
        finally:
            self._loop.close()
            super().close()


_TENSORS = "in_process"
"""The transport of an engine that takes the tensors themselves."""


class _SharedWeights:
    """The engine generates with the model that is trained."""

    def __init__(self, engine: SharesWeights) -> None:
        self._engine = engine

    def update(self, version: int) -> Mapping[str, float]:
        self._engine.set_version(version)
        return {}


class _CopiedWeights:
    """The engine has a copy, in this process."""

    def __init__(self, engine: TakesWeights, backend: Backend, loop: asyncio.Runner) -> None:
        self._engine, self._backend, self._loop = engine, backend, loop

    def update(self, version: int) -> Mapping[str, float]:
        """Replace every weight of the copy; returns what a publish reports, as metrics."""
        begin = time.perf_counter()
        sent = self._loop.run(self._bring(version))
        return {"time/sync": time.perf_counter() - begin, "sync/bytes": float(sent)}

    async def _bring(self, version: int) -> int:
        sent = 0
        await self._engine.begin_update(version)
        for name, tensor in self._backend.named_weights():
            await self._engine.load_bucket(WeightBucket(_TENSORS, (TensorPlace.of(name, tensor),), tensors=(tensor,)))
            sent += tensor.nbytes
        await self._engine.finish_update(version)
        return sent
