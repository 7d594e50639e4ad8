"""Everything that makes an attempt at a prompt: engine, environment, rewards on tokens, retries and quarantine.

Place on the way: Draw -> Task -> environment with a policy handle -> scored trajectory. One set serves training and
held-out evaluation, which differ in how they sample and in what a failure costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace

from spurline.errors import ConfigError, Problem
from spurline.protocols.environment import Environment, PolicyHandle, Task
from spurline.protocols.rollout_engine import MayBeDown, RolloutEngine, Sampling
from spurline.protocols.source import SourceContext
from spurline.rl.configs import OVERLONG, PromptSourceConfig
from spurline.rl.draws import Draw
from spurline.rl.given_up import Quarantine
from spurline.rl.group_runner import GroupRunner, Outcome
from spurline.rl.policy import EnginePolicy
from spurline.rl.scoring import overlong_penalty, score
from spurline.rl.trajectory import Trajectory


class Attempts:
    """Owns the engine and the environment. Coroutines are awaited on one event loop."""

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        self._config = config
        self._run_seed = run.seed
        self.engine: RolloutEngine = registry.create(
            "rollout_engine", config.engine, run=run, tokenizer=context.tokenizer
        )
        self._environment: Environment = registry.create(
            "environment", config.environment, registry=registry, tokenizer=context.tokenizer, data=run.data
        )
        sampling = config.sampling
        self._sampling = Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop=sampling.stop,
        )
        self.quarantine = Quarantine(config.faults.max_quarantined)
        self.training = self._runner(
            self._sampling,
            self.quarantine,
            config.samples_per_prompt,
            self._score,
            any_distribution=sampling.allow_truncated,
        )

    async def train(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        """The groups of these prompts, scored for training, in order."""
        return await self.training.run_groups(prompts)

    async def train_one(self, prompt: Draw) -> Outcome:
        """The group of this prompt, scored for training."""
        return await self.training.run_group(prompt)

    async def evaluate(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        """Attempts at held-out prompts; failures count for this evaluation alone, penalties on length not at all."""
        held_out = self._config.held_out
        sampling = replace(self._sampling, temperature=held_out.temperature, top_p=1.0, top_k=0)
        quarantine = Quarantine(self._config.faults.max_quarantined)
        runner = self._runner(
            sampling, quarantine, held_out.samples_per_prompt, self._score_held_out, any_distribution=True
        )
        return await runner.run_groups(prompts)

    def take_retries(self, uid: str) -> int:
        """Attempts at this prompt, in training, that were made again; told once."""
        return self.training.take_retries(uid)

    async def close(self) -> None:
        """End the engine and the environment."""
        try:
            if hasattr(self._environment, "close"):
                closed = self._environment.close()  # type: ignore[attr-defined]
                if inspect.isawaitable(closed):
                    await closed
        finally:
            await self.engine.close()

    def _runner(
        self,
        sampling: Sampling,
        quarantine: Quarantine,
        samples_per_prompt: int,
        score_attempt: Callable[[Trajectory], Trajectory],
        *,
        any_distribution: bool,
    ) -> GroupRunner:
        faults = self._config.faults

        def make_policy(task: Task, attempt: int) -> PolicyHandle:
            return EnginePolicy(
                self.engine,
                sampling,
                run_seed=self._run_seed,
                task=task,
                attempt=attempt,
                any_distribution=any_distribution,
            )

        return GroupRunner(
            self._environment,
            make_policy,
            score_attempt,
            quarantine,
            samples_per_prompt=samples_per_prompt,
            retries=faults.retries,
            attempt_timeout_s=faults.attempt_timeout_s,
            max_concurrent=self._config.max_concurrent,
            seconds_down=self._seconds_down,
        )

    def _seconds_down(self) -> float:
        return self.engine.seconds_down() if isinstance(self.engine, MayBeDown) else 0.0

    def _score(self, trajectory: Trajectory) -> Trajectory:
        overlong = self._config.overlong
        if overlong is None:
            return score(trajectory, self._config.reward_weights)
        _check_terms(trajectory)
        penalty = min(
            overlong_penalty(
                len(turn.response_ids), longest=self._config.sampling.max_new_tokens, buffer=overlong.buffer_tokens
            )
            for turn in trajectory.turns
        )
        punished = replace(trajectory, rewards={**trajectory.rewards, OVERLONG: penalty})
        return score(punished, {OVERLONG: overlong.penalty, **self._config.reward_weights})

    def _score_held_out(self, trajectory: Trajectory) -> Trajectory:
        weights = self._config.reward_weights
        if self._config.overlong is None:
            return score(trajectory, weights)
        _check_terms(trajectory)
        return score(trajectory, {name: weight for name, weight in weights.items() if name != OVERLONG})


def _check_terms(trajectory: Trajectory) -> None:
    """Raise ConfigError when the environment's terms leave no room for that of `source.overlong`."""
    if OVERLONG in trajectory.rewards:
        raise ConfigError(
            [
                Problem(
                    "source.overlong",
                    f"adds a reward term '{OVERLONG}', but the environment gives one of that name too. Rename the "
                    "environment's, or remove source.overlong.",
                )
            ]
        )
