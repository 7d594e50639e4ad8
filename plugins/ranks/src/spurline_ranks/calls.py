"""Call a method on all ranks and wait for their answers: limits, what a long wait says, and how a failure ends it.

`RankCalls` is the half of a `RankGroup` that does not depend on how its processes were started.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from spurline.errors import RankFailedError, RunFailedError
from spurline_ranks.group import TimeLimits
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, Value, at_beginning, error_of, first_cause

START = "start"
"""What the first call is named in texts: processes come up, join each other and make their workers."""
PATIENCE_S = 60.0
"""Seconds without an answer after which a line says who is missing, and again each time."""


class RankCalls(ABC):
    """Ranks, and calls that take turns. Raises out of a call end all ranks first, whatever it is."""

    _grace_s: ClassVar[float] = 0.3
    """Seconds that a failure of one rank waits for the failure that caused it."""

    def __init__(self, size: int, limits: TimeLimits) -> None:
        self.size = size
        self._limits = limits
        self._lock = threading.Lock()
        self._ended: str | None = None

    @abstractmethod
    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        """Ask all ranks, without waiting for an answer, and within the limit of a call."""

    @abstractmethod
    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        """What came from those that are missing, in the order in which it came; empty when the time is over."""

    @abstractmethod
    def _identity(self, rank: int) -> Identity: ...

    @abstractmethod
    def _doing(self, missing: Sequence[int]) -> Mapping[int, str]:
        """What each says that it does, and since when; in few seconds, without those that do not say it."""

    @abstractmethod
    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        """The stack of every thread of each, or why it has written none; in few seconds."""

    def _gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        """Those of them that are gone although nobody has told so yet, found by asking their machines; in few seconds,
        and at once where all are there."""
        return {}

    @abstractmethod
    def _end(self) -> None:
        """Kill all ranks and wait until none is left. May be called again, and while another thread is in a call."""

    @abstractmethod
    def _release(self) -> None:
        """After the last call: close what was open for the ranks. May be called again."""

    def call(self, method: str, *common: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        assert per_rank is None or len(per_rank) == self.size, (method, self.size)
        with self._lock:
            if self._ended is not None:
                raise RunFailedError(f"No rank is left to do `{method}`: {self._ended}")
            began = time.monotonic()
            try:
                self._send(method, common, per_rank)
                return self._collect(method, self._limits.call_s, began)
            except BaseException as error:
                # An interruption too: the answers that are still under way would be taken for those of the next call.
                self._ended = self._ended or f"{type(error).__name__}: {error}".partition("\n")[0]
                self._end()
                raise

    def close(self) -> None:
        # Not under the lock: whoever waits for an answer is woken by the end of the ranks.
        self._ended = self._ended or "the ranks were closed."
        self._end()
        with self._lock:
            self._release()

    def _start(self) -> None:
        """The first call, for the constructor: wait until all are ready."""
        try:
            with self._lock:
                self._collect(START, self._limits.start_s, time.monotonic())
        except BaseException:
            self.close()
            raise

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
        while all(isinstance(failure, Raised) and not failure.classes for failure in failures.values()):
            others = [rank for rank in missing if rank not in failures]
            more = self._wait(others, max(0.0, until - time.monotonic())) if others else {}
            if not more:
                # Ranks in an exchange with one that is gone may say so long before its death is told.
                failures |= self._gone(others) if others else {}
                break
            missing = [rank for rank in missing if rank not in more]
            failures |= _failures(more)
        if self._ended is not None:
            raise RunFailedError(f"`{call}` has no answer: {self._ended}")
        who, failure = first_cause([(self._identity(rank), failure) for rank, failure in failures.items()])
        error = error_of(who, call, failure)
        others = [rank for rank in missing if rank not in failures]
        # Who fails so late has probably waited for one that stands still, until the exchange between them gave up.
        if others and (waited_s := time.monotonic() - began) >= self._limits.collective_s:
            where, silent = self._where_they_stand(others)
            if silent is not None and isinstance(failure, Raised) and not failure.classes:
                culprit = self._identity(silent)
                limit = f"limit backend.collective_timeout_s: {self._limits.collective_s:g} s"
                text = (
                    f"{at_beginning(culprit)} has not answered `{call}` for {waited_s:.0f} s, and does not say what it "
                    f"does; an exchange failed meanwhile ({limit}). {where}\n{error}"
                )
                error = RankFailedError(text, culprit.rank, culprit.node, culprit.pid, call, failure.traceback)
            else:
                error.add_note(where)
        raise error

    def _give_up(self, call: str, missing: Sequence[int], limit_s: float) -> None:
        where, silent = self._where_they_stand(missing)
        who = self._identity(missing[0] if silent is None else silent)
        text = f"`{call}` was not done within {limit_s:g} s, its limit by {_setting(call)}. {where}"
        raise RankFailedError(text, who.rank, who.node, who.pid, call)

    def _where_they_stand(self, missing: Sequence[int]) -> tuple[str, int | None]:
        """What each does, with its stack, in words; and the first that does not say it."""
        doing = self._doing(missing)
        stacks = [f"Stack of rank {rank}:\n{_of_worker(stack)}" for rank, stack in self._stacks(missing).items()]
        silent = next((rank for rank in missing if rank not in doing), None)
        return "\n".join([self._who_is_missing(missing, doing), *stacks]), silent

    def _who_is_missing(self, missing: Sequence[int], doing: Mapping[int, str]) -> str:
        lines = [f"  {self._identity(rank)}: {doing.get(rank, 'does not say what it does')}" for rank in missing]
        return "\n".join([f"{len(missing)} of {self.size} ranks have not answered:", *lines])


def _setting(call: str) -> str:
    """The setting with the limit of a call."""
    return "backend.start_timeout_s" if call == START else "backend.call_timeout_s"


def _failures(outcomes: Mapping[int, Outcome]) -> dict[int, Raised | Died]:
    return {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, Value)}


def _of_worker(stack: str) -> str:
    """What `faulthandler` wrote, without the thread that takes calls, and without what is below the worker."""
    threads = [thread for thread in stack.split("\n\n") if " in _listen" not in thread]
    lines: list[str] = []
    for thread in threads:
        frames = thread.splitlines()
        below = next((index for index, frame in enumerate(frames) if "ranks/rank_main.py" in frame), len(frames))
        lines += frames[:below]
    return "\n".join(lines)
