"""Start the ranks of a run without a model, and test their devices and their exchanges, for `spurline doctor`.

In every rank, a `DoctorRank` runs the tests for the controller. A backend adds its groups of ranks to the tests.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.metadata import version
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spurline.config.run_config import RunConfig
from spurline.errors import SpurlineError
from spurline_models.device_profile import device_profile
from spurline_models.machine import Finding
from spurline_ranks.cluster import cluster_request, room_on_cluster
from spurline_ranks.configs import RankBackendConfig
from spurline_ranks.group import ClusterRequest, Place, RankGroup, open_ranks
from spurline_ranks.messages import plain_run, read_run

EXCHANGED_BYTES = 64 * 2**20
"""Bytes that each rank contributes to one exchange."""
LIMIT_S = 120.0
"""Seconds that one exchange, or one call, may take. Ranks that need longer for 64 MB are too slow to train."""
_REPEATS = 3


def examine(config: RankBackendConfig, run: RunConfig, worker: str) -> Iterator[Finding]:
    """Start the ranks and yield their findings. `worker` is the `module:Class` of the backend's `DoctorRank`."""
    limits = replace(config.limits, call_s=LIMIT_S, collective_s=min(LIMIT_S, config.collective_timeout_s))
    began = time.monotonic()
    # Without a log folder, no logs are left in the run directory.
    cluster = replace(cluster_request(run), log_dir=None)
    request = replace(config.rank_request(), peers_elsewhere=run.source.facts.engines_elsewhere)
    with ExitStack() as stack:
        try:
            stack.enter_context(room_on_cluster(run))
            ranks = open_ranks(request, worker, (plain_run(run),), limits, cluster)
        except SpurlineError as error:
            yield Finding("ranks", f"{config.num_ranks} were requested, but did not start", _words(error))
            return
        stack.callback(ranks.close)
        try:
            yield from _ask(ranks, time.monotonic() - began)
            if request.launch == "ray":
                yield access_to(cluster)
        except SpurlineError as error:
            yield Finding("ranks", "ended before they answered", _words(error))


def _ask(ranks: RankGroup, seconds: float) -> Iterator[Finding]:
    found: list[dict[str, Any]] = ranks.call("look")
    yield _placement(found, seconds)
    # All ranks have the same versions, since a cluster with different versions is refused.
    yield Finding("versions of the ranks", found[0]["versions"])
    yield from _devices(found)
    for group in found[0]["groups"]:
        yield _exchanged(group, ranks.call("exchange", group, EXCHANGED_BYTES))


def access_to(request: ClusterRequest) -> Finding:
    """Report whether the cluster requires a token. A cluster without a token is safe only in a private network."""
    from spurline_ranks.ray_cluster import RayCluster

    with closing(RayCluster(request)) as cluster:
        cluster.open()
        is_open = cluster.obeys_strangers()
    who = (
        "everybody who reaches its ports can run code on its machines, because it requires no token. Set "
        "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN for `ray start` and `spurline`, or use a private network"
    )
    return Finding("who may use the cluster", who if is_open else "those who have its token")


def _words(error: SpurlineError) -> str:
    # Errors begin with `config: ` where the name of a config file is not known.
    return "\n".join([str(error).removeprefix("config: "), *getattr(error, "__notes__", ())])


def _placement(found: Sequence[Mapping[str, Any]], seconds: float) -> Finding:
    by_node: dict[str, list[int]] = {}
    for rank, answer in enumerate(found):
        by_node.setdefault(answer["node"], []).append(rank)
    places = "; ".join(f"{node}: ranks {members[0]} to {members[-1]}" for node, members in by_node.items())
    return Finding("ranks", f"{len(found)} met each other in {seconds:.1f} s. {places}")


def _devices(found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for rank, answer in enumerate(found):
        if answer["memory"] is None:
            continue
        free, total = answer["memory"]
        value = f"{answer['device']}, {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free"
        fix = f"end other programs on the GPU of {answer['node']}: see `nvidia-smi`" if free < total / 2 else ""
        yield Finding(f"device of rank {rank}", value, fix)
    names = {answer["device"] for answer in found}
    if len(names) > 1:
        yield Finding("devices", ", ".join(sorted(names)), "use equal devices: all ranks wait for the slowest")
    elif found[0]["memory"] is None:
        threads = sorted({answer["threads"] for answer in found})
        yield Finding("devices", f"{names.pop()}, {' or '.join(map(str, threads))} threads for each rank")


def _exchanged(group: str, outcomes: Sequence[tuple[float, float] | None]) -> Finding:
    what = f"all-reduce of 64 MB, {group}"
    if None in outcomes:
        fix = "do not train here: see the driver's and the network's logs, and NCCL_DEBUG=INFO on GPUs"
        return Finding(what, f"wrong values in rank {outcomes.index(None)}", fix)
    seconds, sent = max(filter(None, outcomes))
    return Finding(what, f"{1e3 * seconds:,.1f} ms, {sent / seconds / 1e9:,.2f} GB/s from each rank")


class DoctorRank:
    """A worker without a model. A backend's subclass adds the backend's groups of ranks."""

    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    """Distributions whose versions are shown."""

    def __init__(self, place: Place, plain_run: Mapping[str, Any]) -> None:
        run, _ = read_run(plain_run)
        config = cast(RankBackendConfig, run.backend)
        self._place = place
        self._profile = device_profile(config.on)
        groups = {"all ranks": dist.group.WORLD, **self.groups(config, place)}
        self._groups = {
            name: group for name, group in groups.items() if group is not None and dist.get_world_size(group) > 1
        }

    def groups(self, config: Any, place: Place) -> Mapping[str, ProcessGroup | None]:
        """Return the backend's groups that hold this rank, by name. A group of one may be None. All ranks call this."""
        return {}

    def look(self) -> dict[str, Any]:
        """Describe this rank's machine, device and groups."""
        libraries = (f"{library} {version(library)}" for library in self.libraries)
        return {
            "node": self._place.node,
            "versions": ", ".join([f"Python {platform.python_version()}", *libraries]),
            "device": self._profile.name,
            "memory": self._profile.memory(),
            "threads": torch.get_num_threads(),
            "groups": list(self._groups),
        }

    def exchange(self, group: str, num_bytes: int) -> tuple[float, float] | None:
        """Sum this number of bytes over a group of ranks, a few times.

        Returns:
            The seconds of the fastest sum, and the bytes that this rank sent for it. None if a value was wrong.
        """
        self._place.doing(f"all-reduce, {group}")
        process_group = self._groups[group]
        size, values = dist.get_world_size(process_group), num_bytes // 4
        seconds, right = [], True
        # The first exchange also makes the connections, so its time is not used.
        for _ in range(1 + _REPEATS):
            summed = torch.full((values,), dist.get_rank(process_group) + 1.0, device=self._profile.device)
            dist.barrier(process_group)
            self._profile.synchronize()
            began = time.perf_counter()
            dist.all_reduce(summed, group=process_group)
            self._profile.synchronize()
            seconds.append(time.perf_counter() - began)
            # Rank r adds r + 1.
            right = right and bool((summed == size * (size + 1) / 2).all())
        return (min(seconds[1:]), 2 * (size - 1) / size * 4 * values) if right else None
