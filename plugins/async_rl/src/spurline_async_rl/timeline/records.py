"""Record the timeline of an asynchronous run, one line of JSON per step in RUN_DIR/timeline.jsonl.

The report panels and `spurline simulate --from` read this file. Times are in seconds since the run began. After a
resume, the clock continues from the time of the last line that was kept.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from spurline.errors import RunDirectoryError
from spurline.files import own_file, write_errors
from spurline.trackers.jsonl import cut_back, read_json_lines
from spurline_async_rl.scheduling.scheduler import State

TIMELINE_FILE = "timeline.jsonl"

GroupState = Literal["buffered", "filtered", "quarantined", "skipped", "given back"]
SpanKind = Literal["wait", "train", "publish", "evaluate"]
STATE_NAMES: Mapping[State, GroupState] = {
    State.BUFFERED: "buffered",
    State.FILTERED: "filtered",
    State.GIVEN_UP: "quarantined",
    State.SKIPPED: "skipped",
    State.PENDING: "given back",
}
"""The states in which a group ends, with their names in the file. A group that is given back begins again later."""


class GroupSpan(NamedTuple):
    """The time of one group, from its admission with weights of `version` to its last token or reward.

    `tokens` is the sum over all its attempts. `oldest` and `newest` are the oldest and the newest version of the
    weights that generated these tokens. In a group without tokens, both are the version that was published at its end.
    `engines` has the names of the engines that generated the tokens.
    """

    draw: int
    began: float
    ended: float
    version: int
    state: GroupState
    tokens: int
    oldest: int
    newest: int
    engines: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Span(NamedTuple):
    """A time in which the loop waited, trained, evaluated or published."""

    kind: SpanKind
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Taken(NamedTuple):
    """The groups in the batch of a 1-based step."""

    step: int
    at: float
    draws: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """Everything that ended since the last record. `until` is the time of writing."""

    step: int
    until: float
    groups: tuple[GroupSpan, ...] = ()
    spans: tuple[Span, ...] = ()
    taken: tuple[Taken, ...] = ()


_LINE = TypeAdapter(StepRecord)


def encode_record(record: StepRecord) -> bytes:
    """Return the record as one line of the file."""
    return _LINE.dump_json(record) + b"\n"


def read_timeline(path: Path) -> list[StepRecord]:
    """Return the records of all complete lines, or [] if the file is missing.

    Raises:
        RunDirectoryError: If a complete line is unreadable.
    """
    return [_record(path, number, line) for number, line in enumerate(read_json_lines(path), start=1)]


def _record(path: Path, number: int, line: Mapping[str, Any]) -> StepRecord:
    try:
        return _LINE.validate_python(line)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunDirectoryError(
            f"{path}:{number}: not a line of a timeline ({first['loc']}: {first['msg']}). Another version or program "
            "wrote it. Remove the file if you do not need it."
        ) from error


def staleness_of(step: int, version: int) -> int:
    """Return the age of tokens of this version in a 1-based step."""
    return step - 1 - version


def trained_steps(records: Sequence[StepRecord]) -> dict[int, int]:
    """Return the step that trained each trained group, by draw."""
    return {draw: taken.step for record in records for taken in record.taken for draw in taken.draws}


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
        """Continue after this step; step 0 begins a run. Lines of later steps are removed from the file.

        Raises:
            RunDirectoryError: If the line of an earlier step is unreadable.
            RunFailedError: If the file cannot be written.
        """
        cut_back(self._path, step)
        lines = read_json_lines(self._path)
        with self._lock:
            self._zero = self._clock() - (_record(self._path, len(lines), lines[-1]).until if lines else 0.0)

    def group_began(self, draw: int, version: int) -> None:
        """Note the admission of a group with weights of this version."""
        with self._lock:
            assert draw not in self._running, f"group {draw} is under way already"
            self._running[draw] = (self._now(), version)

    def group_ended(
        self, draw: int, state: GroupState, *, tokens: int, oldest: int, newest: int, engines: tuple[str, ...] = ()
    ) -> None:
        """Note the end of a group; see `GroupSpan` for the arguments."""
        with self._lock:
            began, version = self._running.pop(draw)
            self._groups.append(GroupSpan(draw, began, self._now(), version, state, tokens, oldest, newest, engines))

    def began(self, kind: SpanKind) -> None:
        """Note the beginning of a span. Spans of one kind do not overlap."""
        with self._lock:
            assert kind not in self._open, f"'{kind}' has begun already"
            self._open[kind] = self._now()

    def ended(self, kind: SpanKind) -> None:
        with self._lock:
            self._spans.append(Span(kind, self._open.pop(kind), self._now()))

    def taken(self, step: int, draws: Sequence[int]) -> None:
        """Note the groups in the batch of this step."""
        with self._lock:
            self._taken.append(Taken(step, self._now(), tuple(draws)))

    def write(self, step: int) -> None:
        """Append everything that ended since the last call as the line of this step, which survives a power cut.

        Raises:
            RunFailedError: If the file cannot be written.
        """
        with self._lock:
            record = StepRecord(step, self._now(), tuple(self._groups), tuple(self._spans), tuple(self._taken))
            self._groups, self._spans, self._taken = [], [], []
        line = encode_record(record)
        # The line is written by a single call, so a kill can damage only this line.
        with write_errors(self._path), open(self._path, "ab", buffering=0, opener=own_file) as file:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)

    def _now(self) -> float:
        return round(self._clock() - self._zero, 3)
