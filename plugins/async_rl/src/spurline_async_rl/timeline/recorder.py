"""Keep what an asynchronous run does when, and write it step by step.

Place on the way: the source's two threads (training and generation) -> Timeline -> RUN_DIR/timeline.jsonl. It observes
and decides nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spurline.files import own_file, write_failure, write_text
from spurline_async_rl.timeline.records import (
    GroupSpan,
    GroupState,
    Level,
    Span,
    SpanKind,
    StepRecord,
    Taken,
    encode_record,
    kept_lines,
)

_LEVELS_PER_STEP = 240
"""More of them say nothing more in a picture, and would make up most of the file."""


class Timeline:
    """Every method may be called from any thread.

    path: the file to write; None keeps nothing but what `write` returns. clock: seconds, from any zero.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path = path
        self._clock = clock
        self._zero = clock()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[float, int]] = {}
        self._open: dict[SpanKind, float] = {}
        self._groups: list[GroupSpan] = []
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._taken: list[Taken] = []

    def resume(self, step: int) -> None:
        """The run goes on after this step: drop later lines, and go on with the clock where the last kept one ended.

        With 0 the run begins, and what another one left is dropped. Raises RunFailedError when the file cannot be
        written.
        """
        kept, until = b"", 0.0
        if self._path is not None:
            try:
                kept, until = kept_lines(self._path, step)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._path, kept.decode())
            except OSError as error:
                raise write_failure(self._path, error) from error
        with self._lock:
            self._zero = self._clock() - until

    def group_began(self, draw: int, version: int) -> None:
        """A group was admitted with weights of this version."""
        with self._lock:
            assert draw not in self._running, f"group {draw} is under way already"
            self._running[draw] = (self._now(), version)

    def group_ended(self, draw: int, state: GroupState, *, tokens: int, oldest: int, newest: int) -> None:
        """A group is finished or given up. Fields as of GroupSpan."""
        with self._lock:
            began, version = self._running.pop(draw)
            self._groups.append(GroupSpan(draw, began, self._now(), version, state, tokens, oldest, newest))

    def began(self, kind: SpanKind) -> None:
        """A span begins; one of a kind at a time."""
        with self._lock:
            assert kind not in self._open, f"'{kind}' has begun already"
            self._open[kind] = self._now()

    def ended(self, kind: SpanKind) -> None:
        """The span of this kind ends."""
        with self._lock:
            self._spans.append(Span(kind, self._open.pop(kind), self._now()))

    def level(self, running: int, buffered: int) -> None:
        """How many groups are under way and how many are finished and untrained, from now on."""
        with self._lock:
            self._levels.append(Level(self._now(), running, buffered))

    def taken(self, step: int, draws: Sequence[int]) -> None:
        """These groups are the batch of this 1-based step."""
        with self._lock:
            self._taken.append(Taken(step, self._now(), tuple(draws)))

    def write(self, step: int) -> StepRecord:
        """Append what ended since the last call as the line of this step, and return it.

        Raises RunFailedError when the disk is full. What is still going on comes in the line of the step it ends in.
        """
        with self._lock:
            groups, spans, levels, taken = self._groups, self._spans, _thinned(self._levels), self._taken
            record = StepRecord(step, self._now(), tuple(groups), tuple(spans), tuple(levels), tuple(taken))
            self._groups, self._spans, self._levels, self._taken = [], [], [], []
        if self._path is not None:
            _append(self._path, encode_record(record))
        return record

    def _now(self) -> float:
        return self._clock() - self._zero


def _append(path: Path, line: bytes) -> None:
    """One write call: a kill in the middle of it tears this line at most."""
    try:
        handle = own_file(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        try:
            written = os.write(handle, line)
        finally:
            os.close(handle)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes fitted")
    except OSError as error:
        raise write_failure(path, error) from error


def _thinned(levels: Sequence[Level]) -> list[Level]:
    """Evenly chosen ones, the last among them."""
    stride = -(-len(levels) // _LEVELS_PER_STEP) or 1
    return list(levels[::-1][::stride][::-1])
