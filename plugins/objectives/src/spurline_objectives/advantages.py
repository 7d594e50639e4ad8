"""Advantages from the parts of a return: its reward terms (`gdpo`), or the turns that earned it (`turn_grpo`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError, listing, suggestion
from spurline_objectives.configs import TURNS, GdpoConfig, TurnGrpoConfig
from spurline_rl.advantages.shared import Returns, center, discounted_sums, refuse_single_samples
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.trajectory import Group, are_equal

Column = NDArray[np.float32]

_ROUNDING = 1e-5
"""Rewards of tokens are float32. What they leave beside the terms may be this part of the largest return."""


class Gdpo:
    """Normalise each reward term by itself (GDPO, Liu et al. 2026, arXiv:2601.05242).

        S_i = sum over terms k of w_k * (r_ik - mean(r_k)) / (std(r_k) + eps)
        A_i = S_i / (std(S) + eps)

    mean(r_k) and std(r_k) are over the samples of a prompt, and std divides by n - 1. std(S) is over all samples passed
    in, and divides by their count; their mean is 0. A term whose values are all equal adds exactly 0. GRPO normalises
    the sum of the terms, so that samples with other terms and an equal sum have one advantage.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, config: GdpoConfig) -> None:
        self._config = config

    def advantages(self, scored: ScoredGroups) -> Mapping[str, Column]:
        config = self._config
        refuse_single_samples(scored, config.name)
        sums = [self._sum(group, returns) for group, returns in zip(scored.groups, scored.returns, strict=True)]
        spread = np.concatenate(sums).std() + config.eps if config.normalize_batch and sums else 1.0
        return scored.spread([values / spread for values in sums])

    def _sum(self, group: Group, returns: Returns) -> Returns:
        names = dict.fromkeys(name for attempt in group.trajectories for name in attempt.rewards)
        # In a run with several environments, it may be a term of another one.
        unknown = () if group.environment else self._config.weights.keys() - {*names, TURNS}
        for name in sorted(unknown):
            raise DataError(
                f"advantage.weights.{name}: prompt '{group.uid}' has no such reward term.{suggestion(name, names)} "
                f"Terms: {listing(names)}."
            )
        terms = {name: np.array([each.rewards.get(name, 0.0) for each in group.trajectories]) for name in names}
        rest = returns - sum(terms.values(), np.zeros(len(returns)))
        if np.abs(rest).max(initial=0.0) > _ROUNDING * np.abs(returns).max(initial=1.0):
            terms[TURNS] = rest
        weighted = (self._config.weights.get(name, 1.0) * self._normalized(values) for name, values in terms.items())
        return sum(weighted, np.zeros(len(returns)))

    def _normalized(self, values: Returns) -> Returns:
        if are_equal(values):
            return np.zeros_like(values)
        return center(values) / (values.std(ddof=1) + self._config.eps)

    def describe(self) -> str:
        batch = ", and divided by the spread of all samples" if self._config.normalize_batch else ""
        return f"GDPO: the sum of all reward terms, each normalised over its prompt's samples{batch}."


class TurnGrpo:
    """Compare turns with the same number (Zeng et al. 2025, arXiv:2505.11821, generalised to any number of turns).

        G_ik = r_ik + gamma * G_i(k+1)
        A_ik = (G_ik - mean(G_k)) / (std(G_k) + eps)

    r_ik is the reward of turn k of sample i; the reward terms of an attempt belong to its last turn. mean and std are
    over the samples of a prompt that have a turn k, and std divides by their number minus 1. If their G_k are all
    equal, or if only one sample has a turn k, the advantages of turn k are exactly 0. All tokens of a turn have its
    advantage. With one turn this is GRPO.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, config: TurnGrpoConfig) -> None:
        self._config = config

    def advantages(self, scored: ScoredGroups) -> Mapping[str, Column]:
        refuse_single_samples(scored, self._config.name)
        sums = np.append(0.0, np.cumsum(scored.column("rewards"), dtype=np.float64))
        start = 0
        found = [np.zeros(0, np.float32)]
        for group in scored.groups:
            flat = group.flat
            ends = start + np.append(0, np.cumsum(flat.num_response))
            later = discounted_sums(np.diff(sums[ends]), flat.attempt_turns, self._config.gamma)
            values = np.zeros_like(later)
            for number in range(int(flat.attempt_turns.max(initial=0))):
                at = flat.numbers == number
                values[at] = self._compared(later[at])
            found.append(np.repeat(values, flat.num_response).astype(np.float32))
            start = int(ends[-1])
        return {"advantages": np.concatenate(found)}

    def _compared(self, returns: Returns) -> Returns:
        if are_equal(returns):
            return np.zeros_like(returns)
        return center(returns) / (returns.std(ddof=1) + self._config.eps if self._config.normalize_std else 1.0)

    def describe(self) -> str:
        spread = ", divided by their standard deviation" if self._config.normalize_std else ""
        return (
            f"Turn-level GRPO: what a turn and later ones earn, discounted by {self._config.gamma:g} per turn, minus "
            f"the mean of the same turn in the prompt's samples{spread}."
        )
