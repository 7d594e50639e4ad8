"""Compute the metrics of a step's rewards and responses, and of its trained tokens.

A metric is the mean over the step unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline_rl.losses.corrections import BLOCK_TOKENS
from spurline_rl.trajectory import Group, has_equal_returns, terms_of, trajectories_of, turns_of


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean and the spread of returns, `mean_terms`, and the share of groups with equal returns."""
    returns = all_returns(groups)
    return {
        "reward/mean": float(returns.mean()),
        "reward/std": float(returns.std()),
        **mean_terms(groups),
        "groups/zero_variance": float(np.mean([has_equal_returns(group) for group in groups])),
    }


def all_returns(groups: Sequence[Group]) -> NDArray[np.float64]:
    """Return the return of every attempt, float64, group after group."""
    return np.concatenate([group.returns for group in groups])


def mean_terms(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each reward term before weights, over the attempts that have it: `rewards/TERM`."""
    terms = terms_of(trajectories_of(groups))
    return {f"rewards/{name}": float(np.mean(values)) for name, values in terms.items()}


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of each number in `info["metrics"]` over the attempts that have it."""
    found: dict[str, list[float]] = {}
    for trajectory in trajectories_of(groups):
        for name, value in trajectory.info.get("metrics", {}).items():
            found.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def metrics_by_environment(
    groups: Sequence[Group], trained: Sequence[Group], given_up: Sequence[str]
) -> dict[str, float]:
    """Return `env/NAME/...` for each environment of a run with several: counts of draws, mean reward and lengths.

    Args:
        groups: All scored groups of a step.
        trained: Those that are trained on.
        given_up: The environments of the prompts that were given up.
    """
    metrics: dict[str, float] = {}
    for label in sorted({*given_up, *(group.environment for group in groups)} - {""}):
        every = [group for group in groups if group.environment == label]
        lost, kept = given_up.count(label), sum(group.environment == label for group in trained)
        found = {"drawn": len(every) + lost, "filtered": len(every) - kept, "quarantined": lost}
        if every:
            rewards, lengths = reward_metrics(every), length_metrics(every)
            found |= {"reward": rewards["reward/mean"], "zero_variance": rewards["groups/zero_variance"]}
            found |= {name: lengths[f"response/{name}"] for name in ("length", "turns")}
        metrics |= {f"env/{label}/{name}": float(value) for name, value in found.items()}
    return metrics


def length_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return response tokens and turns per attempt, and the share and mean length of turns by finish reason."""
    flat = [group.flat for group in groups]
    num_response = np.concatenate([turns.num_response for turns in flat])
    attempt_turns = np.concatenate([turns.attempt_turns for turns in flat])
    lengths = np.add.reduceat(num_response, np.cumsum(attempt_turns) - attempt_turns)
    reasons = np.array([reason for turns in flat for reason in turns.finish_reasons])
    by_reason = {str(reason): num_response[reasons == reason] for reason in np.unique(reasons)}
    return {
        "response/length": float(lengths.mean()),
        "response/length/max": float(lengths.max()),
        "response/turns": len(num_response) / len(lengths),
        **{f"response/length_{reason}": float(counts.mean()) for reason, counts in by_reason.items()},
        **{f"response/share_{reason}": len(counts) / len(num_response) for reason, counts in by_reason.items()},
    }


def support_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of tokens without loss because more tokens tied than `support` has room for."""
    firsts = [turn.support[:, 0] for turn in turns_of(groups) if turn.support is not None and len(turn.support)]
    return {"rollout/unknown_support": float(np.mean(np.concatenate(firsts) < 0))} if firsts else {}


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return `advantage/mean`, `advantage/std` and the extremes over trained tokens."""
    trained = batch.tokens["loss_weights"].numpy() != 0
    values: NDArray[np.float32] = batch.tokens["advantages"].numpy()[trained]
    if not len(values):
        return {}
    mean = values.mean(dtype=np.float64)
    # Blocks fit into a processor's cache, and no copy of all values in float64 is made.
    blocks = (values[start : start + BLOCK_TOKENS] - mean for start in range(0, len(values), BLOCK_TOKENS))
    variance = sum(float(block @ block) for block in blocks) / len(values)
    found = {"mean": mean, "std": np.sqrt(variance), "max": values.max(), "min": values.min()}
    return {f"advantage/{name}": float(value) for name, value in found.items()}
