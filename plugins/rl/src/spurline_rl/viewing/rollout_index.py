"""Search the rollouts of a run: a table of all attempts without their tokens, filtered by pyarrow.

A step's file is read once, and again only when an attempt is looked at. `update` finds what a live run adds; a step
that a resumed run made again takes the place of the one before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute

from spurline.errors import RunDirectoryError
from spurline_rl.kept_rollouts.files import read_step, step_files
from spurline_rl.kept_rollouts.reader import KeptAttempt, KeptRollouts, LostPrompt
from spurline_rl.kept_rollouts.table import SEARCHED

pc: Any = pyarrow.compute
"""Its functions are made when it is imported, which a type checker cannot see."""
SortKey = Literal["step", "reward", "tokens", "max_age", "max_gap"]

_PREVIEW = 200
"""Characters of a prompt and of a response that a list shows."""
_MOST_GIVEN_UP = 200
"""Prompts given up that an answer holds."""
_BOUNDS = {
    "min_step": ("step", pc.greater_equal),
    "max_step": ("step", pc.less_equal),
    "min_reward": ("reward", pc.greater_equal),
    "max_reward": ("reward", pc.less_equal),
    "min_age": ("max_age", pc.greater_equal),
    "min_gap": ("max_gap", pc.greater_equal),
}
"""Bounds of a filter: the column, and how it compares with the bound."""


@dataclass(frozen=True)
class RolloutFilter:
    """A filter of attempts; None and "" ask for all. Ends of ranges are included, texts ignore case.

    Attributes:
        prompt: In the uid or the text of the prompt.
        tag: `name=value` with the whole value, or a part of either.
        text: In a response.
        min_age: Of the oldest token.
        min_gap: Of the largest gap between the logprobs.
    """

    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_age: int | None = None
    min_gap: float | None = None
    status: str = ""
    prompt: str = ""
    tag: str = ""
    text: str = ""


@dataclass(frozen=True)
class FoundAttempts:
    """A page of the attempts that were asked for, as JSON values. `matching` counts all of them."""

    matching: int
    attempts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class FoundPrompts:
    """The newest prompts that were given up, as JSON values. `matching` counts all of them."""

    matching: int
    prompts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class IndexState:
    """How far the index is. `error` says why a file cannot be read, or is None."""

    indexed_steps: int
    steps: int
    attempts: int
    error: str | None


class _Step(NamedTuple):
    """A step in the index. `stamp` tells its file from one that was made again."""

    stamp: tuple[int, ...]
    attempts: pa.Table
    given_up: Sequence[LostPrompt]


class RolloutIndex:
    """The attempts in a run's `rollouts` folder. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = Lock()
        self._steps: dict[int, _Step] = {}
        self._joined: pa.Table | None = None

    def update(self, budget_s: float | None = None) -> IndexState:
        """Read steps that are not in the index, the newest first, at least one.

        Args:
            budget_s: Seconds after which no other step is begun. If None, all are read.

        Returns:
            The state of the index. A file that cannot be read is told in `error`; what was read before stays.
        """
        with self._lock:
            deadline = time.monotonic() + (math.inf if budget_s is None else budget_s)
            steps, error = len(self._steps), None
            try:
                wanted = self._look()
                steps = len(wanted)
                for step in sorted(wanted.keys() - self._steps.keys(), reverse=True):
                    if (found := read_step(wanted[step][0], list(SEARCHED))) is not None:
                        self._steps[step] = _read(wanted[step][1], found[0])
                        self._joined = None
                    if time.monotonic() > deadline:
                        break
            except RunDirectoryError as failure:
                error = str(failure)
            attempts = sum(len(step.attempts) for step in self._steps.values())
            return IndexState(len(self._steps), steps, attempts, error)

    def find(
        self,
        wanted: RolloutFilter,
        *,
        sort: SortKey = "step",
        ascending: bool = False,
        offset: int = 0,
        limit: int = 50,
    ) -> FoundAttempts:
        """Return attempts that pass the filter, `limit` of them from `offset` on; equal ones newest first."""
        with self._lock:
            table = self._table()
        found = table.filter(_expression(wanted, table))
        keys = [(sort, "ascending" if ascending else "descending"), ("step", "descending"), ("place", "ascending")]
        order = pc.sort_indices(found, sort_keys=keys if sort != "step" else [keys[0], keys[2]])
        return FoundAttempts(len(found), [_row(row) for row in found.take(order[offset : offset + limit]).to_pylist()])

    def given_up(self, wanted: RolloutFilter) -> FoundPrompts:
        """Return prompts that were given up, the newest first, by step and uid of the filter."""
        first, last = wanted.min_step or 0, math.inf if wanted.max_step is None else wanted.max_step
        with self._lock:
            steps = [self._steps[step] for step in sorted(self._steps, reverse=True) if first <= step <= last]
        found = [prompt for step in steps for prompt in step.given_up if wanted.prompt.lower() in prompt.uid.lower()]
        return FoundPrompts(len(found), [asdict(prompt) for prompt in found[:_MOST_GIVEN_UP]])

    def attempt(self, step: int, place: int) -> KeptAttempt | None:
        """Return the attempt at this place of a step, as rows tell both; None if it is not there any more.

        Raises:
            RunDirectoryError: If its file cannot be read.
        """
        attempts = list(KeptRollouts(self._run_dir).attempts([step]))
        return attempts[place] if 0 <= place < len(attempts) else None

    def _look(self) -> dict[int, tuple[Path, tuple[int, ...]]]:
        """Return the files that there are; steps that are gone or were made again leave the index."""
        wanted: dict[int, tuple[Path, tuple[int, ...]]] = {}
        for step, path in step_files(self._run_dir).items():
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            wanted[step] = path, (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        for step in list(self._steps):
            if step not in wanted or wanted[step][1] != self._steps[step].stamp:
                del self._steps[step]
                self._joined = None
        return wanted

    def _table(self) -> pa.Table:
        if self._joined is None:
            empty = _read((), pa.schema(list(SEARCHED.items())).empty_table()).attempts
            steps = [self._steps[step].attempts for step in sorted(self._steps)]
            self._joined = pa.concat_tables([empty, *steps]).combine_chunks()
        return self._joined


def _read(stamp: tuple[int, ...], table: pa.Table) -> _Step:
    is_lost = pc.equal(table["status"], "given_up")
    lost = table.filter(is_lost).select(["step", "uid", "draw", "reason"]).to_pylist()
    attempts = table.filter(pc.invert(is_lost))
    attempts = attempts.append_column("place", pa.array(range(len(attempts)), pa.int32()))
    attempts = attempts.append_column("searched", pc.utf8_lower(attempts["response"]))
    return _Step(stamp, attempts, [LostPrompt(**row) for row in lost])


def _expression(wanted: RolloutFilter, table: pa.Table) -> Any:
    """Return the filter as pyarrow evaluates it."""
    parts = [pc.scalar(True)]
    for name, (column, compare) in _BOUNDS.items():
        if (bound := getattr(wanted, name)) is not None:
            # As a float, which any number of a request can be.
            parts.append(compare(pc.field(column), float(bound)))
    if wanted.status:
        parts.append(pc.equal(pc.field("status"), wanted.status))
    if wanted.tag:
        for_tags = [
            [text for text in pc.unique(table[column]).to_pylist() if _has_tag(text, wanted.tag.lower())]
            for column in ("columns", "tags")
        ]
        in_columns, in_tags = (
            pc.is_in(pc.field(column), pa.array(texts, pa.string()))
            for column, texts in zip(("columns", "tags"), for_tags, strict=True)
        )
        parts.append(in_columns | in_tags)
    if wanted.prompt:
        in_uid, in_prompt = (
            pc.match_substring(pc.field(column), wanted.prompt, ignore_case=True) for column in ("uid", "prompt")
        )
        parts.append(in_uid | in_prompt)
    if wanted.text:
        parts.append(pc.match_substring(pc.field("searched"), wanted.text.lower()))
    return reduce(and_, parts)


def _has_tag(values: str, wanted: str) -> bool:
    """Return whether one of these values, given as JSON, matches: equals `name=value`, or contains other text."""
    tags = [f"{name}={value}".lower() for name, value in json.loads(values).items()]
    return any(tag == wanted if "=" in wanted else wanted in tag for tag in tags)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a list shows of an attempt."""
    names = ("step", "place", "status", "uid", "sample", "reward", "advantage", "tokens", "turns", "finish", "max_age")
    shown = {name: row[name] for name in names}
    texts = {"prompt": row["prompt"][:_PREVIEW], "preview": row["response"][:_PREVIEW]}
    return {**shown, "max_gap": row["max_gap"] or 0.0, **texts}
