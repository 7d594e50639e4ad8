"""Score answers with reward functions, and add the weighted sum of scores to the reward of a trajectory's last token.

Data flow: Answer -> reward functions -> reward terms by name -> `score` -> a trajectory whose turns all have
`rewards` [A] -> advantages. The evaluation `answers` reads the reward terms and does not call `score`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from spurline.errors import ConfigError, PluginError, Problem, RunFailedError, SpurlineError
from spurline.plugins.registry import Registry
from spurline_concurrency.calls import all_or_none, in_thread, is_async, located
from spurline_rl.evaluation_configs import unknown_term
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer, Reward, RewardConfig, ScoresMany
from spurline_rl.trajectory import Trajectory, Turn, with_fields

_SHOWN_CHARACTERS = 200
_GATHERING_S = 0.01
"""Seconds in which answers are gathered for one call of `score_many`."""
_NUMBERS = (int, float, np.number, np.bool_)


async def reward_terms(rewards: Mapping[str, Reward], answer: Answer) -> dict[str, float]:
    """Return the score from each reward. If a reward fails, AttemptFailedError names the reward and the response."""
    return {name: await _call(name, reward, answer) for name, reward in rewards.items()}


async def terms_of_all(
    rewards: Mapping[str, Reward], answers: Sequence[Answer], *, retries: int = 0
) -> list[dict[str, float]]:
    """Return the `reward_terms` of each answer, in order. All answers are scored at the same time.

    Args:
        retries: How many times an answer may be scored again if a reward fails.

    Raises:
        AttemptFailedError: The first failure, after all other calls have ended.
    """

    async def score_one(answer: Answer) -> dict[str, float]:
        for _ in range(retries):
            with suppress(AttemptFailedError):
                return await reward_terms(rewards, answer)
        return await reward_terms(rewards, answer)

    return await all_or_none([score_one(answer) for answer in answers], "scoring")


def checked_score(name: str, value: Any, answer: Answer) -> float:
    """Return a score (a number or scalar array) as a float. Raises AttemptFailedError if it is not a finite number."""
    number = value
    if not isinstance(value, _NUMBERS) and getattr(value, "shape", None) == ():
        number = value.item()
    if not isinstance(number, _NUMBERS):
        hint = " Does it lack a return statement?" if value is None else ""
        raise AttemptFailedError(
            f"Reward '{name}' returned {_shorten(value)} for {_place(answer)}; it must return a number.{hint}"
        )
    try:
        found = float(number)
    except OverflowError:
        # The integer is too large for a float.
        found = math.inf
    if not math.isfinite(found):
        raise AttemptFailedError(f"Reward '{name}' returned {found} for {_place(answer)}; it must be finite.")
    return found


def make_rewards(configs: Mapping[str, RewardConfig], registry: Registry) -> dict[str, Reward]:
    """Build the configured rewards. If one raises PluginError, the reward's name is added to the message."""
    built: dict[str, Reward] = {}
    for name, config in configs.items():
        try:
            built[name] = registry.create("reward", config)
            if hasattr(built[name], "score_async"):
                raise PluginError("`score_async` is not called any more: rename `score_async` to `async def score`.")
        except BaseException as error:
            close_all(built)
            if isinstance(error, PluginError):
                raise PluginError(f"reward '{name}': {error}") from error
            raise
    return built


def close_all(components: Mapping[str, Any]) -> None:
    """Close each component that has a `close` method."""
    for component in components.values():
        if hasattr(component, "close"):
            component.close()


class _Batch:
    """Answers that wait to be scored together, and the call that scores them."""

    def __init__(self, reward: ScoresMany) -> None:
        self._reward = reward
        self.answers: list[Answer] = []
        self.scores = asyncio.ensure_future(self._score())

    async def _score(self) -> Sequence[Any]:
        # Attempts that end together reach this point one after the other.
        await asyncio.sleep(_GATHERING_S)
        _open_batches.pop(id(self._reward), None)
        found = await _awaited(self._reward.score_many, self.answers)
        if len(found) != len(self.answers):
            raise AttemptFailedError(f"score_many returned {len(found)} scores for {len(self.answers)} answers.")
        return found


_open_batches: dict[int, _Batch] = {}
"""The batch that takes further answers, by the id of its reward. Rewards may be unhashable, and batches keep them."""


async def _score_together(reward: ScoresMany, answer: Answer) -> Any:
    """Score the answer in one call of `score_many` with other answers that are finished now."""
    batch = _open_batches.get(id(reward))
    if batch is None or batch.scores.done() or batch.scores.get_loop() is not asyncio.get_running_loop():
        batch = _open_batches[id(reward)] = _Batch(reward)
    place = len(batch.answers)
    batch.answers.append(answer)
    # An attempt that is cancelled must not cancel the call for the other attempts.
    return (await asyncio.shield(batch.scores))[place]


async def _awaited(function: Callable[..., Any], argument: Any) -> Any:
    value = await function(argument) if is_async(function) else await in_thread(function, argument)
    return await value if inspect.isawaitable(value) else value


async def _call(name: str, reward: Reward, answer: Answer) -> float:
    judged = replace(answer, metrics={})
    try:
        if isinstance(reward, ScoresMany):
            value = await _score_together(reward, judged)
        else:
            value = await _awaited(reward.score, judged)
    except AttemptFailedError as error:
        raise AttemptFailedError(f"Reward '{name}' on {_place(answer)}: {error}") from error
    except RunFailedError as error:
        raise RunFailedError(f"Reward '{name}': {error}") from error
    except SpurlineError:
        raise
    except Exception as error:
        raise AttemptFailedError(f"Reward '{name}' failed on {_place(answer)}: {located(error)}") from error
    answer.metrics.update({f"scoring/{name}/{number}": found for number, found in judged.metrics.items()})
    return checked_score(name, value, answer)


def _place(answer: Answer) -> str:
    return f"the response {_shorten(answer.response)}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def overlong_penalty(num_tokens: int, *, longest: int, buffer: int) -> float:
    """Return a reward term between -1 and 0 for answers close to the length limit (DAPO, arXiv:2503.14476).

        0                                   for |y| <= L - B
        ((L - B) - |y|) / B                 for L - B < |y| <= L
        -1                                  for L < |y|

    |y| is `num_tokens`, L is `longest` and B is `buffer`, with 0 < B <= L.
    """
    assert 0 < buffer <= longest, (buffer, longest)
    return -min(1.0, max(0.0, (num_tokens - (longest - buffer)) / buffer))


def score(trajectory: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    """Return the trajectory with token rewards on every turn.

    Token rewards from the environment are kept. The weighted sum of the terms is added to the last token's reward.

    Args:
        weights: Weights of reward terms. A term without a weight has weight 1.

    Raises:
        ConfigError: If a weight is given for a term that the attempt does not have.
        AttemptFailedError: If a reward is not finite, or if the attempt has no response token.
    """
    terms = trajectory.rewards
    unknown = sorted(weights.keys() - terms.keys())
    if unknown:
        raise ConfigError([Problem(f"source.reward_weights.{name}", unknown_term(name, terms)) for name in unknown])
    where = f"Sample {trajectory.sample} of prompt {trajectory.uid}"
    for name, value in terms.items():
        if not math.isfinite(value):
            raise AttemptFailedError(f"{where}: reward '{name}' is {value}; it must be finite.")
    total = math.fsum(weights.get(name, 1.0) * value for name, value in terms.items())
    turns: list[Turn] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.rewards is None:
            rewards = np.zeros(len(turn.response_ids), np.float32)
        elif not np.isfinite(turn.rewards).all():
            raise AttemptFailedError(f"{where}, turn {number}: the rewards {turn.rewards.tolist()} are not all finite.")
        else:
            rewards = turn.rewards.copy()
        turns.append(with_fields(turn, rewards=rewards))
    last = next((turn for turn in reversed(turns) if len(turn.response_ids)), None)
    if last is None:
        raise AttemptFailedError(
            f"{where} has no response token, so its reward of {total:g} cannot be trained on. Engine and environment "
            "must return at least one token; an end token is enough."
        )
    assert last.rewards is not None
    last.rewards[-1] += total
    return with_fields(trajectory, turns=tuple(turns))
