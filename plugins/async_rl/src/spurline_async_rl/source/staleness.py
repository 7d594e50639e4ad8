"""How old the tokens of a batch are, and what to do with those over the bound.

A token's staleness is the number of updates between the weights it came from and those it is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spurline.errors import PluginError
from spurline.rl.trajectory import Group, Turn, turns_of, with_turns


def mask_over_age(groups: Sequence[Group], updates: int, max_staleness: int) -> tuple[Sequence[Group], int]:
    """The groups with no loss on tokens older than the bound, and how many trained tokens lost it.

    updates: in the weights that will be trained on these groups.
    """
    turns = turns_of(groups)
    masked = 0
    kept: list[Turn] = []
    for turn in turns:
        over_age = (turn.loss_mask != 0) & (_ages(turn, updates) > max_staleness)
        masked += int(over_age.sum())
        kept.append(replace(turn, loss_mask=np.where(over_age, 0, turn.loss_mask)) if over_age.any() else turn)
    return (with_turns(groups, kept) if masked else groups), masked


def staleness_metrics(groups: Sequence[Group], updates: int, max_staleness: int, masked: int) -> dict[str, float]:
    """`staleness/mean`, `/max` and `/tokens_D` (trained tokens D updates old), `/masked_tokens`.

    Raises AssertionError when a trained token is over the bound: the scheduler must never let that happen.
    """
    ages = [_ages(turn, updates)[turn.loss_mask != 0] for turn in turns_of(groups)]
    found = np.concatenate([np.empty(0, np.int64), *ages])
    counts = np.bincount(found, minlength=max_staleness + 1)
    assert len(counts) == max_staleness + 1, f"tokens by age: {counts.tolist()}, bound {max_staleness}"
    return {
        "staleness/mean": float(found.mean()) if len(found) else 0.0,
        "staleness/max": float(found.max()) if len(found) else 0.0,
        "staleness/masked_tokens": float(masked),
        **{f"staleness/tokens_{age}": float(count) for age, count in enumerate(counts)},
    }


def version_range(group: Group) -> tuple[int, int]:
    """The oldest and the newest version of weights that a token of this group came from."""
    versions = np.concatenate([_versions(turn) for turn in turns_of([group])])
    return int(versions.min()), int(versions.max())


def _ages(turn: Turn, updates: int) -> NDArray[np.int64]:
    return updates - _versions(turn).astype(np.int64)


def _versions(turn: Turn) -> NDArray[np.int32]:
    if turn.versions is None:
        raise PluginError(
            "A turn came back without versions of its tokens, so their age cannot be bounded. The environment must "
            "return the turns of its policy handle (`policy.finish(...)`)."
        )
    return turn.versions
