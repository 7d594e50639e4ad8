"""Measure the age of the tokens in a batch, and mask tokens that are too old.

The age or staleness of a token is the number of updates since the weights that generated it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
