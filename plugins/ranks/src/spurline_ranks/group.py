"""Start ranks (processes that compute together), call a method on all of them, and end them.

The subclasses of `RankGroup` start the processes on this machine or on a cluster, and exchange messages with them.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spurline.errors import RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_models.machine import check_ray
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, Value, error_of, first_cause

START = "start"
"""Name of the start in messages. During the start, the ranks join each other and make their workers."""
PATIENCE_S = 60.0
"""Seconds between two lines that are printed during a wait. A line names the ranks that have not answered."""


@dataclass(frozen=True)
class ClusterRequest:
    """The Ray cluster of a run.

    Attributes:
        address: `auto`, or host and port of the cluster's head.
        env_vars: Environment variables of all processes that the run places on the cluster.
        room_timeout_s: Seconds to wait for free resources.
        log_dir: A folder that all machines see, for the logs of the processes. If None, logs stay in Ray's folders.
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
        from spurline_ranks.ray_actors import RayRanks

        return RayRanks(request, worker, arguments, limits, cluster or ClusterRequest())
    from spurline_ranks.processes import LocalRanks

    return LocalRanks(request, worker, arguments, limits)


class RankGroup(ABC):
    """Ranks that are called one method at a time. If a call fails or is interrupted, all ranks are ended."""

    _grace_s: ClassVar[float] = 0.3
    """Seconds to wait, after a rank has failed, for another rank to report the cause."""

    def __init__(self, size: int, limits: TimeLimits) -> None:
        self.size = size
        self._limits = limits
        self._lock = threading.Lock()
        self._ended: str | None = None

    @abstractmethod
    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        """Send a call to all ranks without waiting for answers."""

    @abstractmethod
    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        """Return the first outcomes of these ranks that arrive, or {} if none arrives within `timeout_s`."""

    @abstractmethod
    def _identity(self, rank: int) -> Identity: ...

    @abstractmethod
    def _doing(self, missing: Sequence[int]) -> Mapping[int, str]:
        """Ask each rank for its current work, and since when it does it. Ranks that do not answer soon are left out."""

    @abstractmethod
    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        """Return the stacks of each rank's threads, or the reason why there are none."""

    def _gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        """Ask the machines which of these ranks have died. The ranks have not sent an outcome yet."""
        return {}

    @abstractmethod
    def _end(self) -> None:
        """Kill all ranks and wait for their end. It may be called again, and while another thread waits in `call`."""

    @abstractmethod
    def _release(self) -> None:
        """Close files and connections after the last call. It may be called again."""

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
                self._send(method, common, per_rank)
                return self._collect(method, self._limits.call_s, began)
            except BaseException as error:
                # End all ranks, since late answers would be mistaken for answers to the next call.
                self._ended = self._ended or f"{type(error).__name__}: {error}".partition("\n")[0]
                self._end()
                raise

    def close(self) -> None:
        """Kill all ranks, and wait until they have ended. It may be called again."""
        # A thread in `call` holds the lock. It wakes up when the ranks have ended.
        self._ended = self._ended or "the ranks were closed."
        self._end()
        with self._lock:
            self._release()

    def _start(self) -> list[Any]:
        """Return the answers of all ranks to the start. Constructors of subclasses call this, and close on errors."""
        with self._lock:
            return self._collect(START, self._limits.start_s, time.monotonic())

    def _collect(self, call: str, limit_s: float, began: float) -> list[Any]:
        told = began
        values: dict[int, Any] = {}
        while missing := [rank for rank in range(self.size) if rank not in values]:
            until = min(began + limit_s, told + PATIENCE_S)
            outcomes = self._wait(missing, max(0.0, until - time.monotonic()))
            if failures := _failures(outcomes):
                self._fail(call, failures, [rank for rank in missing if rank not in outcomes], began)
            values |= {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, Value)}
            if not outcomes:
                told = time.monotonic()
                if told - began >= limit_s:
                    self._give_up(call, missing, limit_s)
                limit = f"limit {_setting(call)}: {limit_s:g} s"
                who = self._who_is_missing(missing, self._doing(missing))
                print(f"Waiting for `{call}` for {told - began:.0f} s ({limit}). {who}", file=sys.stderr, flush=True)
        return [values[rank] for rank in range(self.size)]

    def _fail(self, call: str, failures: dict[int, Raised | Died], missing: Sequence[int], began: float) -> None:
        until = time.monotonic() + self._grace_s
        others = [rank for rank in missing if rank not in failures]
        while others and all(map(_may_follow_from_another, failures.values())):
            more = self._wait(others, max(0.0, until - time.monotonic()))
            # When a rank dies, an exchange with it may fail in other ranks long before the death is noticed.
            failures |= _failures(more) if more else self._gone(others)
            others = [rank for rank in others if rank not in failures and rank not in more]
            if not more:
                break
        if self._ended is not None:
            raise RunFailedError(f"`{call}` has no answer: {self._ended}")
        who, failure = first_cause([(self._identity(rank), failure) for rank, failure in failures.items()])
        error = error_of(who, call, failure)
        # A rank that fails this late has probably waited for another rank until the exchange timed out.
        if others and time.monotonic() - began >= self._limits.collective_s:
            error.add_note(self._where_they_stand(others)[0])
        raise error

    def _give_up(self, call: str, missing: Sequence[int], limit_s: float) -> None:
        where, silent = self._where_they_stand(missing)
        who = self._identity(missing[0] if silent is None else silent)
        raise who.failed(f"`{call}` was not done within {limit_s:g} s, the limit in {_setting(call)}. {where}", call)

    def _where_they_stand(self, missing: Sequence[int]) -> tuple[str, int | None]:
        """Return a text with the work and the stacks of missing ranks, and the first rank that reports no work."""
        doing = self._doing(missing)
        stacks = [f"Stack of rank {rank}:\n{_of_worker(stack)}" for rank, stack in self._stacks(missing).items()]
        silent = next((rank for rank in missing if rank not in doing), None)
        return "\n".join([self._who_is_missing(missing, doing), *stacks]), silent

    def _who_is_missing(self, missing: Sequence[int], doing: Mapping[int, str]) -> str:
        lines = [f"  {self._identity(rank)}: {doing.get(rank, 'does not say what it does')}" for rank in missing]
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
    """Return the stacks without the thread that receives calls, and without the frames that call the worker."""
    threads = [thread for thread in stack.split("\n\n") if " in _listen" not in thread]
    lines: list[str] = []
    for thread in threads:
        frames = thread.splitlines()
        below = next((index for index, frame in enumerate(frames) if "ranks/rank_main.py" in frame), len(frames))
        lines += frames[:below]
    return "\n".join(lines)
