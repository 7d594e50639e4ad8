"""Run the ranks of one machine as child processes, and exchange messages with them.

The controller of a local run holds one `LocalRanks`. On a Ray cluster, each machine has one in its `MachineActor`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from spurline_concurrency.child import ChildProcess
from spurline_ranks.devices import local_environments
from spurline_ranks.group import MachineOrder, Work
from spurline_ranks.logs import of_last_process, stacks_of
from spurline_ranks.outcomes import Died, Identity, packed

STACKS_TIMEOUT_S = 10.0
"""Seconds that a rank has to write its stacks."""


class LocalRanks:
    """The `RankProcesses` of one machine.

    Args:
        order: The ranks to start.
        store: The store where the ranks find each other, if this process hosts the store. It is kept until `close`.
    """

    def __init__(self, order: MachineOrder, store: object = None) -> None:
        self._store = store
        self._outcomes: SimpleQueue[tuple[int, bytes | Died]] = SimpleQueue()
        self._ranks: dict[int, _Rank] = {}
        environments = local_environments(replace(order.request, count=len(order.ranks)))
        try:
            for rank, environment in zip(order.ranks, environments, strict=True):
                self._ranks[rank] = _Rank(order, rank, environment, self._outcomes)
        except BaseException:
            self.end()
            raise
        world = order.request.count
        self.identities: Mapping[int, Identity] = {
            number: Identity(number, world, order.node, rank.process.pid) for number, rank in self._ranks.items()
        }

    def send(self, method: str, common: bytes, own: Mapping[int, bytes]) -> None:
        for number, rank in self._ranks.items():
            rank.has_answered = False
            rank.process.send({"method": method, "common": common, "own": own[number]})

    def wait(self, timeout_s: float | None = None) -> Mapping[int, bytes | Died]:
        try:
            return dict([self._outcomes.get(timeout=timeout_s)])
        except Empty:
            return {}

    def work(self, ranks: Sequence[int]) -> Mapping[int, Work]:
        return {rank: self._ranks[rank].work() for rank in ranks}

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        pids = [self._ranks[rank].process.pid for rank in ranks]
        with ThreadPoolExecutor(len(pids)) as pool:
            return dict(zip(ranks, pool.map(lambda pid: stacks_of(pid, STACKS_TIMEOUT_S), pids), strict=True))

    def gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        deaths = {rank: self._ranks[rank].death for rank in ranks if not self._ranks[rank].has_answered}
        return {rank: death for rank, death in deaths.items() if death is not None}

    def end(self) -> None:
        for rank in self._ranks.values():
            rank.process.kill()
        for rank in self._ranks.values():
            rank.process.end()

    def close(self) -> None:
        self._store = None


class _Rank:
    """The process of one rank, with its last messages."""

    def __init__(
        self, order: MachineOrder, rank: int, environment: Mapping[str, str], outcomes: SimpleQueue[Any]
    ) -> None:
        self.has_answered = False
        """Whether the rank has sent the outcome of the last call."""
        self.death: Died | None = None
        self._rank, self._outcomes = rank, outcomes
        self._work, self._since = "starting", time.monotonic()
        log = None
        if order.log_dir is not None:
            log = Path(order.log_dir, f"rank-{rank}.log")
            log.parent.mkdir(parents=True, exist_ok=True)
        self.process = ChildProcess(
            "spurline_ranks.rank_main",
            [order.worker],
            take=self._take,
            on_end=self._note_end,
            log=log,
            environment=environment,
        )
        self.process.send({"order": packed((order, rank))})

    def work(self) -> Work:
        return Work(self._work, time.monotonic() - self._since)

    def _take(self, messages: list[Any]) -> None:
        for message in messages:
            if "work" in message:
                self._work, self._since = message["work"], time.monotonic()
            else:
                self.has_answered = True
                self._outcomes.put((self._rank, message["outcome"]))

    def _note_end(self, child: ChildProcess) -> None:
        self.death = Died(_how_it_died(child), str(self.work()), of_last_process(child.last_words()))
        self._outcomes.put((self._rank, self.death))


def _how_it_died(child: ChildProcess) -> str:
    how = child.how_it_ended
    if how == "killed by SIGKILL":
        how += ", as the system does when memory runs out,"
    return f"was {how}" if how.startswith("killed") else f"ended ({how})"
