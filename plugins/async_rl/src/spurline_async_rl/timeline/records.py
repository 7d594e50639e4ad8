"""Record what a run did at which time, as one line of JSON per step in RUN_DIR/timeline.jsonl.

Place on the way: recorder of a run -> these records -> figure, and `spurline simulate --from`.
Times are in seconds since the run began. After a kill and a resume the clock continues at the last kept line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from spurline.errors import RunDirectoryError
from spurline.trackers.jsonl import read_json_lines
from spurline_async_rl.scheduling.scheduler import State

TIMELINE_FILE = "timeline.jsonl"
"""The file's name inside the run directory."""

GroupState = Literal["buffered", "filtered", "quarantined", "skipped"]
SpanKind = Literal["wait", "train", "publish", "pause", "evaluate"]
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
STATE_NAMES: Mapping[State, GroupState] = {
    State.BUFFERED: "buffered",
    State.FILTERED: "filtered",
    State.GIVEN_UP: "quarantined",
    State.SKIPPED: "skipped",
}
"""How the file calls what a group ended as."""


@dataclass(frozen=True)
class GroupSpan:
    """One group from its admission to its last token or reward.

    version: of the weights it was admitted with. state: what became of it. tokens: generated in all its attempts.
    oldest, newest: versions of the weights its tokens came from; both are `version` for a group without tokens.
    """

    draw: int
    began: float
    ended: float
    version: int
    state: GroupState
    tokens: int
    oldest: int
    newest: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Span:
    """The loop waited for a batch, trained or evaluated; weights were published; engines stood still meanwhile."""

    kind: SpanKind
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Level:
    """The groups under way and the finished ones that wait to be trained on, from this time on."""

    at: float
    running: int
    buffered: int


@dataclass(frozen=True)
class Taken:
    """These groups became the batch of a 1-based step."""

    step: int
    at: float
    draws: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """Everything that ended since the line before. until: when this line was written."""

    step: int
    until: float
    groups: tuple[GroupSpan, ...] = ()
    spans: tuple[Span, ...] = ()
    levels: tuple[Level, ...] = ()
    taken: tuple[Taken, ...] = ()


def encode_record(record: StepRecord) -> bytes:
    """One compact line with its newline; times to the millisecond."""
    line = {field.name: _rounded(value) for field, value in zip(fields(record), astuple(record), strict=True)}
    return (json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n").encode()


def decode_record(line: Mapping[str, Any]) -> StepRecord:
    """Raises ValueError, TypeError or KeyError for a line that is not one of `encode_record`."""
    record = StepRecord(
        step=int(line["step"]),
        until=float(line["until"]),
        groups=tuple(GroupSpan(*fields) for fields in line["groups"]),
        spans=tuple(Span(*fields) for fields in line["spans"]),
        levels=tuple(Level(*fields) for fields in line["levels"]),
        taken=tuple(Taken(step, at, tuple(draws)) for step, at, draws in line["taken"]),
    )
    used = {group.state for group in record.groups} | {span.kind for span in record.spans}
    if unknown := used - {*GROUP_STATES, *SPAN_KINDS}:
        raise ValueError(f"unknown: {', '.join(sorted(map(str, unknown)))}")
    return record


def read_timeline(path: Path) -> list[StepRecord]:
    """All complete lines; a last line cut off by a kill is left out, a missing file has none.

    Raises RunDirectoryError naming file and line when any other line is unreadable.
    """
    records: list[StepRecord] = []
    for number, line in enumerate(read_json_lines(path), start=1):
        try:
            records.append(decode_record(line))
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"{path}:{number}: not a line of a timeline ({type(error).__name__}: {error}). Another version or "
                "program wrote it; remove the file to do without it."
            ) from error
    return records


def kept_lines(path: Path, last_step: int) -> tuple[bytes, float]:
    """The lines up to `last_step`, byte for byte, and the time the last of them ends at; nothing of a missing file.

    Ends before the first unreadable line: a power cut may leave one anywhere, and a picture's data is no reason to
    refuse a resume.
    """
    kept, until = b"", 0.0
    for raw in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            record = decode_record(json.loads(raw))
        except (KeyError, TypeError, ValueError):
            break
        if record.step > last_step or not raw.endswith(b"\n"):
            break
        kept, until = kept + raw, record.until
    return kept, until


def staleness_of(step: int, version: int) -> int:
    """Updates between weights of this version and the 1-based step that trains on what they generated."""
    return step - 1 - version


def trained_steps(records: Sequence[StepRecord]) -> dict[int, int]:
    """Step by draw, of all groups that were trained on."""
    return {draw: taken.step for record in records for taken in record.taken for draw in taken.draws}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value
