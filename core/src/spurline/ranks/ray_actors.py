"""Ranks as actors of a Ray cluster.

One placement group holds them: a bundle for each machine, so that neighbours by number are neighbours on a machine.
Rank 0 hosts the store where they meet. Beside them runs one `NodeActor` on each machine. A rank that dies is never
started again, and all of them end with the process that asked for them, as Ray sees to. Imported with `launch: ray`
only.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group_table
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

from spurline.errors import ConfigError, RunFailedError
from spurline.ranks.calls import PATIENCE_S, START, RankCalls
from spurline.ranks.cluster_checks import AskNodes
from spurline.ranks.group import RankRequest, TimeLimits
from spurline.ranks.outcomes import Died, Identity, Outcome, Raised, Value, error_of
from spurline.ranks.rank_main import RankMain, RankOrder
from spurline.ranks.ray_cluster import Bundle, Node, RayCluster, amounts
from spurline.ranks.ray_node import NodeActor, packed, unpacked

ROOM_TIMEOUT_S = 180.0
"""Seconds to wait for a cluster in which others hold what the ranks need, or whose machines are still coming."""
_END_TIMEOUT_S = 30.0
"""Seconds that a process may take to be gone after it was killed."""
_ANSWER_TIMEOUT_S = 3.0
"""Seconds that a machine has to say what a rank does, wrote or where it stands."""
_SLICE_S = 2.0
_WATCH = "watch"
"""The thread of an actor that answers while another one computes."""


class RankActor:
    """One rank; every method is called through Ray."""

    def __init__(self) -> None:
        # What systems send to all processes when they stop a job is the controller's to handle.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # One log for both, which is asked for when the rank says nothing any more.
        os.dup2(2, 1)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        self._main: RankMain | None = None

    def meet(self, hosts_store: bool) -> bytes:
        """Outcome: what the controller must know of this process, with the place of its store where it hosts one."""
        store = None
        if hosts_store:
            self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            store = (get_node_ip_address(), self._store.port)
        return packed(Value((os.getpid(), os.readlink("/proc/self/fd/2"), store)))

    def start(self, order: RankOrder) -> bytes:
        """Outcome of joining the others and making the worker."""
        self._main = RankMain(order)
        return packed(self._main.start())

    def call(self, method: str, arguments: bytes) -> bytes:
        """Outcome of a method of the worker. arguments: a packed tuple."""
        assert self._main is not None
        outcome = self._main.call(method, unpacked(arguments))
        try:
            return packed(outcome)
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            return packed(Raised.of(error))

    @ray.method(concurrency_group=_WATCH)
    def doing(self) -> str:
        return "starting" if self._main is None else self._main.doing()


@dataclass
class _Rank:
    """An actor from outside. pid and log, the file that it writes to, are known once it has answered."""

    actor: Any
    node: Node
    local_rank: int
    pid: int = 0
    log: str = ""


class RayRanks(RankCalls):
    """A `RankGroup` of actors."""

    def __init__(
        self,
        request: RankRequest,
        worker: str,
        arguments: tuple[Any, ...],
        limits: TimeLimits,
        on_nodes: Callable[[AskNodes], None] | None = None,
    ) -> None:
        """on_nodes: is called when there is a process on each machine, before any worker is made."""
        super().__init__(request.count, limits)
        self._cluster = RayCluster(request.runtime_env)
        self._group: PlacementGroup | None = None
        self._watchers: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._ranks: list[_Rank] = []
        self._answers: dict[Any, int] = {}
        self._ending = threading.Lock()
        try:
            self._cluster.open()
            self._place(request)
            stores = self._meet()
            if on_nodes is not None:
                on_nodes(self._ask_nodes)
            self._order(request, worker, arguments, stores[0])
        except BaseException:
            self.close()
            raise
        self._start()

    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        for number, rank in enumerate(self._ranks):
            own = () if per_rank is None else (per_rank[number],)
            self._answers[rank.actor.call.remote(method, packed((*own, *common)))] = number

    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        waiting = [answer for answer, rank in self._answers.items() if rank in missing]
        # Whatever comes first: a list of answers would only be there when the last one is.
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
        return _what_comes({rank: self._ranks[rank].actor.doing.remote() for rank in missing}, _ANSWER_TIMEOUT_S)

    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        asked: dict[int, Any] = {}
        for number in missing:
            rank = self._ranks[number]
            if not rank.pid:
                # It has never answered, so nobody knows which process it is.
                continue
            asked[number] = self._watchers[rank.node.id].stacks.remote(rank.pid, rank.log, _ANSWER_TIMEOUT_S)
        return _what_comes(asked, 2 * _ANSWER_TIMEOUT_S)

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

    def _place(self, request: RankRequest) -> None:
        """Make an actor for each rank, and one for each machine, where there is room for them."""
        per_node = ranks_per_node(request, self._cluster.nodes())
        each = {**({"GPU": 1.0} if request.device == "cuda" else {}), "CPU": float(request.num_threads or 1)}
        bundle = {resource: count * per_node for resource, count in each.items()}
        machines = request.count // per_node
        self._group = self._cluster.reserve([bundle] * machines, "STRICT_SPREAD" if machines > 1 else "STRICT_PACK")
        self._wait_for_room(machines, bundle)
        place_of_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {node.id: node for node in self._cluster.nodes()}
        for number in range(machines):
            node = nodes[place_of_bundle[number]]
            # It sees ranks end also while it does what takes long, such as a download.
            options = self._cluster.actor_options(self._group, number, {}) | {"max_concurrency": 2}
            self._watchers[node.id] = ray.remote(NodeActor).options(**options).remote()
            options = self._cluster.actor_options(self._group, number, each)
            kind: Any = ray.remote(concurrency_groups={_WATCH: 1})(RankActor)  # pyright: ignore[reportCallIssue]
            self._ranks += [_Rank(kind.options(**options).remote(), node, local) for local in range(per_node)]

    def _wait_for_room(self, machines: int, bundle: Bundle) -> None:
        assert self._group is not None
        needed = f"{machines} machine{'s' if machines > 1 else ''} with {amounts(bundle)}{' each' * (machines > 1)}"
        nodes = self._cluster.nodes()
        fitting = sum(all(node.has(resource) >= count for resource, count in bundle.items()) for node in nodes)
        lacks = f"{self.size} ranks need {needed}; the Ray cluster has {self._cluster.describe()}"
        limit_s = 0.0 if fitting < machines and self._cluster.is_own else ROOM_TIMEOUT_S
        until, is_told = time.monotonic() + limit_s, False
        # A slice at a time: an interruption is seen only in between.
        while not self._group.wait(_SLICE_S):
            if not is_told:
                print(f"Waiting for room, {limit_s:g} s at most: {lacks}.", file=sys.stderr, flush=True)
                is_told = True
            if time.monotonic() >= until:
                raise ConfigError.at(
                    "backend",
                    f"finds no room: {lacks}, so that {fitting} of its machines can have that much. Lower ranks or "
                    "ranks_per_node, add machines with `ray start --address=...`, or wait for those who use them.",
                )

    def _meet(self) -> list[Any]:
        """Wait until every actor is there; returns what each says of a store."""
        self._answers = {rank.actor.meet.remote(not number): number for number, rank in enumerate(self._ranks)}
        with self._lock:
            met = self._collect(START, self._limits.start_s, time.monotonic())
        for rank, (pid, log, _) in zip(self._ranks, met, strict=True):
            rank.pid, rank.log = pid, log
        return [store for _, _, store in met]

    def _order(self, request: RankRequest, worker: str, arguments: tuple[Any, ...], store: tuple[str, int]) -> None:
        """Tell every actor which rank it is."""
        asked = {node: watcher.cores.remote() for node, watcher in self._watchers.items()}
        cores = _what_comes(asked, self._limits.start_s)
        per_node = self.size // len(self._watchers)
        self._answers = {}
        for number, rank in enumerate(self._ranks):
            order = RankOrder(
                rank=number,
                world=self.size,
                local_rank=rank.local_rank,
                node=rank.node.name,
                worker=worker,
                arguments=arguments,
                limits=self._limits,
                device=request.device,
                num_threads=request.num_threads or max(1, cores.get(rank.node.id, 1) // per_node),
                store=store,
                environment={},
            )
            self._answers[rank.actor.start.remote(order)] = number

    def _ask_nodes(self, function: str, *arguments: Any, doing: str | None = None) -> Mapping[str, Any]:
        limits = self._limits
        limit_s, setting = (limits.start_s, "start_timeout_s") if doing is None else (limits.call_s, "call_timeout_s")
        names = {rank.node.id: rank.node.name for rank in self._ranks}
        asked = {node: watcher.run.remote(function, arguments) for node, watcher in self._watchers.items()}
        what = doing or f"answer `{function}`"
        _wait_for_nodes({names[node]: answer for node, answer in asked.items()}, what, limit_s)
        answers = {names[node]: unpacked(wire) for node, wire in _what_comes(asked, _SLICE_S).items()}
        if silent := [name for name in names.values() if name not in answers]:
            limit = f"within {limit_s:g} s (backend.{setting})"
            raise RunFailedError(f"{', '.join(dict.fromkeys(silent))} did not {what} {limit}. Look at `ray status`.")
        for name, outcome in answers.items():
            if isinstance(outcome, Raised):
                first = next(number for number, rank in enumerate(self._ranks) if rank.node.name == name)
                raise error_of(self._identity(first), function, outcome)
        return {name: outcome.value for name, outcome in answers.items()}

    def _death(self, rank: _Rank, error: RayActorError) -> Died:
        if not rank.log:
            return Died(_how_it_died(error))
        node = rank.node.id
        said = _what_comes({node: self._watchers[node].last_words.remote(rank.log)}, _ANSWER_TIMEOUT_S)
        if node in said:
            return Died(_how_it_died(error), said[node])
        self._lost.add(node)
        return Died("was lost with its machine, which does not answer any more,")

    def _left(self) -> list[str]:
        """Ranks that are still there although they were killed. A lost machine cannot be asked, and has none."""
        asked: dict[str, Any] = {}
        for node, watcher in self._watchers.items():
            if node in self._lost:
                continue
            pids = [rank.pid for rank in self._ranks if rank.node.id == node and rank.pid]
            asked[node] = watcher.end.remote(pids, _END_TIMEOUT_S)
        left = _what_comes(asked, _END_TIMEOUT_S + _ANSWER_TIMEOUT_S)
        return [
            str(self._identity(number))
            for number, rank in enumerate(self._ranks)
            if rank.pid in left.get(rank.node.id, ())
        ]


def ranks_per_node(request: RankRequest, nodes: Sequence[Node]) -> int:
    """Ranks of each machine: as many as are asked for, else all where one machine has room, else as many as each has.

    Raises ConfigError for machines that are not equal, and for a number of ranks that does not fill them.
    """
    resource, per_rank = ("GPU", 1) if request.device == "cuda" else ("CPU", request.num_threads or 1)
    room = {node.name: int(node.has(resource) // per_rank) for node in nodes if node.has(resource) >= per_rank}
    # Where no machine has room, `_wait_for_room` says so.
    most = max(room.values(), default=request.count)
    per_node = min(request.count, request.per_node or most)
    if request.per_node is None and most < request.count and len(set(room.values())) > 1:
        each = ", ".join(f"{name} {count}" for name, count in room.items())
        raise ConfigError.at(
            "backend", f"has to spread {request.count} ranks over machines with room for {each}. Set ranks_per_node."
        )
    if request.count % per_node:
        raise ConfigError.at(
            "backend",
            f"has {request.count} ranks, which do not fill machines with {per_node} ranks each. Set ranks to a "
            f"multiple of {per_node}, or ranks_per_node to a divisor of {request.count}.",
        )
    return per_node


def _wait_for_nodes(asked: Mapping[str, Any], what: str, limit_s: float) -> None:
    """Until each machine has answered or the limit is over; says now and then who has not. what: a verb first."""
    began = told = time.monotonic()
    waiting = dict(asked)
    while waiting and (left := began + limit_s - time.monotonic()) > 0:
        # A slice at a time: an interruption is seen only in between.
        ready, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=min(_SLICE_S, left))
        waiting = {name: answer for name, answer in waiting.items() if answer not in ready}
        if waiting and time.monotonic() - told >= PATIENCE_S:
            told = time.monotonic()
            text = f"Waiting for {told - began:.0f} s, {limit_s:g} s at most, for {', '.join(waiting)} to {what}."
            print(text, file=sys.stderr, flush=True)


def _what_comes(asked: Mapping[Any, Any], limit_s: float) -> dict[Any, Any]:
    """key -> answer, of those that answer within the limit; dead ones do not."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
    answers: dict[Any, Any] = {}
    for key, answer in asked.items():
        if answer in ready:
            with suppress(RayError):
                answers[key] = ray.get(answer)
    return answers


def _how_it_died(error: RayActorError) -> str:
    """What Ray knows of it, as the predicate of a sentence."""
    text = str(error).strip()
    if (code := re.search(r"exit code (\d+)", text)) is not None:
        return f"ended with exit code {code[1]}"
    if "connection error code 2" in text:
        return "was killed by a signal, as the system does when memory runs out,"
    if "killed by `ray.kill`" in text:
        return "was killed"
    return f"was lost ({' '.join(text.split())})"
