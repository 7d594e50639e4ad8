"""Define an optional ability of collators of rollouts: to read flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from spurline.data.batch import TrainingBatch
from spurline.protocols.collator import RolloutCollator
from spurline_rl.trajectory import FlatTurns


@runtime_checkable
class CollatesFlat(RolloutCollator, Protocol):
    """A rollout collator that reads flat arrays, which sources of rollouts have made when a batch is due.

    If a subclass overrides only `collate_rollouts`, sources call that method.
    """

    def collate_flat(self, blocks: Sequence[FlatTurns]) -> TrainingBatch:
        """The batch that `collate_rollouts` makes of the same turns, which lie in these blocks one after another.

        The batch keeps nothing of the blocks but names and numbers of the turns, so that their memory can be freed.
        """
        ...
