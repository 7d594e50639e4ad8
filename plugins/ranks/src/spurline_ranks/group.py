"""Plain data about processes that compute together, called ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


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
