"""Helpers of advantage algorithms: compare the samples of a prompt, and compute along the tokens of an attempt.

An algorithm that compares samples computes one number per attempt, and gives this number to all its tokens:

    class Centred:
        needs: frozenset[str] = frozenset()

        def advantages(self, scored):
            return scored.spread(relative_to_group(scored, "centred", center))
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.trajectory import are_equal

Returns = NDArray[np.float64]


def center(returns: Returns) -> Returns:
    """Subtract the mean of a group's returns from each return."""
    return returns - returns.mean()


def relative_to_group(scored: ScoredGroups, name: str, rule: Callable[[Returns], Returns]) -> list[Returns]:
    """Apply a rule to the returns of each group, float64 [n]. The result is exactly 0 if all of them are equal.

    Args:
        scored: The groups.
        name: The name of the algorithm for messages.
        rule: A function that takes the returns of a group, and returns the advantages.

    Raises:
        DataError: If a group has only one sample.
    """
    refuse_single_samples(scored, name)
    return [np.zeros_like(returns) if are_equal(returns) else rule(returns) for returns in scored.returns]


def refuse_single_samples(scored: ScoredGroups, name: str) -> None:
    """Raise DataError if a group has only one sample, which the algorithm `name` cannot compare."""
    for group, returns in zip(scored.groups, scored.returns, strict=True):
        if len(returns) < 2:
            raise DataError(
                f"The group of prompt '{group.uid}' has {len(returns)} sample(s), but {name} compares the samples of a "
                "prompt with each other. Set source.samples_per_prompt to 2 or more (8 is usual), or choose an "
                "advantage that needs no group: reinforce_pp with baseline: batch, or gae."
            )


def discounted_sums(values: NDArray[np.float64], lengths: NDArray[np.int64], factor: float) -> NDArray[np.float64]:
    """Return y[t] = x[t] + factor * y[t + 1] along each sequence x. After the end of x, y is 0.

    Args:
        values: The sequences, one after another: float64 [A].
        lengths: The length of each sequence: int64 [m].
        factor: The discount from one token to the next.
    """
    # One column per sequence, so that each step of the loop computes a token of all sequences.
    sums = np.zeros((int(lengths.max(initial=0)), len(lengths)))
    places = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    columns = np.repeat(np.arange(len(lengths)), lengths)
    sums[places, columns] = values
    for place in range(len(sums) - 2, -1, -1):
        sums[place] += factor * sums[place + 1]
    return sums[places, columns]


def normalized(values: NDArray[np.float64], mask: NDArray[np.uint8], eps: float) -> NDArray[np.float64]:
    """Subtract the mean and divide by (standard deviation + eps), both over all tokens whose mask is not 0."""
    counted = values[mask != 0]
    return (values - counted.mean()) / (counted.std() + eps) if len(counted) else values
