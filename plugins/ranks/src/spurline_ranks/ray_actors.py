"""Run ranks as actors of a Ray cluster.

One placement group holds all ranks. It has a bundle for each machine, so ranks with neighbouring numbers share a
machine. Rank 0 hosts the store that ranks use to find each other. A `NodeActor` runs on each machine. Ray never
restarts a dead rank, and ends all ranks when the controller ends. This module is imported only with `launch: ray`.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup

from spurline.errors import RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_ranks.cluster_room import each_needs, room_for, what_comes
from spurline_ranks.group import ClusterNeed, ClusterRequest, RankGroup, TimeLimits
from spurline_ranks.logs import write_into
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, Value, packed, unpacked
from spurline_ranks.rank_main import RankMain, RankOrder
from spurline_ranks.ray_cluster import Node, RayCluster
from spurline_ranks.ray_node import NodeActor
from spurline_ranks.store import open_store

_END_TIMEOUT_S = 30.0
"""Seconds within which a killed process must have ended."""
_ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for a rank's report about its work."""
_STACKS_TIMEOUT_S = 10.0
"""Seconds to wait until a rank has written its stacks, and as long again for the answer of its machine."""
_PING_TIMEOUT_S = 15.0
"""Seconds without an answer after which a machine counts as lost."""
_TELLING_S = 10.0
"""Seconds to wait until Ray reports the end of a process."""
_WATCH = "watch"
"""Ray concurrency group with its own thread, so that an actor can report its work while it computes."""
_LOST = Died("was lost with its machine, which no longer answers,")


class RankActor:
    """One rank. Its methods are called through Ray."""

    def __init__(self) -> None:
        # A job scheduler sends these signals to all processes of a job. Only the controller handles them.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Standard output and standard error share one log.
        os.dup2(2, 1)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        self._main: RankMain | None = None

    def meet(self, hosts_store: bool) -> bytes:
        """Return a packed outcome: (process id, log file, the store's (host, port) if `hosts_store`, else None)."""
        store = None
        if hosts_store:
            self._store = open_store(address := get_node_ip_address())
            store = (address, self._store.port)
        return packed(Value((os.getpid(), os.readlink("/proc/self/fd/2"), store)))

    def start(self, order: RankOrder, log: str | None) -> bytes:
        """Write output to `log` unless it is None, join the other ranks, make the worker, and return the outcome."""
        if log is not None:
            write_into(log)
        self._main = RankMain(order)
        return self._main.start()

    def call(self, method: str, arguments: bytes) -> bytes:
        """Call a method of the worker with a packed tuple of arguments, and return the outcome."""
        assert self._main is not None
        return self._main.call(method, unpacked(arguments))

    @ray.method(concurrency_group=_WATCH)
    def doing(self) -> str:
        return "starting" if self._main is None else self._main.doing()


@dataclass
class _Rank:
    """The controller's handle of an actor. The process id and the log file come with the first answer."""

    actor: Any
    node: Node
    local_rank: int
    pid: int = 0
    log: str = ""


class RayRanks(RankGroup):
    """The ranks of a cluster."""

    def __init__(
        self, request: RankRequest, worker: str, arguments: tuple[Any, ...], limits: TimeLimits, cluster: ClusterRequest
    ) -> None:
        super().__init__(request.count, limits)
        self._cluster_request = cluster
        self._cluster = RayCluster(cluster)
        self._group: PlacementGroup | None = None
        self._watchers: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._ranks: list[_Rank] = []
        self._answers: dict[Any, int] = {}
        self._ending = threading.Lock()
        try:
            self._cluster.open()
            self._place_ranks(request)
            stores = self._meet()
            self._order(request, worker, arguments, stores[0])
            self._start()
        except BaseException:
            self.close()
            raise

    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        for number, rank in enumerate(self._ranks):
            own = () if per_rank is None else (per_rank[number],)
            self._answers[rank.actor.call.remote(method, packed((*own, *common)))] = number

    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        waiting = [answer for answer, rank in self._answers.items() if rank in missing]
        ready, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        return {(rank := self._answers.pop(answer)): self._outcome(rank, answer) for answer in ready}

    def _outcome(self, rank: int, answer: Any) -> Outcome:
        try:
            return unpacked(ray.get(answer))
        except RayActorError as error:
            return self._death(self._ranks[rank], error)
        except RayError as error:
            return Raised.of(error)

    def _identity(self, rank: int) -> Identity:
        return Identity(rank, self.size, self._ranks[rank].node.name, self._ranks[rank].pid)

    def _doing(self, missing: Sequence[int]) -> Mapping[int, str]:
        return what_comes({rank: self._ranks[rank].actor.doing.remote() for rank in missing}, _ANSWER_TIMEOUT_S)

    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        # A rank that has never answered has no known process id.
        known = [(number, self._ranks[number]) for number in missing if self._ranks[number].pid]
        asked = {
            number: self._watchers[rank.node.id].stacks.remote(rank.pid, rank.log, _STACKS_TIMEOUT_S)
            for number, rank in known
        }
        limit_s = 2 * _STACKS_TIMEOUT_S
        silent = f"The machine of this rank has not answered within {limit_s:g} s."
        return dict.fromkeys(asked, silent) | what_comes(asked, limit_s)

    def _gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        pids = self._pids_by_node(ranks)
        answers = what_comes(
            {node: self._watchers[node].missing.remote(list(of_node)) for node, of_node in pids.items()},
            _PING_TIMEOUT_S,
        )
        gone: dict[int, Died] = {}
        for node, of_node in pids.items():
            if (missing := answers.get(node)) is None:
                self._lost.add(node)
                gone |= dict.fromkeys(of_node.values(), _LOST)
            elif missing:
                told = self._wait([of_node[pid] for pid in missing], _TELLING_S)
                gone |= {number: outcome for number, outcome in told.items() if isinstance(outcome, Died)}
        return gone

    def _pids_by_node(self, ranks: Sequence[int]) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for number in ranks:
            rank = self._ranks[number]
            found.setdefault(rank.node.id, {})[rank.pid] = number
        return found

    def _end(self) -> None:
        with self._ending:
            if self._group is None:
                return
            for rank in self._ranks:
                ray.kill(rank.actor)
            left = self._left()
            for watcher in self._watchers.values():
                ray.kill(watcher)
            self._cluster.release(self._group)
            self._group = None
            if left:
                raise RunFailedError(f"{'; '.join(left)}: killed, but not gone {_END_TIMEOUT_S:g} s later.")

    def _release(self) -> None:
        self._cluster.close()

    def _place_ranks(self, request: RankRequest) -> None:
        """Make an actor for each rank and each machine."""
        need = ClusterNeed.of_ranks(request)
        assert need is not None, request
        (place,) = room_for(self._cluster, need, "backend", self._cluster_request.room_timeout_s)
        self._group = place.group
        each, per_node = each_needs(need, place.nodes), need.count // len(place.nodes)
        for number, node in enumerate(place.nodes):
            options = self._cluster.actor_options(self._group, number, {})
            self._watchers[node.id] = ray.remote(NodeActor).options(**options).remote()
            options = self._cluster.actor_options(self._group, number, each)
            kind: Any = ray.remote(concurrency_groups={_WATCH: 1})(RankActor)  # pyright: ignore[reportCallIssue]
            self._ranks += [_Rank(kind.options(**options).remote(), node, local) for local in range(per_node)]

    def _meet(self) -> list[Any]:
        """Wait until every actor has answered. Return for each actor the address of the store on it, or None."""
        self._answers = {rank.actor.meet.remote(not number): number for number, rank in enumerate(self._ranks)}
        met = self._start()
        for rank, (pid, log, _) in zip(self._ranks, met, strict=True):
            rank.pid, rank.log = pid, log
        return [store for _, _, store in met]

    def _order(self, request: RankRequest, worker: str, arguments: tuple[Any, ...], store: tuple[str, int]) -> None:
        # Variables that the user has set for the cluster take precedence.
        chosen, folder = self._cluster_request.env_vars, self._cluster_request.log_dir
        environment = {name: value for name, value in request.variables.items() if name not in chosen}
        local_world, limits = self.size // len(self._watchers), self._limits
        self._answers = {}
        for number, rank in enumerate(self._ranks):
            local, node = rank.local_rank, rank.node.name
            order = RankOrder(request, number, local, local_world, node, worker, arguments, limits, store, environment)
            log = None if folder is None else f"{folder}/rank-{number}.log"
            self._answers[rank.actor.start.remote(order, log)] = number
            rank.log = log or rank.log

    def _death(self, rank: _Rank, error: RayActorError) -> Died:
        if not rank.log:
            return Died(_how_it_died(error))
        node = rank.node.id
        said = what_comes({node: self._watchers[node].last_words.remote(rank.log)}, _PING_TIMEOUT_S)
        if (words := said.get(node)) is not None:
            return Died(_how_it_died(error), words)
        self._lost.add(node)
        return _LOST

    def _left(self) -> list[str]:
        """Return the names of killed ranks that have not ended. Ranks of lost machines are left out."""
        pids = self._pids_by_node([number for number, rank in enumerate(self._ranks) if rank.pid])
        asked = {
            node: watcher.end.remote(list(pids.get(node, ())), _END_TIMEOUT_S)
            for node, watcher in self._watchers.items()
            if node not in self._lost
        }
        left = what_comes(asked, _END_TIMEOUT_S + _ANSWER_TIMEOUT_S)
        return [str(self._identity(pids[node][pid])) for node, of_node in left.items() for pid in of_node]


def _how_it_died(error: RayActorError) -> str:
    """Return how the process ended, as a predicate for `Died.how`."""
    text = str(error).strip()
    if (code := re.search(r"exit code (\d+)", text)) is not None:
        return f"ended with exit code {code[1]}"
    if "connection error code 2" in text:
        return "was killed by a signal, as the system does when memory runs out,"
    if "killed by `ray.kill`" in text:
        return "was killed"
    return f"was lost ({' '.join(text.split())})"
