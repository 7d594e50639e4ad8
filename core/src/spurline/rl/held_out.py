"""Held-out evaluation by rollouts: mean reward, and pass@1 and pass@k by the reward that says what a success is.

Place on the way: eval datasets -> draws -> attempts with seeds of their own -> returns -> `eval/...` metrics and sample
trajectories. Seeds depend on the prompt and the attempt alone, so that every evaluation asks for the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from spurline.errors import ConfigError, DataError
from spurline.protocols.backend import Backend
from spurline.protocols.source import HeldOutEvaluation
from spurline.rl.configs import HeldOutConfig, SuccessConfig, several_terms, unknown_term
from spurline.rl.draws import Draw, PromptDraws, SkippedRow
from spurline.rl.group_runner import Outcome
from spurline.rl.health import all_returns, mean_terms
from spurline.rl.trajectory import Group, Trajectory, group_returns, trajectory_return

RunHeldOut = Callable[[Sequence[Draw]], Sequence[Outcome]]


class RolloutEvaluation(HeldOutEvaluation):
    """Evaluates on held-out prompts. run: makes the attempts at prompts with the weights as they are, and waits."""

    def __init__(self, config: HeldOutConfig, prompts: PromptDraws, run: RunHeldOut) -> None:
        self._config = config
        self._prompts = prompts
        self._run = run

    def summary(self) -> Mapping[str, Any]:
        return self._prompts.summary()

    def fingerprint(self) -> str:
        return self._prompts.fingerprint()

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """`eval/reward`, `eval/rewards/TERM`, `eval/pass@1`, with several attempts `eval/pass@k`, `eval/time`.

        A prompt that was given up counts as failed, and in `eval/failed`; its rewards are not known and do not count.
        Rows that cannot be used are left out under `on_bad_row: skip`, and counted in `eval/skipped_rows`.
        """
        begin = time.perf_counter()
        wanted = min(self._prompts.prompts_per_epoch, self._config.max_prompts or self._prompts.prompts_per_epoch)
        taken = self._prompts.take(0, wanted)
        outcomes = self._run([draw for draw in taken if isinstance(draw, Draw)])
        skipped = [item for item in (*taken, *outcomes) if isinstance(item, SkippedRow)]
        count = wanted - len(skipped)
        if count == 0:
            raise DataError(f"All {wanted} held-out prompts were left out as unusable. The first: {skipped[0].reason}")
        groups = [outcome for outcome in outcomes if isinstance(outcome, Group)]
        metrics = _pass_rates(groups, count, self._config) | _rewards(groups)
        if skipped:
            metrics["eval/skipped_rows"] = float(len(skipped))
        if len(groups) < count:
            metrics["eval/failed"] = float(count - len(groups))
        metrics["eval/time"] = time.perf_counter() - begin
        return metrics, [_sample(group, self._config) for group in groups]


def has_passed(trajectory: Trajectory, success: SuccessConfig) -> bool:
    """Whether the reward that decides reaches its number. trajectory: scored.

    Raises ConfigError when its terms leave open which one that is.
    """
    name = deciding_term(trajectory.rewards, success)
    value = trajectory_return(trajectory) if name is None else trajectory.rewards[name]
    return value >= success.at_least


def deciding_term(terms: Collection[str], success: SuccessConfig) -> str | None:
    """Name of the reward term that decides about success; None where an attempt has rewards of turns alone.

    Raises ConfigError when it is not among the terms of an attempt, or when there are several and none is named.
    """
    if success.reward is None and len(terms) > 1:
        raise ConfigError.at("source.held_out.success", several_terms(terms))
    if success.reward is not None and success.reward not in terms:
        raise ConfigError.at("source.held_out.success.reward", unknown_term(success.reward, terms))
    return success.reward if success.reward is not None else next(iter(terms), None)


def _pass_rates(groups: Sequence[Group], count: int, config: HeldOutConfig) -> dict[str, float]:
    """Share of attempts that pass, and of prompts that any attempt passes."""
    passed = [
        np.array([has_passed(trajectory, config.success) for trajectory in group.trajectories]) for group in groups
    ]
    rates = {"eval/pass@1": float(sum(found.mean() for found in passed)) / count}
    if config.samples_per_prompt > 1:
        rates[f"eval/pass@{config.samples_per_prompt}"] = float(sum(found.any() for found in passed)) / count
    return rates


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    if not groups:
        return {}
    terms = {f"eval/{name}": value for name, value in mean_terms(groups).items()}
    return {"eval/reward": float(all_returns(groups).mean()), **terms}


def _sample(group: Group, config: HeldOutConfig) -> dict[str, Any]:
    """The first attempt for the report. What the environment's `info` does not say is left empty."""
    trajectory = group.trajectories[0]
    info = trajectory.info
    reward = float(group_returns(group)[0])
    return {
        "prompt": str(info.get("prompt", group.uid)),
        "response": info.get("messages") or str(info.get("response", "")),
        "reference": info.get("reference"),
        "scores": {name: float(value) for name, value in trajectory.rewards.items()},
        "reward": reward,
        "passed": has_passed(trajectory, config.success),
    }
