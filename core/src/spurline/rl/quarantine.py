"""Prompts that were given up, and the budget of how many a run may lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from spurline.errors import RunFailedError

_SHOWN = 5


@dataclass(frozen=True)
class QuarantinedGroup:
    """A prompt whose attempts could not be completed. draw, uid: as of Group. reason: where and why, for messages."""

    uid: str
    draw: int
    reason: str


class Quarantine:
    """Counts quarantined groups; with its state in the checkpoint, over the whole run.

    max_groups: how many the run may lose.
    """

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: list[QuarantinedGroup] = []

    @property
    def groups(self) -> tuple[QuarantinedGroup, ...]:
        """All of them, in the order in which they were given up."""
        return tuple(self._groups)

    def add(self, group: QuarantinedGroup) -> None:
        """Count one more. Raises RunFailedError with the first reasons when that is one too many."""
        self._groups.append(group)
        if len(self._groups) <= self._max_groups:
            return
        reasons = "".join(f"\n- {group.reason}" for group in self._groups[:_SHOWN])
        more = f"\n- and {len(self._groups) - _SHOWN} more" if len(self._groups) > _SHOWN else ""
        raise RunFailedError(
            f"{len(self._groups)} prompts had to be given up, over source.faults.max_quarantined: {self._max_groups}. "
            f"Correct what fails, or raise the limit.{reasons}{more}"
        )

    def state_dict(self) -> dict[str, object]:
        return {"groups": [asdict(group) for group in self._groups]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        groups = cast("list[dict[str, Any]]", state["groups"])
        self._groups = [QuarantinedGroup(**group) for group in groups]
