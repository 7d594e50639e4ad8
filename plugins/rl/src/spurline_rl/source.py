"""Source `rollouts`: synchronous reinforcement learning. All tokens of a batch come from the latest weights.

A step draws prompts, generates responses, scores attempts, computes logprobs and other token values, and makes a batch.
The engine generates with the backend's weights. An engine that cannot share them generates with a copy, which is
replaced after every update.
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
from spurline_rl.configs import RolloutSourceConfig
from spurline_rl.draws import Draw, SkippedRow
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.group_runner import Outcome
from spurline_rl.prompt_source import PromptSource, collect_groups
from spurline_rl.protocols.environment import Environment
from spurline_rl.protocols.rollout_engine import RolloutEngine, SharesWeights, TakesWeights


class RolloutSource(PromptSource):
    """A source that collects the prompt groups of a step when the step's batch is built."""

    def __init__(self, config: RolloutSourceConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._loop = asyncio.Runner()
        self._next_draw = 0
        self._retries = 0

    def check_engine(self, engine: RolloutEngine) -> None:
        config = self._settings.engine
        lends = self._context.config.backend.facts.lends_model or not config.borrows_model
        self._shares = isinstance(engine, SharesWeights) and lends
        if not self._shares and not (isinstance(engine, TakesWeights) and _TENSORS in engine.transports):
            raise ConfigError.at(
                "source.engine.name",
                f"is {config.name}, which needs a copy of the weights, but the source '{self._settings.name}' does not "
                "publish weights to it. Set engine: in_process, or source: async_rollouts.",
            )

    def start(self, step: int, backend: Backend) -> None:
        super().start(step, backend)
        if self._shares:
            cast("SharesWeights", self._attempts.engine).share(backend)
        self.after_update(step - 1, backend)

    def build(self, step: int) -> TrainingBatch:
        begin = time.perf_counter()
        config = self._settings
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
        batch, _ = self._batch(step, collected, self._backend, retries=retries, seconds=seconds)
        return batch

    async def _run(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        training = self._attempts.training
        outcomes = await training.run_groups(prompts)
        for outcome in outcomes:
            self._retries += training.take_retries(outcome.uid)
            if isinstance(outcome, SkippedRow):
                self._prompts.skip(outcome)
        return outcomes

    def epoch(self, step: int) -> float:
        # `spurline plan` draws no prompts, so there the number of drawn prompts is computed from the step.
        drawn = self._next_draw or step * self._settings.prompts_per_step
        return drawn / self._prompts.prompts_per_epoch

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        if self._shares:
            cast("SharesWeights", self._attempts.engine).set_version(step)
            return {}
        begin = time.perf_counter()
        sent = self._loop.run(_publish(cast("TakesWeights", self._attempts.engine), backend, step))
        return {"time/sync": time.perf_counter() - begin, "sync/bytes": float(sent)}

    def make_attempts(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None = None
    ) -> Sequence[Outcome]:
        return self._loop.run(self._attempts.evaluate(prompts, held_out, environment))

    def state_dict(self) -> dict[str, object]:
        return {**self._prompts_state(), "next_draw": self._next_draw}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._load_prompts_state(state)
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
"""The transport that passes tensors within this process."""


async def _publish(engine: TakesWeights, backend: Backend, version: int) -> int:
    """Send all weights of the backend to the engine. Returns the number of bytes sent."""
    sent = 0
    await engine.begin_update(version)
    for name, tensor in backend.named_weights():
        await engine.load_bucket(WeightBucket(_TENSORS, (TensorPlace.of(name, tensor),), tensors=(tensor,)))
        sent += tensor.nbytes
    await engine.finish_update(version)
    return sent
