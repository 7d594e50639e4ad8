"""Processes that compute together, called ranks, as the process that directs them sees them.

A `RankGroup` calls one method on all ranks at once. What is asked for (`RankRequest`) is plain data, so that a config
can say it before anything is started. Nothing here knows how processes are started, or what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Launch = Literal["local", "ray"]
"""Processes of this machine, or actors of a Ray cluster."""


@dataclass(frozen=True)
class RuntimeEnv:
    """What the processes of a Ray cluster get from this one, besides what is on their machines.

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
"""The one there is, with nothing said of it."""


@dataclass(frozen=True)
class ClusterNeed:
    """The room that processes of one kind need on a Ray cluster.

    kind: of the processes, in the plural, such as `ranks`. count: how many. gpus, cpus: of each. gpus_if_any: whether
    each does without a GPU on a cluster that has none. together: they fill whole machines, equally many on each,
    `per_machine` or as many as have room; otherwise each goes on any one machine. modules: what they
    compute with, such as `vllm`, whose versions have to be the same on all machines.
    """

    kind: str
    count: int
    gpus: int
    cpus: int
    gpus_if_any: bool = False
    together: bool = False
    per_machine: int | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankRequest:
    """The ranks that a backend asks for.

    count: processes. device: what each computes on; with `cuda` each has one GPU of its own.
    per_node: ranks of one machine of a cluster; None fills each machine.
    gpus: which GPUs of this machine they may have, in order; None for all.
    num_threads: CPU threads of each; None divides the cores of a machine among its ranks.
    variables: of the environment of each rank, before it touches its device.
    peers_elsewhere: whether they exchange tensors with other machines too, where launch is local: with engines there.
    """

    count: int
    device: Literal["cpu", "cuda"] = "cpu"
    launch: Launch = "local"
    per_node: int | None = None
    gpus: tuple[int, ...] | None = None
    num_threads: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    peers_elsewhere: bool = False

    def cluster_need(self) -> ClusterNeed | None:
        """With `ray`: the room for them."""
        if self.launch != "ray":
            return None
        gpus, cpus = int(self.device == "cuda"), self.num_threads or 1
        return ClusterNeed("ranks", self.count, gpus, cpus, together=True, per_machine=self.per_node)


@dataclass(frozen=True)
class TimeLimits:
    """Seconds. start_s: until all ranks are ready. call_s: one call. collective_s: one collective between ranks."""

    start_s: float = 600.0
    call_s: float = 3600.0
    collective_s: float = 600.0


@dataclass(frozen=True)
class Place:
    """What a rank knows of itself.

    rank, world: its number and how many there are. local_rank: its number on its machine. node: the machine's name.
    doing: tells what it does, in words such as `micro-batch 5 of 8, forward`, for whoever waits for it; costs nothing.
    """

    rank: int
    world: int
    local_rank: int
    node: str
    doing: Callable[[str], None]


class Worker(Protocol):
    """What runs in every rank: an object whose public methods a `RankGroup` calls.

    Factory: `Class(place, *arguments)`, with torch's default process group ready, and the device chosen. Arguments and
    answers are plain data and numpy arrays. Methods are called one at a time, in the same order on all ranks. Ranks are
    ended by force, also by `RankGroup.close`: what needs an orderly end is a method that is called before.
    """


class RankGroup(Protocol):
    """Ranks that have been started and are ready."""

    size: int

    def call(self, method: str, *common: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of the worker on all ranks; returns their answers by rank, when all have answered.

        common: arguments that all get. per_rank: one more argument, the first, for each rank.
        May be called on any thread; calls take turns. A SpurlineError that a rank raises is raised here as what it is,
        with a note that names rank, node, process and call. Raises RankFailedError for every other end of a rank, and
        for one that does not answer within the limit. After an error no rank is left.
        """
        ...

    def close(self) -> None:
        """End all ranks; returns when none is left. May be called again."""
        ...
