"""Connect the parts that make attempts at prompts: engine, environment, scores, and retries.

The environment gets a task and a policy handle, and returns a trajectory, which is scored. Training and held-out
evaluation share these parts, but differ in sampling and in how failures count.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from spurline.errors import ConfigError
from spurline.protocols.source import SourceContext
from spurline_rl.configs import CUT_OFF, OVERLONG, PromptSourceConfig, support_width
from spurline_rl.draws import Draw, PromptDraws
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.group_runner import GivenUpPrompts, GroupRunner, Outcome
from spurline_rl.held_out import deciding_term
from spurline_rl.policy import EnginePolicy
from spurline_rl.protocols.environment import ChoosesByRow, Environment, ShowsPrompt
from spurline_rl.protocols.rollout_engine import RolloutEngine, Sampling, TakesWeights
from spurline_rl.protocols.scorer import Scorer
from spurline_rl.scoring import overlong_penalty, score
from spurline_rl.trajectory import Trajectory


class Attempts:
    """Owns the engine and the environment. Its coroutines are awaited on one event loop.

    Args:
        check_engine: Raises an error for an engine that the source cannot use. It is called before the environment is
            made, since an error would otherwise leave the environment open.

    Attributes:
        engine: The engine. Before a source reads `training`, it may replace the engine by a wrapper around it.
        given_up: The prompts that training gave up.
    """

    def __init__(
        self, config: PromptSourceConfig, context: SourceContext, check_engine: Callable[[RolloutEngine], None]
    ) -> None:
        run, registry = context.config, context.host.registry
        self._config = config
        self._run_seed = run.seed
        self._is_evaluated = bool(run.data.eval)
        self.engine: RolloutEngine = registry.create(
            "rollout_engine", config.engine, run=run, tokenizer=context.tokenizer
        )
        check_engine(self.engine)
        self._seconds_down = self.engine.seconds_down if isinstance(self.engine, TakesWeights) else lambda: 0.0
        self._environment: Environment = registry.create(
            "environment", config.environment, registry=registry, tokenizer=context.tokenizer, data=run.data
        )
        self._scorers: list[Scorer] = [
            registry.create("scorer", each, run=run, tokenizer=context.tokenizer) for each in config.scorers
        ]
        self.given_up = GivenUpPrompts(config.faults.max_quarantined)

    @cached_property
    def training(self) -> GroupRunner:
        """Return the runner of groups that are trained on."""
        return self._make_runner(self.given_up)

    @property
    def declared_terms(self) -> Collection[str] | None:
        """Return the reward terms that the environment declares itself. Further terms are possible."""
        return getattr(self._environment, "reward_terms", None)

    @property
    def notes(self) -> Sequence[str]:
        """Return what the environment says about itself, for `spurline plan` and for the start of a run."""
        return getattr(self._environment, "notes", ())

    async def evaluate(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None = None
    ) -> Sequence[Outcome]:
        """Attempt held-out prompts, in the run's environment if none is given.

        Failures count only for this evaluation, and there is no penalty on length.
        """
        given_up = GivenUpPrompts(self._config.faults.max_quarantined)
        runner = self._make_runner(given_up, held_out)
        if environment is not None:
            runner.environment, runner.score = environment, partial(score, weights={})
        return await runner.run_groups(prompts)

    def first_prompt(self, draw: Draw) -> Sequence[int] | None:
        """Return the result of `ShowsPrompt.first_prompt`, or None if the environment does not know it beforehand."""
        if not isinstance(self._environment, ShowsPrompt):
            return None
        return self._environment.first_prompt(draw.task(0))

    def label_of(self, draw: Draw) -> str:
        """Return the label of the row's environment if rows choose theirs, or an empty text. Raises DataError."""
        return self._environment.label_of(draw.task(0)) if isinstance(self._environment, ChoosesByRow) else ""

    def check_labels(self, prompts: PromptDraws) -> None:
        """Raise DataError for the first row that chooses no environment although it must, unless it is skipped."""
        if isinstance(self._environment, ChoosesByRow):
            for draw in prompts.rows(sys.maxsize):
                if isinstance(draw, Draw) and draw.dataset.on_bad_row == "error":
                    self.label_of(draw)

    async def close(self) -> None:
        """End the engine, the environment and the scorers."""
        try:
            for component in (self._environment, *self._scorers):
                if hasattr(component, "close"):
                    closed = component.close()  # type: ignore[attr-defined]
                    if inspect.isawaitable(closed):
                        await closed
        finally:
            await self.engine.close()

    def _make_runner(self, given_up: GivenUpPrompts, held_out: HeldOutConfig | None = None) -> GroupRunner:
        """Make a runner for training, or for held-out attempts, which are sampled without top_p and top_k."""
        config, trains = self._config, held_out is None
        sampling = Sampling(**config.sampling.model_dump(), support_width=support_width(config.sampling.top_k))
        if held_out is not None:
            sampling = replace(sampling, temperature=held_out.temperature, top_p=1.0, top_k=0, support_width=0)
        return GroupRunner(
            self._environment,
            partial(EnginePolicy, self.engine, sampling, run_seed=self._run_seed, any_distribution=not trains),
            partial(self._score, trains=trains),
            given_up,
            samples_per_prompt=(held_out or config).samples_per_prompt,
            retries=config.faults.retries,
            attempt_timeout_s=config.faults.attempt_timeout_s,
            max_concurrent=config.max_concurrent,
            seconds_down=self._seconds_down,
            carry=config.carry if trains else (),
            scorers=self._scorers if trains else (),
        )

    def _score(self, trajectory: Trajectory, *, trains: bool) -> Trajectory:
        """Return the trajectory with scores. In training, `source.overlong` and `source.cut_off` have their effect."""
        config, added = self._config, self._config.added_terms
        if self._is_evaluated:
            # Check this in training too, since the first held-out attempts may come after many steps.
            deciding_term(trajectory, config.held_out)
        weights = config.reward_weights
        if config.environment.by_label:
            # The other terms are those of other environments.
            weights = {name: weight for name, weight in weights.items() if name in (*trajectory.rewards, *added)}
        if taken := sorted(added.keys() & trajectory.rewards.keys()):
            raise ConfigError.at(
                f"source.{taken[0]}",
                f"adds a reward term '{taken[0]}', but the environment gives a term of that name too. Rename the "
                f"environment's term, or remove source.{taken[0]}.",
            )
        if not trains:
            return score(trajectory, {name: weight for name, weight in weights.items() if name not in added})
        was_cut = trajectory.turns[-1].finish_reason == "length"
        terms: dict[str, float] = {}
        if config.overlong is not None:
            longest = config.environment.turn_tokens(trajectory.environment, config.sampling.max_new_tokens)
            buffer = config.overlong.buffer_tokens
            terms[OVERLONG] = min(
                overlong_penalty(len(turn.response_ids), longest=longest, buffer=buffer) for turn in trajectory.turns
            )
        if CUT_OFF in added:
            terms[CUT_OFF] = -float(was_cut)
        if was_cut and config.cut_off.action == "mask":
            turns = tuple(replace(turn, loss_mask=np.zeros_like(turn.loss_mask)) for turn in trajectory.turns)
            trajectory = replace(trajectory, turns=turns, counts=config.cut_off.in_baseline)
        if terms:
            trajectory = replace(trajectory, rewards={**trajectory.rewards, **terms})
        return score(trajectory, {**added, **weights})
