"""Evaluate with attempts at held-out prompts: mean reward, pass@1 and pass@k. One reward decides which attempts pass.

Seeds depend only on the prompt and the attempt, so all evaluations use the same seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from spurline.data.configs import SequentialOrderConfig
from spurline.errors import ConfigError, DataError
from spurline.protocols.backend import Backend
from spurline.protocols.dataset import DatasetConfig, Longest
from spurline.protocols.evaluation import EvaluationContext
from spurline.protocols.held_out import HeldOutEvaluation
from spurline.protocols.source import SourceContext
from spurline_rl.draws import Draw, PromptDraws, SkippedRow
from spurline_rl.evaluation_configs import (
    HeldOutConfig,
    RolloutsEvaluationConfig,
    success_problems,
    terms_by_environment,
)
from spurline_rl.group_runner import GivenUpPrompt, Outcome
from spurline_rl.metrics import all_returns, mean_terms
from spurline_rl.protocols.environment import Environment
from spurline_rl.trajectory import Group, Trajectory, trajectory_return

HELD_OUT = "held-out "
"""Prefix of the uids of held-out prompts. It gives them different seeds from training prompts."""
OF_SOURCE = "source.held_out."


class MakesAttempts(Protocol):
    """A source that can make attempts at any prompts. Its facts set `makes_attempts`."""

    generates_with_copies: bool

    def make_attempts(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None = None
    ) -> Sequence[Outcome]:
        """Return the outcomes of attempts with the newest weights, in the run's environment if none is given."""
        ...

    def with_model_rewards(self, groups: Sequence[Group], backend: Backend) -> Sequence[Group]:
        """Return groups of the run's environment with the rewards that models of the backend give."""
        ...

    def longest_held_out(self, prompts: PromptDraws) -> Longest | None: ...

    def sample_keys(self) -> NDArray[np.uint64]: ...


@dataclass(eq=False)
class AttemptsEvaluation(HeldOutEvaluation):
    """Evaluates by attempts at held-out prompts.

    Attributes:
        where: Prefix of the settings' names, such as `source.held_out.`, for messages.
        terms: Names of the reward terms of all attempts, or None if they are not known beforehand.
        environments: Labels of the environments of a run with several.
    """

    config: HeldOutConfig
    prompts: PromptDraws
    source: MakesAttempts
    where: str
    terms: Collection[str] | None
    environments: Collection[str] = ()

    def __post_init__(self) -> None:
        self.measures_copies = self.source.generates_with_copies

    def summary(self) -> Mapping[str, Any]:
        return {**self.prompts.summary(), "notes": self.prompts.notes_of_shared(self.source.sample_keys())}

    def longest(self) -> Longest | None:
        return self.source.longest_held_out(self.prompts)

    def fingerprint(self) -> str:
        return self.prompts.fingerprint()

    def metrics(self) -> Collection[str] | None:
        if self.terms is None:
            return None
        scores = {"reward", "pass@1", f"pass@{self.config.samples_per_prompt}"}
        of_parts = {f"env/{label}/{score}" for label in self.environments for score in scores}
        return {*scores, *of_parts, "failed", "skipped_rows", *(f"rewards/{term}" for term in self.terms)}

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the metrics, and samples for the report.

        The metrics are `reward`, `rewards/TERM`, `pass@1`, and `pass@k` if there are several attempts. A prompt that is
        given up has not passed. It counts in `failed`, but not in the mean rewards. `skipped_rows` counts the rows that
        `on_bad_row: skip` leaves out. Prefixes `env/NAME/` show the environment in a run with several.
        """
        wanted = min(self.prompts.prompts_per_epoch, self.config.max_prompts or self.prompts.prompts_per_epoch)
        taken = self.prompts.take(0, wanted)
        outcomes = self.source.make_attempts([draw for draw in taken if isinstance(draw, Draw)], self.config)
        skipped = [item for item in (*taken, *outcomes) if isinstance(item, SkippedRow)]
        count = wanted - len(skipped)
        if count == 0:
            raise DataError(f"All {wanted} held-out prompts were left out as unusable. The first: {skipped[0].reason}")
        groups = [outcome for outcome in outcomes if isinstance(outcome, Group)]
        groups = self.source.with_model_rewards(groups, backend)
        failed = Counter(outcome.environment for outcome in outcomes if isinstance(outcome, GivenUpPrompt))
        metrics = self._scores(groups, failed.total())
        if groups:
            metrics |= mean_terms(groups)
        for label in sorted({*failed, *(group.environment for group in groups)} - {""}):
            part = [group for group in groups if group.environment == label]
            metrics |= {f"env/{label}/{name}": value for name, value in self._scores(part, failed[label]).items()}
        if skipped:
            metrics["skipped_rows"] = float(len(skipped))
        if failed:
            metrics["failed"] = float(failed.total())
        return metrics, [self._sample(group) for group in groups]

    def _scores(self, groups: Sequence[Group], num_failed: int) -> dict[str, float]:
        """Return the mean reward, pass@1 and pass@k of some prompts, `num_failed` of which were given up."""
        config, where = self.config, self.where
        passed = [np.array([has_passed(attempt, config, where) for attempt in group.trajectories]) for group in groups]
        count = len(groups) + num_failed
        scores = {"pass@1": float(sum(found.mean() for found in passed)) / count}
        if self.config.samples_per_prompt > 1:
            scores[f"pass@{self.config.samples_per_prompt}"] = float(sum(found.any() for found in passed)) / count
        return scores | ({"reward": float(all_returns(groups).mean())} if groups else {})

    def _sample(self, group: Group) -> dict[str, Any]:
        """Return the first attempt for the report. The texts come from `info`, which the environment fills."""
        trajectory = group.trajectories[0]
        info = trajectory.info
        return {
            "prompt": str(info.get("prompt", group.uid)),
            "response": info.get("messages") or str(info.get("response", "")),
            "reference": info.get("reference"),
            "scores": {name: float(value) for name, value in trajectory.rewards.items()},
            "reward": float(group.returns[0]),
            "passed": has_passed(trajectory, self.config, self.where),
        }


def open_held_out(data: Sequence[DatasetConfig], context: SourceContext) -> PromptDraws:
    """Open held-out prompts in the order of their files."""
    order = SequentialOrderConfig(name="core/sequential")
    return PromptDraws.open(data, context, order=order, per_step=1, namespace=HELD_OUT)


class RolloutsEvaluation(AttemptsEvaluation):
    """Evaluation `rollouts`: attempts at the prompts of the evaluation's `data`."""

    def __init__(self, config: RolloutsEvaluationConfig, context: EvaluationContext) -> None:
        # The config refuses a source that makes no attempts.
        source, prompts = cast("MakesAttempts", context.source), open_held_out(config.data, context.run)
        made_by = context.run.config.source
        terms, environments = made_by.facts.reward_terms, terms_by_environment(made_by).keys() - {""}
        super().__init__(config, prompts, source, f"{context.where}.", terms, environments)


def has_passed(trajectory: Trajectory, config: HeldOutConfig, where: str = OF_SOURCE) -> bool:
    """Return whether the deciding reward of a scored trajectory is high enough. Raises the error of `deciding_term`."""
    name = deciding_term(trajectory, config, where)
    value = trajectory_return(trajectory) if name is None else trajectory.rewards[name]
    return value >= config.success_of(trajectory.environment)[0].at_least


def deciding_term(trajectory: Trajectory, config: HeldOutConfig, where: str = OF_SOURCE) -> str | None:
    """Return the reward term that decides success, or None if attempts have only rewards of turns.

    Raises:
        ConfigError: If the config names a term that the attempt lacks, or names no term and there are several.
    """
    success, setting = config.success_of(trajectory.environment)
    problems = list(success_problems(success, trajectory.rewards, f"{where}{setting}"))
    if problems:
        raise ConfigError(problems)
    return success.reward if success.reward is not None else next(iter(trajectory.rewards), None)
