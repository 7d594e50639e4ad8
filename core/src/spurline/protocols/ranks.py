"""The processes that a backend asks for beside this one, called ranks, and the room that they need on a cluster.

Plain data, so that a config can say it before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Launch = Literal["local", "ray"]
"""Processes of this machine, or actors of a Ray cluster."""


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
        """Return the room that they need, with `ray`."""
        if self.launch != "ray":
            return None
        gpus, cpus = int(self.device == "cuda"), self.num_threads or 1
        return ClusterNeed("ranks", self.count, gpus, cpus, together=True, per_machine=self.per_node)


def first_gpu_is_free(request: RankRequest | None) -> bool:
    """Return whether this process may compute on the first GPU that it sees, if it sees any: no rank has it."""
    if request is None or request.device != "cuda":
        return True
    # A cluster gives out the GPUs of this machine too, and would not know of it.
    return request.launch == "local" and 0 not in (request.gpus or range(request.count))[: request.count]
