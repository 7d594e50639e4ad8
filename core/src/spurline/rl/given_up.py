"""Prompts that yield no group: rows that cannot be used, and prompts given up after their attempts failed.

The first are the data's fault and `on_bad_row` says what becomes of them; the second cost a budget of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from spurline.errors import RunFailedError

_SHOWN = 5


@dataclass(frozen=True)
class SkippedRow:
    """A row left out by `on_bad_row: skip`. draw, uid: as of Group. reason: where and why, for messages."""

    uid: str
    draw: int
    reason: str


@dataclass(frozen=True)
class QuarantinedGroup:
    """A prompt whose attempts could not be completed. draw, uid: as of Group. reason: where and why, for messages."""

    uid: str
    draw: int
    reason: str


def row_of(uid: str) -> str:
    """`LABEL:ROW` of the uid `LABEL:ROW@DRAW`: the same whenever the row is drawn."""
    return uid.rpartition("@")[0]


class Quarantine:
    """Counts the prompts that were given up; with its state in the checkpoint, over the whole run.

    max_groups: how many the run may lose. A row that fails again in a later epoch is the same loss, counted once.
    """

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: dict[str, QuarantinedGroup] = {}

    @property
    def groups(self) -> tuple[QuarantinedGroup, ...]:
        """The first of each row, in the order in which they were given up."""
        return tuple(self._groups.values())

    def add(self, group: QuarantinedGroup) -> None:
        """Count one more. Raises RunFailedError with the first reasons when that is one too many."""
        self._groups.setdefault(row_of(group.uid), group)
        if len(self._groups) <= self._max_groups:
            return
        reasons = "".join(f"\n- {group.reason}" for group in self.groups[:_SHOWN])
        more = f"\n- and {len(self._groups) - _SHOWN} more" if len(self._groups) > _SHOWN else ""
        raise RunFailedError(
            f"{len(self._groups)} prompts had to be given up, over source.faults.max_quarantined: {self._max_groups}. "
            f"Correct what fails, or raise the limit.{reasons}{more}"
        )

    def state_dict(self) -> dict[str, object]:
        return {"groups": [asdict(group) for group in self._groups.values()]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._groups = {}
        for saved in cast("list[dict[str, Any]]", state["groups"]):
            group = QuarantinedGroup(**saved)
            self._groups.setdefault(row_of(group.uid), group)
