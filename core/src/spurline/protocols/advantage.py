"""Kind `advantage`: rewards of a group become per-token advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spurline.rl.trajectory import Group


class Advantage(Protocol):
    """Set `advantages` on every turn of scored groups.

    Factory: `Class(config)`. Pure; numpy only.
    """

    def advantages(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The same groups, in the same order, with `advantages` float32 per response token."""
        ...
