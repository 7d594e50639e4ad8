"""Processes that compute together, called ranks, as the process that directs them sees them.

A `RankGroup` calls one method on all ranks at once. Nothing here knows how processes are started, or what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RuntimeEnv:
    """The environment that processes of a Ray cluster get from this one, besides what is on their machines.

    env_vars: variables of their environment. working_dir: a folder of this machine that they see, in `sys.path` too, or
    the URI of one, as Ray takes it; None for none. Nothing in it is installed.
    """

    env_vars: Mapping[str, str] = field(default_factory=dict[str, str])
    working_dir: str | None = None


@dataclass(frozen=True)
class ClusterRequest:
    """The Ray cluster of a run.

    address: `auto`, or host and port of its head. runtime_env: of all processes that the run places there.
    room_timeout_s: seconds to wait for room. log_dir: a folder that all machines see, where each process writes its
    log; None leaves that to Ray.
    """

    address: str = "auto"
    runtime_env: RuntimeEnv = RuntimeEnv()
    room_timeout_s: float = 180.0
    log_dir: str | None = None


ANY_CLUSTER = ClusterRequest()
"""The cluster that Ray finds, with default settings."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds. start_s: until all ranks are ready. call_s: one call. collective_s: one collective between ranks."""

    start_s: float = 600.0
    call_s: float = 3600.0
    collective_s: float = 600.0


@dataclass(frozen=True)
class Place:
    """A rank's place among the others.

    rank, world: its number and how many there are. local_rank: its number on its machine. node: the machine's name.
    doing: tells what it does, in words such as `micro-batch 5 of 8, forward`, for a message about a long wait.
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
    ended by force, also by `RankGroup.close`: what needs an orderly end is a method that is called before.
    """


class RankGroup(Protocol):
    """Ranks that have been started and are ready."""

    size: int

    def call(self, method: str, *common: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of the worker on all ranks, and wait for all answers.

        May be called on any thread; calls take turns. After an error no rank is left.

        Args:
            method: Its name.
            common: Arguments that all get.
            per_rank: One more argument, the first, for each rank.

        Returns:
            The answers by rank.

        Raises:
            SpurlineError: What a rank raises, with a note that names rank, node, process and call.
            RankFailedError: For every other end of a rank, and one that does not answer within the limit.
        """
        ...

    def close(self) -> None:
        """End all ranks; returns when none is left. May be called again."""
        ...
