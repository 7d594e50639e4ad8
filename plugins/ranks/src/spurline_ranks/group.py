"""Processes that compute together, called ranks, as the process that directs them sees them.

A `RankGroup` calls one method on all ranks at once. Nothing here knows how processes are started, or what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ClusterRequest:
    """The Ray cluster of a run.

    Attributes:
        address: `auto`, or host and port of its head.
        env_vars: Environment variables of all processes that the run places there.
        room_timeout_s: Seconds to wait for room.
        log_dir: A folder that all machines see, for the log of each process; None leaves logs to Ray.
    """

    address: str = "auto"
    env_vars: Mapping[str, str] = field(default_factory=dict[str, str])
    room_timeout_s: float = 180.0
    log_dir: str | None = None


@dataclass(frozen=True)
class TimeLimits:
    """Seconds until all ranks are ready, of one call, and of one exchange between ranks."""

    start_s: float = 600.0
    call_s: float = 3600.0
    collective_s: float = 600.0


@dataclass(frozen=True)
class Place:
    """A rank's place among the others.

    Attributes:
        rank: Its number.
        world: The number of ranks.
        local_rank: Its number on its machine.
        node: The machine's name.
        doing: Takes words for a message about a long wait, such as `micro-batch 5 of 8, forward`.
    """

    rank: int
    world: int
    local_rank: int
    node: str
    doing: Callable[[str], None]


class Worker(Protocol):
    """The object in every rank whose public methods a `RankGroup` calls.

    Factory: `Class(place, *arguments)`, with torch's default process group ready, and the device chosen. Arguments and
    answers are plain data and numpy arrays. Methods are called one at a time, in the same order on all ranks. Ranks are
    ended by force, by `RankGroup.close` too: an orderly end needs a method that is called before.
    """


class RankGroup(Protocol):
    """Ranks that have been started and are ready."""

    size: int

    def call(self, method: str, *common: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of the worker on all ranks, and wait for all answers.

        May be called on any thread; calls take turns. After an error no rank is left.

        Args:
            method: Its name.
            common: Arguments for all ranks.
            per_rank: The first argument of each rank, before the common ones.

        Returns:
            The answers by rank.

        Raises:
            SpurlineError: From a rank, with a note that names rank, node, process and call.
            RankFailedError: If a rank fails otherwise, dies, or does not answer within the limit.
        """
        ...

    def close(self) -> None:
        """End all ranks; returns when none is left. May be called again."""
        ...
