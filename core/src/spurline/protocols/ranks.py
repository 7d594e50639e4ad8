"""Describe the ranks, which are the processes that a backend asks for, and their resources on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Launch = Literal["local", "ray"]
"""`local` starts processes on this machine, and `ray` on the machines of a Ray cluster."""


@dataclass(frozen=True)
class ClusterNeed:
    """The resources that processes of one kind need on a Ray cluster.

    Attributes:
        kind: Name of the processes in the plural, such as `ranks`.
        count: Number of processes.
        gpus: GPUs of each process.
        cpus: CPUs of each process.
        gpus_if_any: Whether the processes run without GPUs if the cluster has none.
        together: Whether to fill one machine after another. Otherwise each process may be on any machine.
        per_machine: Processes on each machine if `together`; None for as many as fit.
        modules: Libraries such as `vllm` whose versions must be the same on all machines.
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

    count: number of ranks. device: device of each rank; with `cuda` each has one GPU of its own.
    per_node: number of ranks on each machine of a cluster; None fills each machine.
    gpus: GPUs of this machine that the ranks may use, in order; None for all.
    num_threads: CPU threads of each rank; None divides the cores of a machine among its ranks.
    variables: environment variables of each rank, which are set before it uses its device.
    peers_elsewhere: whether ranks on this machine exchange tensors with engines on other machines.
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
        """Return the resources that the ranks need on a cluster, or None if they are not launched by Ray."""
        if self.launch != "ray":
            return None
        gpus, cpus = int(self.device == "cuda"), self.num_threads or 1
        return ClusterNeed("ranks", self.count, gpus, cpus, together=True, per_machine=self.per_node)


def first_gpu_is_free(request: RankRequest | None) -> bool:
    """Return whether this process may use the first GPU that it sees, because no rank uses it."""
    if request is None or request.device != "cuda":
        return True
    # Ray may assign any GPU of this machine to a rank.
    return request.launch == "local" and 0 not in (request.gpus or range(request.count))[: request.count]
