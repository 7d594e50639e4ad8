"""Note when an asynchronous run does what, and write it step by step.

Place on the way: the source's two threads, of training and generation -> Timeline -> RUN_DIR/timeline.jsonl.
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
    Span,
    SpanKind,
    StepRecord,
    Taken,
    encode_record,
    kept_lines,
)


class Timeline:
    """The recorder of one run. Every method may be called from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path = path
        self._clock = clock
        self._zero = clock()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[float, int]] = {}
        self._open: dict[SpanKind, float] = {}
        self._groups: list[GroupSpan] = []
        self._spans: list[Span] = []
        self._taken: list[Taken] = []

    def resume(self, step: int) -> None:
        """Go on after this step, or begin a run with 0. Later lines are dropped; the clock continues at the last one.

        Raises:
            RunFailedError: If the file cannot be written.
        """
        try:
            kept, until = kept_lines(self._path, step)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, kept.decode())
        except OSError as error:
            raise write_failure(self._path, error) from error
        with self._lock:
            self._zero = self._clock() - until

    def group_began(self, draw: int, version: int) -> None:
        """Note a group that was admitted with weights of this version."""
        with self._lock:
            assert draw not in self._running, f"group {draw} is under way already"
            self._running[draw] = (self._now(), version)

    def group_ended(self, draw: int, state: GroupState, *, tokens: int, oldest: int, newest: int) -> None:
        """Note the end of a group; arguments as the fields of `GroupSpan`."""
        with self._lock:
            began, version = self._running.pop(draw)
            self._groups.append(GroupSpan(draw, began, self._now(), version, state, tokens, oldest, newest))

    def began(self, kind: SpanKind) -> None:
        """Note the begin of a span. There is one of a kind at a time."""
        with self._lock:
            assert kind not in self._open, f"'{kind}' has begun already"
            self._open[kind] = self._now()

    def ended(self, kind: SpanKind) -> None:
        """Note the end of the span of this kind."""
        with self._lock:
            self._spans.append(Span(kind, self._open.pop(kind), self._now()))

    def taken(self, step: int, draws: Sequence[int]) -> None:
        """Note the groups that are the batch of this 1-based step."""
        with self._lock:
            self._taken.append(Taken(step, self._now(), tuple(draws)))

    def write(self, step: int) -> None:
        """Append everything that ended since the last call as the line of this step.

        Raises:
            RunFailedError: If the file cannot be written.
        """
        with self._lock:
            record = StepRecord(step, self._now(), tuple(self._groups), tuple(self._spans), tuple(self._taken))
            self._groups, self._spans, self._taken = [], [], []
        line = encode_record(record)
        try:
            handle = own_file(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
            try:
                # One call: a kill in the middle of it tears this line at most.
                written = os.write(handle, line)
            finally:
                os.close(handle)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted")
        except OSError as error:
            raise write_failure(self._path, error) from error

    def _now(self) -> float:
        return self._clock() - self._zero
