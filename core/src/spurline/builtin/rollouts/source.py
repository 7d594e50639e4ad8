"""Source `rollouts`: synchronous reinforcement learning.

A step draws prompts, generates with the weights of the step before, scores, looks back and lays out; the loop updates.
The engine shares the backend's weights, so that nothing is published and no token is ever older than its step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spurline.builtin.configs import RolloutSourceConfig
from spurline.builtin.rollouts.attempts import Attempts
from spurline.builtin.rollouts.draws import Draw, PromptDraws
from spurline.builtin.rollouts.group_collection import Collected, collect_groups
from spurline.builtin.rollouts.health import length_metrics, reward_metrics
from spurline.builtin.rollouts.held_out import RolloutEvaluation
from spurline.builtin.rollouts.preparation import Preparation
from spurline.data.batch import TrainingBatch
from spurline.errors import CheckpointError, ConfigError, Problem
from spurline.protocols.backend import Backend
from spurline.protocols.evaluation import HeldOutEvaluation
from spurline.protocols.rollout_engine import SharesWeights
from spurline.rl.group_runner import Outcome
from spurline.rl.quarantine import SkippedRow
from spurline.rl.turns import turns_of
from spurline.run_context import SourceContext


class RolloutSource:
    """See the module. State between steps: the next prompt to draw, the rows left out, the prompts given up."""

    pure = False

    def __init__(self, config: RolloutSourceConfig, context: SourceContext) -> None:
        run = context.config
        self._config = config
        self._hooks = context.host.hooks
        self._prompts = PromptDraws.open(run.data.train, context, shuffle=run.data.shuffle)
        self._held_out: PromptDraws | None = None
        if run.data.eval:
            self._held_out = PromptDraws.open(run.data.eval, context, shuffle=False, namespace="held-out ")
        self._preparation = Preparation(config, context)
        self._attempts = Attempts(config, context)
        self._loop = asyncio.Runner()
        self._next_draw = 0
        self.total_steps = run.total_steps(self._prompts.prompts_per_epoch, config.prompts_per_step)

    def summary(self) -> Mapping[str, object]:
        config = self._config
        return {
            **self._prompts.summary(),
            "samples_per_epoch": self._prompts.prompts_per_epoch,
            "samples_per_step": config.prompts_per_step,
            "step_of": f"{config.prompts_per_step} prompts x {config.samples_per_prompt} attempts",
            "objective": self._preparation.describe(),
        }

    def start(self, step: int, backend: Backend) -> None:
        """Lend the backend's weights to the engine. Raises ConfigError when the engine cannot take them."""
        engine = self._attempts.engine
        if not isinstance(engine, SharesWeights):
            raise ConfigError(
                [
                    Problem(
                        "source.engine.name",
                        f"is {self._config.engine.name}, which generates with weights of its own, but the source "
                        f"'{self._config.name}' publishes none. Set engine: in_process, or choose an asynchronous "
                        "source.",
                    )
                ]
            )
        engine.share(backend)
        engine.set_version(step - 1)
        self._engine = engine
        self._backend = backend

    def build(self, step: int) -> TrainingBatch:
        begin = time.perf_counter()
        collected = self._loop.run(self._collect())
        seconds = time.perf_counter() - begin
        self._next_draw = collected.next_draw
        self._hooks.on_rollouts_scored(step=step, groups=collected.groups)
        batch = self._preparation.prepare(collected.groups, self._backend).batch
        metrics = {
            **_collection_metrics(collected, self._attempts.take_retries(), seconds),
            **reward_metrics(collected.every),
            **length_metrics(collected.every),
        }
        return replace(batch, info={**batch.info, **metrics})

    async def _collect(self) -> Collected:
        config = self._config
        return await collect_groups(
            self._prompts.take,
            self._run,
            first_draw=self._next_draw,
            count=config.prompts_per_step,
            draw_limit=config.draw_limit,
            leave_out_equal=config.zero_variance == "refill",
        )

    async def _run(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        outcomes = await self._attempts.train(prompts)
        for outcome in outcomes:
            if isinstance(outcome, SkippedRow):
                self._prompts.skip(outcome)
        return outcomes

    def epoch(self, step: int) -> float:
        # Before the run, which is when a plan asks, no prompt has been drawn yet.
        drawn = self._next_draw or step * self._config.prompts_per_step
        return drawn / self._prompts.prompts_per_epoch

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        self._engine.set_version(step)
        return {}

    def evaluation(self) -> HeldOutEvaluation:
        """Attempts at the held-out prompts with the weights as they are."""
        assert self._held_out is not None, "there is no held-out data"
        return RolloutEvaluation(self._config.held_out, self._held_out, self._run_held_out)

    def _run_held_out(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        return self._loop.run(self._attempts.evaluate(prompts))

    def given_up(self) -> Sequence[str]:
        return [group.reason for group in self._attempts.quarantine.groups]

    def state_dict(self) -> dict[str, object]:
        return {
            "data": self._prompts.fingerprint(),
            "next_draw": self._next_draw,
            "prompts": self._prompts.state_dict(),
            "quarantine": self._attempts.quarantine.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if state.get("data") != self._prompts.fingerprint():
            raise CheckpointError(
                "The prompts are not those the checkpoint was trained on: a file changed. Restore it, or start anew "
                "with another run_dir."
            )
        next_draw, quarantine = state["next_draw"], state["quarantine"]
        assert isinstance(next_draw, int), next_draw
        assert isinstance(quarantine, Mapping), quarantine
        self._next_draw = next_draw
        self._attempts.quarantine.load_state_dict(quarantine)
        # Checkpoints from before rows could be skipped have no such part.
        prompts = state.get("prompts", {"skipped": {}})
        assert isinstance(prompts, Mapping), prompts
        self._prompts.load_state_dict(prompts)

    def close(self) -> None:
        try:
            self._loop.run(self._attempts.close())
        finally:
            self._loop.close()


def _collection_metrics(collected: Collected, retries: int, seconds: float) -> dict[str, float]:
    """What generating cost, and what became of the prompts that were drawn."""
    tokens = sum(len(turn.response_ids) for turn in turns_of(collected.every))
    return {
        "time/generate": seconds,
        "rollout/tokens": float(tokens),
        "groups/drawn": float(len(collected.every) + collected.quarantined),
        "groups/filtered": float(len(collected.every) - len(collected.groups)),
        "groups/quarantined": float(collected.quarantined),
        "groups/skipped_rows": float(collected.skipped),
        "groups/retries": float(retries),
        "groups/refill_missing": float(collected.refill_missing),
    }
