"""Everything that makes an attempt at a prompt: engine, environment, rewards on tokens, retries and giving up.

Place on the way: Draw -> Task -> environment with a policy handle -> scored trajectory. One set serves training and
held-out evaluation, which differ in how they sample and in what a failure costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from spurline.errors import ConfigError
from spurline.protocols.source import SourceContext
from spurline_rl.configs import OVERLONG, HeldOutConfig, PromptSourceConfig
from spurline_rl.draws import Draw
from spurline_rl.group_runner import GivenUpPrompts, GroupRunner, Outcome
from spurline_rl.held_out import deciding_term
from spurline_rl.policy import EnginePolicy, SharedPrompts
from spurline_rl.protocols.environment import Environment, PolicyHandle, ShowsPrompt, Task
from spurline_rl.protocols.rollout_engine import MayBeDown, RolloutEngine, Sampling
from spurline_rl.scoring import overlong_penalty, score
from spurline_rl.trajectory import Trajectory


class Attempts:
    """Owns the engine and the environment. Coroutines are awaited on one event loop.

    training: runs the groups that are trained on, scored. given_up: the prompts that training gave up. engine: a source
    may put one that observes it in its place before the first attempt. check_engine: raises for an engine that will not
    do, before there is an environment to close.
    """

    def __init__(
        self, config: PromptSourceConfig, context: SourceContext, check_engine: Callable[[RolloutEngine], None]
    ) -> None:
        run, registry = context.config, context.host.registry
        self._config = config
        self._run_seed = run.seed
        self._is_evaluated = bool(run.data.eval)
        self.engine = registry.create("rollout_engine", config.engine, run=run, tokenizer=context.tokenizer)
        check_engine(self.engine)
        self._environment: Environment = registry.create(
            "environment", config.environment, registry=registry, tokenizer=context.tokenizer, data=run.data
        )
        self.given_up = GivenUpPrompts(config.faults.max_quarantined)
        self.training = self._make_runner(config.samples_per_prompt, self.given_up)

    @property
    def engine(self) -> RolloutEngine:
        return self._engine

    @engine.setter
    def engine(self, engine: RolloutEngine) -> None:
        self._engine = engine
        # Asked here and not by each attempt: isinstance with a Protocol takes longer than all else about a time limit.
        self._seconds_down = engine.seconds_down if isinstance(engine, MayBeDown) else _never_down

    @property
    def shows_prompts(self) -> bool:
        """Return whether the environment says beforehand what the model is first given."""
        return isinstance(self._environment, ShowsPrompt)

    async def evaluate(self, prompts: Sequence[Draw], held_out: HeldOutConfig) -> Sequence[Outcome]:
        """Attempts at held-out prompts; failures count for this evaluation alone, penalties on length not at all."""
        given_up = GivenUpPrompts(self._config.faults.max_quarantined)
        runner = self._make_runner(held_out.samples_per_prompt, given_up, temperature=held_out.temperature)
        return await runner.run_groups(prompts)

    def first_prompt(self, draw: Draw) -> Sequence[int] | None:
        """Token ids of what the model is first given; None where the environment cannot say it beforehand.

        Raises:
            DataError: For a row that cannot be used.
        """
        if not isinstance(self._environment, ShowsPrompt):
            return None
        task = Task(draw.row, draw.dataset, draw.uid, 0, draw.location)
        return self._environment.first_prompt(task)

    async def close(self) -> None:
        """End the engine and the environment."""
        try:
            if hasattr(self._environment, "close"):
                closed = self._environment.close()  # type: ignore[attr-defined]
                if inspect.isawaitable(closed):
                    await closed
        finally:
            await self.engine.close()

    def _make_runner(
        self, samples_per_prompt: int, given_up: GivenUpPrompts, *, temperature: float | None = None
    ) -> GroupRunner:
        """temperature: of held-out attempts, whose distribution is that of the model; None for training."""
        faults, trains = self._config.faults, temperature is None
        sampling = Sampling(**self._config.sampling.model_dump(exclude={"allow_truncated"}))
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature, top_p=1.0, top_k=0)
        is_free = not trains or self._config.sampling.allow_truncated

        prompts = SharedPrompts()

        def make_policy(task: Task, attempt: int) -> PolicyHandle:
            # The engine of this moment: a source may put one that observes it in its place.
            return EnginePolicy(
                self._engine,
                sampling,
                task,
                attempt,
                run_seed=self._run_seed,
                any_distribution=is_free,
                prompts=prompts,
            )

        return GroupRunner(
            self._environment,
            make_policy,
            partial(self._score, punishes_length=trains),
            given_up,
            samples_per_prompt=samples_per_prompt,
            retries=faults.retries,
            attempt_timeout_s=faults.attempt_timeout_s,
            max_concurrent=self._config.max_concurrent,
            seconds_down=lambda: self._seconds_down(),
            carry=self._config.carry if trains else (),
        )

    def _score(self, trajectory: Trajectory, *, punishes_length: bool) -> Trajectory:
        """The trajectory with the weighted sum of its terms on its tokens; `source.overlong` adds a term in training.

        Raises ConfigError when the environment's terms have that term already, or do not say what a success is,
        besides what `score` raises.
        """
        overlong, weights = self._config.overlong, self._config.reward_weights
        if self._is_evaluated:
            # The first attempts of training tell what the held-out ones would only after many steps.
            deciding_term(trajectory.rewards, self._config.held_out.success)
        if overlong is None:
            return score(trajectory, weights)
        if OVERLONG in trajectory.rewards:
            raise ConfigError.at(
                "source.overlong",
                f"adds a reward term '{OVERLONG}', but the environment gives one of that name too. Rename the "
                "environment's, or remove source.overlong.",
            )
        if not punishes_length:
            return score(trajectory, {name: weight for name, weight in weights.items() if name != OVERLONG})
        longest = self._config.sampling.max_new_tokens
        penalty = min(
            overlong_penalty(len(turn.response_ids), longest=longest, buffer=overlong.buffer_tokens)
            for turn in trajectory.turns
        )
        punished = replace(trajectory, rewards={**trajectory.rewards, OVERLONG: penalty})
        return score(punished, {OVERLONG: overlong.penalty, **weights})


def _never_down() -> float:
    return 0.0
