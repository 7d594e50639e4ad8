"""Start the ranks of a run without a model, and let them try what a run needs: each other and their devices.

In: a config. Out: findings for `spurline doctor`. The controller's side asks; a `DoctorRank` answers in every rank. A
backend adds its groups of ranks, and what follows from the measured rate.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.config.run_config import RunConfig
from spurline.errors import SpurlineError
from spurline_models.device_profile import device_profile
from spurline_models.machine import Finding
from spurline_ranks.cluster import cluster_request
from spurline_ranks.cluster_checks import check_nodes
from spurline_ranks.configs import RankBackendConfig
from spurline_ranks.group import ClusterRequest, Place, RankGroup
from spurline_ranks.launch import open_ranks
from spurline_ranks.messages import plain_run, read_run

EXCHANGED_BYTES = 64 * 2**20
"""Bytes of each rank in one exchange."""

LIMIT_S = 120.0
"""Seconds for an exchange, and for a call: who needs longer for 64 MB will not train."""

_REPEATS = 3

ALL_RANKS = "all ranks"
REDUCE, ALL_TO_ALL, NEXT = "all-reduce", "all-to-all", "sending to the next"
"""Kinds of exchange. The last one goes round: the last rank sends to the first."""

Group = tuple[ProcessGroup | None, Sequence[str]]
"""Ranks, and the kinds of exchange that a run makes between them."""


@dataclass(frozen=True)
class Exchange:
    """The result of an exchange. seconds: of the fastest of a few. sent: bytes that a rank sent. right: whether the
    values are."""

    seconds: float
    sent: float
    right: bool

    @property
    def rate(self) -> float:
        """Bytes that a rank sent in a second."""
        return self.sent / self.seconds


Follows = Callable[[Exchange], Iterable[Finding]]
"""Finds what follows from the slowest rank's all-reduce of all ranks."""


def examine(
    config: RankBackendConfig, run: RunConfig, worker: str, follows: Follows | None = None
) -> Iterator[Finding]:
    """Start the ranks and yield what they find; see `RankBackendConfig.doctor`.

    Args:
        config: The backend's section.
        run: The run's settings.
        worker: `module:Class` of the `DoctorRank`.
        follows: Finds more, from how fast ranks exchange.
    """
    limits = replace(config.limits, call_s=LIMIT_S, collective_s=min(LIMIT_S, config.collective_timeout_s))
    began = time.monotonic()
    # It leaves nothing in the run directory, which may be that of no run yet.
    cluster = replace(cluster_request(run), log_dir=None)
    request = replace(config.rank_request(), peers_elsewhere=run.source.facts.engines_elsewhere)
    try:
        ranks = open_ranks(request, worker, (plain_run(run),), limits, check_nodes(run), cluster)
    except SpurlineError as error:
        yield Finding("ranks", f"{config.num_ranks} were asked for, and did not start", _words(error))
        return
    try:
        yield from _ask(ranks, time.monotonic() - began, follows)
        if request.launch == "ray":
            yield access_to(cluster)
    except SpurlineError as error:
        yield Finding("ranks", "ended before they had answered", _words(error))
    finally:
        ranks.close()


def _ask(ranks: RankGroup, seconds: float, follows: Follows | None) -> Iterator[Finding]:
    found: list[dict[str, Any]] = ranks.call("look")
    yield from _placement(found, seconds)
    yield from _versions(found)
    yield from _devices(found)
    for group, kinds in found[0]["groups"].items():
        for kind in kinds:
            outcomes: list[Exchange] = ranks.call("exchange", group, kind, EXCHANGED_BYTES)
            yield _exchanged(group, kind, outcomes)
            if (group, kind) == (ALL_RANKS, REDUCE) and follows is not None:
                yield from follows(_slowest(outcomes))


def access_to(request: ClusterRequest) -> Finding:
    """Find who may use the cluster. An open one is not wrong where nobody else reaches the machines."""
    from spurline_ranks.ray_cluster import RayCluster

    cluster = RayCluster(request)
    cluster.open()
    try:
        is_open = cluster.obeys_strangers()
    finally:
        cluster.close()
    who = (
        "everybody who reaches its ports, as it asks for no token: they can run code on its machines. Set "
        "RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN where `ray start` and `spurline` run, or keep others out of its "
        "network"
    )
    return Finding("who may use the cluster", who if is_open else "those who have its token")


def _words(error: SpurlineError) -> str:
    # Which file the settings are in, an error that was not raised by loading it does not know.
    return "\n".join([str(error).removeprefix("config: "), *getattr(error, "__notes__", ())])


def _placement(found: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[Finding]:
    by_node: dict[str, list[int]] = {}
    for rank, answer in enumerate(found):
        by_node.setdefault(answer["node"], []).append(rank)
    places = "; ".join(f"{node}: {_ranks(members)}" for node, members in by_node.items())
    yield Finding("ranks", f"{len(found)} met each other in {seconds:.1f} s. {places}")


def _ranks(members: Sequence[int]) -> str:
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {members[0]} to {members[-1]}"


def _versions(found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    nodes: dict[str, set[str]] = {}
    for answer in found:
        nodes.setdefault(answer["versions"], set()).add(answer["node"])
    if len(nodes) == 1:
        yield Finding("versions of the ranks", found[0]["versions"])
        return
    said = "; ".join(f"{versions} on {', '.join(sorted(on))}" for versions, on in nodes.items())
    yield Finding("versions of the ranks", said, "install the same on all machines: one image, or one shared venv")


def _devices(found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for rank, answer in enumerate(found):
        if answer["memory"] is None:
            continue
        free, total = answer["memory"]
        value = f"{answer['device']}, {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free"
        fix = f"end what else runs on the GPU of {answer['node']}: see `nvidia-smi`" if free < total / 2 else ""
        yield Finding(f"device of rank {rank}", value, fix)
    names = {answer["device"] for answer in found}
    if len(names) > 1:
        yield Finding("devices", ", ".join(sorted(names)), "use equal devices: all wait for the slowest")
    elif found[0]["memory"] is None:
        threads = sorted({answer["threads"] for answer in found})
        yield Finding("devices", f"{names.pop()}, {' or '.join(map(str, threads))} threads for each rank")


def _exchanged(group: str, kind: str, outcomes: Sequence[Exchange]) -> Finding:
    what = f"{kind} of 64 MB, {group}"
    wrong = [rank for rank, outcome in enumerate(outcomes) if not outcome.right]
    if wrong:
        fix = "do not train here: see the driver's and the network's logs, and NCCL_DEBUG=INFO on GPUs"
        return Finding(what, f"wrong values in rank {wrong[0]}", fix)
    slowest = _slowest(outcomes)
    return Finding(what, f"{1e3 * slowest.seconds:,.1f} ms, {slowest.rate / 1e9:,.2f} GB/s from each rank")


def _slowest(outcomes: Sequence[Exchange]) -> Exchange:
    return max(outcomes, key=lambda outcome: outcome.seconds)


class DoctorRank:
    """A `Worker` without a model; a backend says which groups of ranks its runs have."""

    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    """Distributions whose versions must be the same on all machines."""

    def __init__(self, place: Place, plain_run: Mapping[str, Any]) -> None:
        run, _ = read_run(plain_run)
        config = cast(RankBackendConfig, run.backend)
        self._place = place
        self._profile = device_profile(config.on)
        groups = {ALL_RANKS: (dist.group.WORLD, (REDUCE, ALL_TO_ALL)), **self.groups(config, place)}
        self._groups = {
            name: (group, kinds)
            for name, (group, kinds) in groups.items()
            if group is not None and dist.get_world_size(group) > 1
        }

    def groups(self, config: Any, place: Place) -> Mapping[str, Group]:
        """Make the groups of this rank but that of all, by what they do, as many on every rank; a collective."""
        return {}

    def look(self) -> dict[str, Any]:
        """Say what this rank finds around it."""
        libraries = (f"{library} {version(library)}" for library in self.libraries)
        return {
            "node": self._place.node,
            "versions": ", ".join([f"Python {platform.python_version()}", *libraries]),
            "device": self._profile.name,
            "memory": self._profile.memory(),
            "threads": torch.get_num_threads(),
            "groups": {name: list(kinds) for name, (_, kinds) in self._groups.items()},
        }

    def exchange(self, group: str, kind: str, num_bytes: int) -> Exchange:
        """Send so many bytes a few times within a group of ranks."""
        self._place.doing(f"{kind}, {group}")
        process_group, _ = self._groups[group]
        size = dist.get_world_size(process_group)
        values = num_bytes // 4 // size * size
        seconds, right = [], True
        # The first one also makes the connections.
        for _ in range(1 + _REPEATS):
            sent = torch.full((values,), dist.get_rank(process_group) + 1.0, device=self._profile.device)
            dist.barrier(process_group)
            self._profile.synchronize()
            began = time.perf_counter()
            received = EXCHANGES[kind](sent, process_group)
            self._profile.synchronize()
            seconds.append(time.perf_counter() - began)
            right = right and bool((received == _expected(kind, process_group, received)).all())
        return Exchange(min(seconds[1:]), _SENT[kind](size) * 4 * values, right)


def _all_reduce(values: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(values, group=group)
    return values


def _all_to_all(values: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    return received


def _to_the_next(values: Tensor, group: ProcessGroup) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(values)
    after, before = ((rank + step) % size for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, values, group=group, group_peer=after),
        dist.P2POp(dist.irecv, received, group=group, group_peer=before),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


EXCHANGES: Mapping[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    REDUCE: _all_reduce,
    ALL_TO_ALL: _all_to_all,
    NEXT: _to_the_next,
}

_SENT: Mapping[str, Callable[[int], float]] = {
    REDUCE: lambda size: 2 * (size - 1) / size,
    ALL_TO_ALL: lambda size: (size - 1) / size,
    NEXT: lambda size: 1.0,
}
"""How much of its values a rank sends, by the number of ranks."""


def _expected(kind: str, group: ProcessGroup, received: Tensor) -> Tensor:
    """Rank r sent r + 1 everywhere: the sum of all, an equal part of each, or what the one before sent."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if kind == REDUCE:
        return torch.full_like(received, size * (size + 1) / 2)
    if kind == NEXT:
        return torch.full_like(received, (rank - 1) % size + 1)
    parts = torch.arange(1, size + 1, dtype=received.dtype, device=received.device)
    return parts.repeat_interleave(len(received) // size)
