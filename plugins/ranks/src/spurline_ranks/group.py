"""Start ranks (processes that compute together), call a method on all of them, and end them.

A `RankGroup` talks to its ranks through `RankProcesses`, which runs them on this machine or on a cluster.
"""

from __future__ import annotations

import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from spurline.errors import RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_models.machine import check_ray
from spurline_ranks.devices import LOOPBACK
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, Value, error_of, first_cause, packed, read_outcome

START = "start"
"""Name of the start in messages. During the start, the ranks join each other and make their workers."""
PATIENCE_S = 60.0
"""Seconds between two lines that are printed during a wait. A line names the ranks that have not answered."""
_GRACE_S = 0.3
"""Seconds to wait, after a rank has failed, for another rank to report the cause."""


@dataclass(frozen=True)
class ClusterRequest:
    """The Ray cluster of a run.

    Attributes:
        address: `auto`, or host and port of the cluster's head.
        env_vars: Environment variables of all processes that the run places on the cluster.
        room_timeout_s: Seconds to wait for free resources.
        log_dir: A folder that all machines see, for logs. If None, only errors show what ranks wrote.
    """

    address: str = "auto"
    env_vars: Mapping[str, str] = field(default_factory=dict[str, str])
    room_timeout_s: float = 180.0
    log_dir: str | None = None


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

    @classmethod
    def of_ranks(cls, request: RankRequest) -> ClusterNeed | None:
        """Return the resources that the ranks of a backend need, or None if they are not launched by Ray."""
        if request.launch != "ray":
            return None
        gpus, cpus = int(request.device == "cuda"), request.num_threads or 1
        return cls("ranks", request.count, gpus, cpus, together=True, per_machine=request.per_node)


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that the start of all ranks, one call, and one exchange between ranks may take."""

    start_s: float = 600.0
    call_s: float = 3600.0
    collective_s: float = 600.0


@dataclass(frozen=True)
class Place:
    """The position of a rank among all ranks.

    Attributes:
        rank: The rank's number.
        world: The number of ranks.
        local_rank: The rank's number on its machine.
        node: The machine's name.
        doing: A function that records the rank's current work as text, such as `micro-batch 5 of 8`. Messages about
            long waits show the text.
    """

    rank: int
    world: int
    local_rank: int
    node: str
    doing: Callable[[str], None]


@dataclass(frozen=True)
class MachineOrder:
    """Everything that a machine needs to start its ranks.

    Attributes:
        request: The request for all ranks.
        ranks: The numbers of this machine's ranks.
        node: The name of this machine in messages.
        worker: `module:Class` of the worker. The class takes a `Place` and then the `arguments`.
        store: Host and port of the store that the ranks use to find each other.
        log_dir: A folder for the logs of the ranks. If None, only the end of a log is shown, in errors.
    """

    request: RankRequest
    ranks: range
    node: str
    worker: str
    arguments: tuple[Any, ...]
    limits: TimeLimits
    store: tuple[str, int]
    log_dir: str | None = None


@dataclass(frozen=True)
class Work:
    """The current work of a rank as text, and the seconds since it began."""

    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.text}, for {self.seconds:.0f} s"


def open_ranks(
    request: RankRequest,
    worker: str,
    arguments: tuple[Any, ...],
    limits: TimeLimits,
    cluster: ClusterRequest | None = None,
) -> RankGroup:
    """Start ranks. This function returns when the ranks have joined each other and made their workers.

    Args:
        request: The number of ranks, their devices, and where to start them.
        worker: `module:Class` of the worker. Every rank makes a worker after it has joined torch's default group.
            Methods are called one at a time, in the same order on all ranks. The module must import everything that
            is slow to import, and must not touch a GPU.
        arguments: Plain data that the class takes after its `Place`.
        limits: Time limits of the start, of calls and of exchanges.
        cluster: The cluster for `launch: ray`. If None, Ray chooses it.

    Raises:
        SpurlineError: If a rank raises it while it starts.
        ConfigError: If this machine cannot meet the request.
    """
    if request.launch == "ray":
        check_ray()
        from spurline_ranks.ray_ranks import RayRanks

        return RankGroup(RayRanks(request, worker, arguments, limits, cluster or ClusterRequest()), limits)
    from spurline_ranks.processes import LocalRanks
    from spurline_ranks.store import open_store

    store = open_store(LOOPBACK)
    address, ranks = (LOOPBACK, store.port), range(request.count)
    order = MachineOrder(request, ranks, platform.node(), worker, arguments, limits, address)
    return RankGroup(LocalRanks(order, store), limits)


class RankProcesses(Protocol):
    """The processes of ranks."""

    @property
    def identities(self) -> Mapping[int, Identity]: ...

    def send(self, method: str, common: bytes, own: Mapping[int, bytes]) -> None:
        """Send a call to all ranks without waiting. `common` and `own` of each rank are packed tuples of arguments."""
        ...

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        """Return the next packed outcome or death of a rank, or {} if there is none within `timeout_s`."""
        ...

    def work(self, ranks: Sequence[int]) -> Mapping[int, Work]:
        """Return the work of these ranks. Ranks of machines that do not answer soon are left out."""
        ...

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the stacks of each rank's threads, or the reason why there are none."""
        ...

    def gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        """Ask the machines which of these ranks have died before they answered."""
        ...

    def end(self) -> None:
        """Kill all ranks and wait for their end. Another thread may wait meanwhile. A second call has no effect."""
        ...

    def close(self) -> None:
        """Release connections after the last call. A second call has no effect."""
        ...


class RankGroup:
    """Ranks that are called one method at a time. If a call fails or is interrupted, all ranks are ended."""

    def __init__(self, processes: RankProcesses, limits: TimeLimits) -> None:
        self.size = len(processes.identities)
        self._processes, self._identities, self._limits = processes, processes.identities, limits
        self._lock = threading.Lock()
        self._ended: str | None = None
        try:
            with self._lock:
                self._collect(START, limits.start_s, time.monotonic())
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *common: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of the worker on all ranks, and wait for all answers. Any thread may call this.

        Args:
            method: The name of the worker's method, or of a method of its attribute, such as `publishing.make`.
            common: Arguments for all ranks: plain data and numpy arrays. Answers consist of the same types.
            per_rank: The first argument of each rank. The common arguments follow it.

        Returns:
            The answers by rank.

        Raises:
            SpurlineError: If a rank raises it. A note names rank, node, process and call.
            RankFailedError: If a rank raises another error, dies, or does not answer within the limit.
        """
        assert per_rank is None or len(per_rank) == self.size, (method, self.size)
        with self._lock:
            if self._ended is not None:
                raise RunFailedError(f"No rank is left to do `{method}`: {self._ended}")
            began = time.monotonic()
            try:
                own = [() if per_rank is None else (per_rank[rank],) for rank in range(self.size)]
                self._processes.send(method, packed(common), dict(enumerate(map(packed, own))))
                return self._collect(method, self._limits.call_s, began)
            except BaseException as error:
                # End all ranks, since late answers would be mistaken for answers to the next call.
                self._ended = self._ended or f"{type(error).__name__}: {error}".partition("\n")[0]
                self._processes.end()
                raise

    def close(self) -> None:
        """Kill all ranks, and wait until they have ended. A second call has no effect."""
        # A thread in `call` holds the lock. It wakes up when the ranks have ended.
        self._ended = self._ended or "the ranks were closed."
        self._processes.end()
        with self._lock:
            self._processes.close()

    def _collect(self, call: str, limit_s: float, began: float) -> list[Any]:
        told = began
        values: dict[int, Any] = {}
        while missing := [rank for rank in range(self.size) if rank not in values]:
            until = min(began + limit_s, told + PATIENCE_S)
            outcomes = self._wait(until)
            if failures := _failures(outcomes):
                self._fail(call, failures, [rank for rank in missing if rank not in outcomes], began)
            values |= {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, Value)}
            if not outcomes:
                told = time.monotonic()
                if told - began >= limit_s:
                    self._give_up(call, missing, limit_s)
                limit = f"limit {_setting(call)}: {limit_s:g} s"
                who = self._who_is_missing(missing, self._processes.work(missing))
                print(f"Waiting for `{call}` for {told - began:.0f} s ({limit}). {who}", file=sys.stderr, flush=True)
        return [values[rank] for rank in range(self.size)]

    def _wait(self, until: float) -> dict[int, Outcome]:
        """Return the next outcome, or {} if there is none until this monotonic time."""
        told = self._processes.wait(max(0.0, until - time.monotonic()))
        return {rank: read_outcome(said) for rank, said in told.items()}

    def _fail(self, call: str, failures: dict[int, Raised | Died], others: list[int], began: float) -> None:
        until = time.monotonic() + _GRACE_S
        while others and all(map(_may_follow_from_another, failures.values())):
            more = self._wait(until)
            # When a rank dies, an exchange with it may fail in other ranks long before the death is noticed.
            found = _failures(more) if more else self._processes.gone(others)
            # If a rank reports a failure and then dies, the report says more.
            failures |= {rank: failure for rank, failure in found.items() if rank not in failures}
            others = [rank for rank in others if rank not in failures and rank not in more]
            if not more:
                break
        if self._ended is not None:
            raise RunFailedError(f"`{call}` has no answer: {self._ended}")
        who, failure = first_cause([(self._identities[rank], failure) for rank, failure in failures.items()])
        error = error_of(who, call, failure)
        # A rank that fails this late has probably waited for another rank until the exchange timed out.
        if others and time.monotonic() - began >= self._limits.collective_s:
            error.add_note(self._where_they_stand(others, self._processes.work(others)))
        raise error

    def _give_up(self, call: str, missing: Sequence[int], limit_s: float) -> None:
        works = self._processes.work(missing)
        # The other ranks probably wait for the rank that has been at the same work for longest.
        slowest = max(missing, key=lambda rank: works[rank].seconds if rank in works else math.inf)
        where = self._where_they_stand(missing, works)
        text = f"`{call}` was not done within {limit_s:g} s, the limit in {_setting(call)}. {where}"
        raise self._identities[slowest].failed(text, call)

    def _where_they_stand(self, missing: Sequence[int], works: Mapping[int, Work]) -> str:
        """Return a text with the work and the stacks of missing ranks."""
        stacks = self._processes.stacks(missing)
        shown = [f"Stack of rank {rank}:\n{_of_worker(stack)}" for rank, stack in stacks.items()]
        return "\n".join([self._who_is_missing(missing, works), *shown])

    def _who_is_missing(self, missing: Sequence[int], works: Mapping[int, Work]) -> str:
        lines = [f"  {self._identities[rank]}: {works.get(rank, 'its machine does not answer')}" for rank in missing]
        return "\n".join([f"{len(missing)} of {self.size} ranks have not answered:", *lines])


def _setting(call: str) -> str:
    """Return the setting with the limit of a call."""
    return "backend.start_timeout_s" if call == START else "backend.call_timeout_s"


def _failures(outcomes: Mapping[int, Outcome]) -> dict[int, Raised | Died]:
    return {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, Value)}


def _may_follow_from_another(failure: Raised | Died) -> bool:
    """Return whether the failure may be a consequence of another rank's failure, such as a broken exchange."""
    return isinstance(failure, Raised) and failure.error is None


def _of_worker(stack: str) -> str:
    """Return the stacks, without the thread that receives calls and the frames that only call the worker."""
    threads = [thread for thread in stack.split("\n\n") if " in _listen" not in thread]
    lines: list[str] = []
    for thread in threads:
        frames = thread.splitlines()
        below = next((index for index, frame in enumerate(frames) if "ranks/rank_main.py" in frame), len(frames))
        lines += frames[:below]
    return "\n".join(lines)
