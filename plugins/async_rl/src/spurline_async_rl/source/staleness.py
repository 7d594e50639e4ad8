"""Measure the age of the tokens in a batch, and mask tokens that are too old.

The age or staleness of a token is the number of updates since the weights that generated it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from spurline.errors import PluginError
from spurline_rl.trajectory import FlatTurns, Group, turns_of, with_turns


def mask_over_age(groups: Sequence[Group], updates: int, max_staleness: int) -> tuple[Sequence[Group], int]:
    """Set the loss mask to 0 for tokens that are older than the bound.

    Args:
        groups: The groups of a batch.
        updates: The version of the weights that are trained.
        max_staleness: The bound.

    Returns:
        The groups, and the number of masked tokens that had a loss before.
    """
    oldest = updates - max_staleness
    kept, num_masked = list(groups), 0
    for number, group in enumerate(groups):
        versions, counts = _checked(group).trained_versions
        too_old = int(counts[versions < oldest].sum())
        if too_old:
            turns = [
                replace(turn, loss_mask=np.where(np.asarray(turn.versions) < oldest, 0, turn.loss_mask))
                for turn in turns_of([group])
            ]
            kept[number], num_masked = with_turns([group], turns)[0], num_masked + too_old
    return kept, num_masked


def staleness_metrics(groups: Sequence[Group], updates: int, max_staleness: int, masked: int) -> dict[str, float]:
    """Return the metrics of the ages of tokens, and assert that no trained token is too old.

    `staleness/tokens_D` is the number of trained tokens that are D updates old. `updates` is the version of the weights
    that are trained, and `masked` the number of tokens that `mask_over_age` has masked.
    """
    found = [_checked(group).trained_versions for group in groups]
    ages = updates - np.concatenate([np.empty(0, np.int64), *(versions for versions, _ in found)])
    of_each = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in found)])
    counts = np.bincount(ages, of_each, max_staleness + 1).astype(np.int64)
    total = int(counts.sum())
    assert len(counts) == max_staleness + 1, f"tokens by age: {counts.tolist()}, bound {max_staleness}"
    return {
        "staleness/mean": float(counts @ np.arange(len(counts)) / total) if total else 0.0,
        "staleness/max": float(np.flatnonzero(counts).max(initial=0)),
        "staleness/masked_tokens": float(masked),
        **{f"staleness/tokens_{age}": float(count) for age, count in enumerate(counts)},
    }


def fresh_mismatch(groups: Sequence[Group], trainer: Sequence[NDArray[np.float32]], updates: int) -> dict[str, float]:
    """Return `mismatch/fresh`, the mean difference between the logprobs of trainer and engine on tokens of age 0.

    Trainer and engine have the same weights for these tokens, so the difference shows how precisely they compute, and
    not how far the policy has moved. If no trained token has age 0, there is no metric.

    Args:
        groups: The groups of a batch.
        trainer: The trainer's logprobs of the response tokens of each turn.
        updates: The version of the weights that are trained.
    """
    turns, total, count = iter(trainer), 0.0, 0
    for group in groups:
        flat = _checked(group)
        of_trainer = np.concatenate([*islice(turns, len(flat))])
        is_fresh = (flat.columns["versions"] == updates) & (flat.columns["loss_mask"] != 0)
        if "logprobs" in flat.columns and is_fresh.any():
            distances = np.abs(of_trainer[is_fresh] - flat.columns["logprobs"][is_fresh])
            total, count = total + float(distances.sum(dtype=np.float64)), count + len(distances)
    return {"mismatch/fresh": total / count} if count else {}


def version_range(group: Group) -> tuple[int, int]:
    """Return the oldest and the newest version of the tokens in this group."""
    versions = _checked(group).columns["versions"]
    return int(versions.min()), int(versions.max())


def _checked(group: Group) -> FlatTurns:
    """Return the group's turns, which must all have versions."""
    if "versions" not in group.flat.columns:
        raise PluginError(
            "A turn has no versions of its tokens, so their age is unknown. The environment must return the turns of "
            "its policy handle (`policy.finish(...)`)."
        )
    return group.flat
