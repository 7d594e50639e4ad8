"""Run ranks on the machines of a Ray cluster.

One placement group holds all ranks, with a bundle for each machine, so ranks with neighbouring numbers share a machine.
On each machine a `MachineActor` starts the machine's ranks, and passes calls and outcomes on. Ray never restarts a dead
actor, and ends all actors when the controller ends; the ranks end with their actor. This module is imported only with
`launch: ray`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

from spurline.errors import RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_ranks.cluster_room import answers, room_for
from spurline_ranks.group import ClusterNeed, ClusterRequest, MachineOrder, TimeLimits, Work
from spurline_ranks.machine_actor import MachineActor
from spurline_ranks.outcomes import Died, Identity, Raised, unpacked
from spurline_ranks.processes import STACKS_TIMEOUT_S
from spurline_ranks.ray_cluster import RayCluster
from spurline_ranks.store import open_store

_ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for a machine's report about the work of its ranks."""
_PING_TIMEOUT_S = 15.0
"""Seconds without an answer after which a machine counts as lost."""
_END_TIMEOUT_S = 33.0
"""Seconds to wait until a machine has killed its ranks."""
_NUM_THREADS = 8
"""Calls that a `MachineActor` answers at the same time. One of them always waits for outcomes."""


@dataclass(frozen=True, eq=False)
class _Machine:
    name: str
    actor: Any
    ranks: range


class RayRanks:
    """The `RankProcesses` of a cluster."""

    def __init__(
        self, request: RankRequest, worker: str, arguments: tuple[Any, ...], limits: TimeLimits, cluster: ClusterRequest
    ) -> None:
        self.identities: dict[int, Identity] = {}
        self._cluster = RayCluster(cluster)
        self._group: PlacementGroup | None = None
        self._machines: dict[str, _Machine] = {}
        self._lost: set[str] = set()
        self._polls: dict[Any, _Machine] = {}
        self._sent: dict[Any, _Machine] = {}
        self._ending = threading.Lock()
        self._store: TCPStore | None = None
        try:
            self._cluster.open()
            self._place(request, cluster.room_timeout_s)
            self._start(request, worker, arguments, limits, cluster)
        except BaseException:
            self.end()
            self.close()
            raise

    def send(self, method: str, common: bytes, own: Mapping[int, bytes]) -> None:
        for machine in self._machines.values():
            parts = {rank: own[rank] for rank in machine.ranks}
            self._sent[machine.actor.ask.remote("send", method, common, parts)] = machine

    def wait(self, timeout_s: float | None) -> Mapping[int, bytes | Died]:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            ready, _ = ray.wait([*self._polls, *self._sent], num_returns=1, timeout=left_s)
            if not ready:
                return {}
            is_delivery = ready[0] in self._sent
            machine = (self._sent if is_delivery else self._polls).pop(ready[0])
            try:
                answer: Any = ray.get(ready[0])
            except RayError as error:
                return self._lose(machine, " ".join(str(error).split()))
            if not is_delivery:
                self._polls[machine.actor.wait.remote()] = machine
                return answer
            if isinstance(unpacked(answer), Raised):
                return dict.fromkeys(machine.ranks, cast("bytes", answer))

    def work(self, ranks: Sequence[int]) -> Mapping[int, Work]:
        return _joined(self._ask("work", ranks, _ANSWER_TIMEOUT_S))

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        silent = "(no stack: the machine of this rank does not answer)"
        return dict.fromkeys(ranks, silent) | _joined(self._ask("stacks", ranks, 2 * STACKS_TIMEOUT_S))

    def gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        found = self._ask("gone", ranks, _PING_TIMEOUT_S)
        for machine in {self._machine_of(rank) for rank in ranks}:
            if machine.name not in found:
                found[machine.name] = self._lose(machine, "it no longer answers")
        return _joined(found)

    def end(self) -> None:
        with self._ending:
            if self._group is None:
                return
            try:
                there = set(self._machines) - self._lost
                answers({name: self._machines[name].actor.ask.remote("end") for name in there}, _END_TIMEOUT_S)
            finally:
                for machine in self._machines.values():
                    ray.kill(machine.actor)
                self._cluster.release(self._group)
                self._group = None

    def close(self) -> None:
        self._store = None
        self._cluster.close()

    def _place(self, request: RankRequest, timeout_s: float) -> None:
        """Make an actor for each machine, with the resources of the machine's ranks."""
        need = ClusterNeed.of_ranks(request)
        assert need is not None, request
        (place,) = room_for(self._cluster, need, "backend", timeout_s)
        self._group = place.group
        count = request.count // len(place.nodes)
        kind: Any = ray.remote(max_concurrency=_NUM_THREADS)(MachineActor)  # pyright: ignore[reportCallIssue]
        for number, (node, bundle) in enumerate(zip(place.nodes, place.bundles, strict=True)):
            options = self._cluster.actor_options(self._group, number, bundle)
            ranks = range(number * count, (number + 1) * count)
            self._machines[node.name] = _Machine(node.name, kind.options(**options).remote(), ranks)

    def _start(
        self, request: RankRequest, worker: str, arguments: tuple[Any, ...], limits: TimeLimits, cluster: ClusterRequest
    ) -> None:
        """Start the ranks on their machines. Raises RunFailedError if a machine does not answer."""
        host = get_node_ip_address()
        self._store = open_store(host)
        address = host, self._store.port
        # Variables that the user has set for the cluster take precedence.
        own = {name: value for name, value in request.variables.items() if name not in cluster.env_vars}
        chosen = replace(request, variables=own)
        asked: dict[str, Any] = {}
        for name, machine in self._machines.items():
            order = MachineOrder(chosen, machine.ranks, name, worker, arguments, limits, address, cluster.log_dir)
            asked[name] = machine.actor.start.remote(order)
        started = answers(asked, limits.start_s)
        if silent := [name for name in asked if name not in started]:
            raise RunFailedError(
                f"{', '.join(silent)} did not start ranks within {limits.start_s:g} s (backend.start_timeout_s). Look "
                "at `ray status`."
            )
        self.identities = _joined(started)
        self._polls = {machine.actor.wait.remote(): machine for machine in self._machines.values()}

    def _ask(self, method: str, ranks: Sequence[int], limit_s: float) -> dict[str, Any]:
        """Ask the machines of these ranks about them. Return the answers that come in time, by machine."""
        by_machine: dict[str, list[int]] = {}
        for rank in ranks:
            by_machine.setdefault(self._machine_of(rank).name, []).append(rank)
        asked = {name: self._machines[name].actor.ask.remote(method, own) for name, own in by_machine.items()}
        return answers(asked, limit_s)

    def _machine_of(self, rank: int) -> _Machine:
        return next(machine for machine in self._machines.values() if rank in machine.ranks)

    def _lose(self, machine: _Machine, why: str) -> Mapping[int, Died]:
        self._lost.add(machine.name)
        return dict.fromkeys(machine.ranks, Died(f"was lost with its machine ({why})"))


def _joined(parts: Mapping[Any, Mapping[int, Any]]) -> dict[int, Any]:
    return {rank: value for part in parts.values() for rank, value in part.items()}
