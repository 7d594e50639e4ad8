"""Put the reward of an attempt on its tokens: named terms times weights, on the last token the model wrote.

Place on the way: trajectory with named terms -> this -> trajectory whose turns all have `rewards` [A] -> advantages.
Rewards per turn that the environment set stay and are added to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from spurline.errors import ConfigError, Problem, listing, suggestion
from spurline.protocols.environment import AttemptFailedError
from spurline.rl.trajectory import Trajectory, Turn


def score(trajectory: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    """The trajectory with rewards on every turn: those it has, plus the sum of weight x term on the last token.

    weights: of reward terms; 1 where none is given. The last token is that of the last turn that has any.
    Raises ConfigError for the weight of a term that the environment does not give, AttemptFailedError for a reward that
    is not finite and for an attempt without a single response token, whose reward would be lost.
    """
    where = f"Sample {trajectory.sample} of prompt {trajectory.uid}"
    _check_names(trajectory.rewards, weights)
    for name, value in trajectory.rewards.items():
        if not math.isfinite(value):
            raise AttemptFailedError(f"{where}: reward '{name}' is {value}; it must be finite.")
    total = math.fsum(weights.get(name, 1.0) * value for name, value in trajectory.rewards.items())
    turns = [_with_rewards(turn, f"{where}, turn {number}") for number, turn in enumerate(trajectory.turns)]
    last = max((number for number, turn in enumerate(turns) if len(turn.response_ids)), default=None)
    if last is None:
        raise AttemptFailedError(
            f"{where} has no response token, so there is nothing to train and no place for its reward of {total:g}. "
            "The engine, or the environment, must give at least one token; an end token alone will do."
        )
    rewards = turns[last].rewards
    assert rewards is not None
    rewards[-1] += total
    return replace(trajectory, turns=tuple(turns))


def _check_names(terms: Mapping[str, float], weights: Mapping[str, float]) -> None:
    unknown = sorted(set(weights) - set(terms))
    if unknown:
        raise ConfigError(
            [
                Problem(
                    f"source.reward_weights.{name}",
                    f"names no reward term of the environment, which must give the same terms in every attempt."
                    f"{suggestion(name, terms)} Terms: {listing(terms)}.",
                )
                for name in unknown
            ]
        )


def _with_rewards(turn: Turn, where: str) -> Turn:
    """The turn with an array of rewards of its own."""
    if turn.rewards is None:
        return replace(turn, rewards=np.zeros(len(turn.response_ids), dtype=np.float32))
    if not np.isfinite(turn.rewards).all():
        raise AttemptFailedError(f"{where}: the rewards {turn.rewards.tolist()} are not all finite.")
    return replace(turn, rewards=turn.rewards.copy())
