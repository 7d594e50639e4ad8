"""Describe the ranks, which are the processes that a backend asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Launch = Literal["local", "ray"]
"""`local` starts processes on this machine, and `ray` on the machines of a Ray cluster."""


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
