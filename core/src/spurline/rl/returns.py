"""The return of a trajectory: what its rewards sum up to, and whether a group's returns say anything.

Place on the way: scored trajectories -> returns -> advantages, and the filter that leaves out groups nothing can be
learned from. Both ask here, so that a group is filtered exactly when its group-relative advantages are zero.

Charge the distance from the reference model to the reward of each token.

    r'_t = r_t - beta * kl_t,  with d_t = log p_ref(t) - log p(t):
    k1: -d_t    k2: d_t^2 / 2    k3: exp(d_t) - 1 - d_t

Place on the way: scored turns and their logprobs under policy and reference -> rewards -> advantages. This is the
KL-in-reward of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155), whose estimator is k1: unbiased, and harmless here,
where it is not differentiated. Names of the estimators: Schulman 2020, "Approximating KL Divergence".
The KL term of a loss is `spurline.losses.policy_loss`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline.rl.trajectory import Group, Trajectory

_RELATIVE_TOLERANCE = 1e-6


def trajectory_return(trajectory: Trajectory) -> float:
    """Sum of the token rewards of all turns, undiscounted, in float64."""
    total = 0.0
    for number, turn in enumerate(trajectory.turns):
        assert turn.rewards is not None, f"turn {number} of {_place(trajectory)} was not scored"
        total += float(turn.rewards.sum(dtype=np.float64))
    if not np.isfinite(total):
        raise DataError(
            f"The rewards of {_place(trajectory)} sum up to {total}. Make the reward function return finite numbers, "
            "or raise an exception for what it cannot judge."
        )
    return total


def group_returns(group: Group) -> NDArray[np.float64]:
    """One return per trajectory, float64 [n]."""
    return np.array([trajectory_return(trajectory) for trajectory in group.trajectories], dtype=np.float64)


def are_equal(returns: NDArray[np.float64]) -> bool:
    """Whether all returns are the same, up to the rounding of float32 rewards."""
    if len(returns) == 0:
        return True
    # Rewards that differ only in the order of their terms differ in the last bits; dividing those bits by their own
    # standard deviation would make advantages out of nothing.
    return bool(np.ptp(returns) <= _RELATIVE_TOLERANCE * np.abs(returns).max())


def has_zero_variance(group: Group) -> bool:
    """Whether comparing the group's samples teaches nothing, because all did equally well."""
    return are_equal(group_returns(group))


def _place(trajectory: Trajectory) -> str:
    return f"sample {trajectory.sample} of prompt '{trajectory.uid}'"


_LARGEST_EXPONENT = 20.0


def token_kl(
    logprobs: NDArray[np.float32],
    reference_logprobs: NDArray[np.float32],
    estimator: Literal["k1", "k2", "k3"],
) -> NDArray[np.float64]:
    """KL of each response token of a turn from the reference model, in nats; all arrays [A]."""
    distance = reference_logprobs.astype(np.float64) - logprobs
    if estimator == "k1":
        return -distance
    if estimator == "k2":
        return distance**2 / 2
    return np.exp(np.clip(distance, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)) - 1 - distance


def subtract_kl(rewards: NDArray[np.float32], kl: NDArray[np.float64], *, coefficient: float) -> NDArray[np.float32]:
    """Rewards of a turn's response tokens less their KL; all arrays [A]."""
    return (rewards - coefficient * kl).astype(np.float32)
