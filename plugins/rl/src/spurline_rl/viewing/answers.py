"""Answer requests of `spurline view` about rollouts, as JSON values.

A request names a run by its number and an attempt by its step and place. The attempts of a run are one table without
their tokens, which pyarrow filters. A step's file is read into it once, and again when an attempt is looked at.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from functools import partial, reduce
from itertools import takewhile
from operator import and_
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from spurline.errors import RunDirectoryError
from spurline_rl.kept_rollouts import KeptAttempt, KeptRollouts, KeptTurn, LostPrompt
from spurline_rl.kept_rollouts.files import read_step, step_files
from spurline_rl.kept_rollouts.table import SEARCHED

pc: Any = pyarrow.compute
"""A type checker cannot see its functions, which are made at import."""

INDEXING_S = 0.3
"""Seconds after which a request reads no further steps. The page then asks again."""
MOST_COMPARED = 4_000
"""Longest responses, in tokens, whose difference is looked for. Longer ones are shown as a whole."""
_PREVIEW = 200
"""Characters of a prompt and of a response that a list shows."""
_MOST_GIVEN_UP = 200
_BOUNDS = {
    "min_step": ("step", pc.greater_equal),
    "max_step": ("step", pc.less_equal),
    "min_reward": ("reward", pc.greater_equal),
    "max_reward": ("reward", pc.less_equal),
    "min_age": ("max_age", pc.greater_equal),
    "min_gap": ("max_gap", pc.greater_equal),
}
"""Bounds of a filter: the column, and how it compares with the bound."""


class ListQuery(BaseModel):
    """A page of the attempts that pass a filter; None and "" ask for all. Texts ignore case.

    `prompt` is looked for in the uid and the text of the prompt, `text` in the responses. `tag` is `name=value`, or a
    part of either. `min_age` bounds the age of the oldest token, `min_gap` the largest gap between the logprobs.
    """

    run: int
    sort: Literal["step", "reward", "tokens", "max_age", "max_gap"] = "step"
    ascending: bool = False
    offset: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1, le=500)] = 50
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


class AttemptQuery(BaseModel):
    """The place of an attempt."""

    run: int
    step: int
    place: int


class DiffQuery(AttemptQuery):
    """The places of two attempts."""

    other_run: int
    other_step: int
    other_place: int


def answers(run_dirs: Sequence[Path]) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
    """Return the functions that answer requests about the rollouts of these runs, by the name of the request."""
    indexes = [RolloutIndex(run_dir) for run_dir in run_dirs]
    functions = {"rollouts": _rollouts, "attempt": _attempt, "diff": _diff}
    return {name: partial(function, indexes) for name, function in functions.items()}


def _rollouts(indexes: Sequence[RolloutIndex], query: Mapping[str, str]) -> Any:
    # An empty field of a form asks for all.
    wanted = ListQuery.model_validate({name: value for name, value in query.items() if value != ""})
    index = _index(indexes, wanted.run)
    return {**index.update(INDEXING_S), **index.find(wanted), "given_up": index.given_up(wanted)}


def _attempt(indexes: Sequence[RolloutIndex], query: Mapping[str, str]) -> Any:
    asked = AttemptQuery.model_validate(query)
    return attempt_facts(_index(indexes, asked.run).attempt(asked.step, asked.place))


def _diff(indexes: Sequence[RolloutIndex], query: Mapping[str, str]) -> Any:
    asked = DiffQuery.model_validate(query)
    left = _index(indexes, asked.run).attempt(asked.step, asked.place)
    right = _index(indexes, asked.other_run).attempt(asked.other_step, asked.other_place)
    return difference(left, right)


def _index(indexes: Sequence[RolloutIndex], number: int) -> RolloutIndex:
    if not 0 <= number < len(indexes):
        raise LookupError(f"There is no run {number}.")
    return indexes[number]


class RolloutIndex:
    """The attempts in a run's `rollouts` folder. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = Lock()
        self._steps: dict[int, tuple[tuple[int, ...], pa.Table, list[LostPrompt]]] = {}
        """A mark of the file, its attempts and the prompts that were given up, by step."""
        self._joined: pa.Table | None = None

    def update(self, budget_s: float) -> dict[str, Any]:
        """Read steps that are new or were made again, the newest first, at least one, until the time is up.

        Returns:
            Counts of steps and attempts, and the error of a file that cannot be read; what was read before stays.
        """
        with self._lock:
            deadline = time.monotonic() + budget_s
            steps, error = len(self._steps), None
            try:
                paths = step_files(self._run_dir)
                marks = {step: mark for step, path in paths.items() if (mark := _mark(path)) is not None}
                steps = len(marks)
                for step in [step for step, known in self._steps.items() if marks.get(step) != known[0]]:
                    del self._steps[step]
                    self._joined = None
                for step in sorted(marks.keys() - self._steps.keys(), reverse=True):
                    if (found := read_step(paths[step], list(SEARCHED))) is not None:
                        self._steps[step] = (marks[step], *_split(found[0]))
                        self._joined = None
                    if time.monotonic() > deadline:
                        break
            except RunDirectoryError as failure:
                error = str(failure)
            attempts = sum(len(table) for _, table, _ in self._steps.values())
            return {"indexed_steps": len(self._steps), "steps": steps, "attempts": attempts, "error": error}

    def find(self, wanted: ListQuery) -> dict[str, Any]:
        """Return the page of attempts as rows, and how many match; equal ones come newest first."""
        with self._lock:
            if self._joined is None:
                empty, _ = _split(pa.schema(list(SEARCHED.items())).empty_table())
                tables = [self._steps[step][1] for step in sorted(self._steps)]
                self._joined = pa.concat_tables([empty, *tables]).combine_chunks()
            table: pa.Table = self._joined
        found = table.filter(_expression(wanted, table))
        keys = [(wanted.sort, "ascending" if wanted.ascending else "descending")]
        keys += [key for key in (("step", "descending"), ("place", "ascending")) if key[0] != wanted.sort]
        order = pc.sort_indices(found, sort_keys=keys)[wanted.offset : wanted.offset + wanted.limit]
        return {"matching": len(found), "rows": [_row(row) for row in found.take(order).to_pylist()]}

    def given_up(self, wanted: ListQuery) -> dict[str, Any]:
        """Return the newest prompts that were given up, by step and uid of the filter, and how many match."""
        first, last = wanted.min_step or 0, math.inf if wanted.max_step is None else wanted.max_step
        with self._lock:
            steps = [self._steps[step][2] for step in sorted(self._steps, reverse=True) if first <= step <= last]
        found = [prompt for lost in steps for prompt in lost if wanted.prompt.lower() in prompt.uid.lower()]
        return {"matching": len(found), "prompts": [asdict(prompt) for prompt in found[:_MOST_GIVEN_UP]]}

    def attempt(self, step: int, place: int) -> KeptAttempt:
        """Return the attempt at this place of a step.

        Raises:
            LookupError: If it does not exist any more.
            RunDirectoryError: If its file cannot be read.
        """
        attempts = list(KeptRollouts(self._run_dir).attempts([step]))
        if not 0 <= place < len(attempts):
            raise LookupError(f"Step {step} has no attempt {place}, or it is not kept any more.")
        return attempts[place]


def _mark(path: Path) -> tuple[int, ...] | None:
    """Return numbers that differ when the file was made again; None if it is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _split(table: pa.Table) -> tuple[pa.Table, list[LostPrompt]]:
    """Return the attempts of a step, with columns to find them by, and the prompts that were given up."""
    is_lost = pc.equal(table["status"], "given_up")
    lost = table.filter(is_lost).select(["step", "uid", "draw", "reason"]).to_pylist()
    attempts = table.filter(pc.invert(is_lost))
    attempts = attempts.append_column("place", pa.array(range(len(attempts)), pa.int32()))
    attempts = attempts.append_column("searched", pc.utf8_lower(attempts["response"]))
    return attempts, [LostPrompt(**row) for row in lost]


def _expression(wanted: ListQuery, table: pa.Table) -> Any:
    """Return the filter as pyarrow evaluates it."""
    parts = [pc.scalar(True)]
    for name, (column, compare) in _BOUNDS.items():
        if (bound := getattr(wanted, name)) is not None:
            # Any number of a request fits into a float.
            parts.append(compare(pc.field(column), float(bound)))
    if wanted.status:
        parts.append(pc.equal(pc.field("status"), wanted.status))
    if wanted.tag:
        parts.append(_has_tag(table, "columns", wanted.tag.lower()) | _has_tag(table, "tags", wanted.tag.lower()))
    if wanted.prompt:
        in_uid, in_prompt = (
            pc.match_substring(pc.field(column), wanted.prompt, ignore_case=True) for column in ("uid", "prompt")
        )
        parts.append(in_uid | in_prompt)
    if wanted.text:
        parts.append(pc.match_substring(pc.field("searched"), wanted.text.lower()))
    return reduce(and_, parts)


def _has_tag(table: pa.Table, column: str, wanted: str) -> Any:
    """Return the filter for rows with a value in this column of JSON that equals `name=value`, or contains the text."""

    def matches(values: str) -> bool:
        tags = [f"{name}={value}".lower() for name, value in json.loads(values).items()]
        return any(tag == wanted if "=" in wanted else wanted in tag for tag in tags)

    texts = [text for text in pc.unique(table[column]).to_pylist() if matches(text)]
    return pc.is_in(pc.field(column), pa.array(texts, pa.string()))


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an attempt that a list shows."""
    names = ("step", "place", "status", "uid", "sample", "reward", "advantage", "tokens", "turns", "finish", "max_age")
    shown = {name: row[name] for name in names}
    texts = {"prompt": row["prompt"][:_PREVIEW], "preview": row["response"][:_PREVIEW]}
    return {**shown, "max_gap": row["max_gap"] or 0.0, **texts}


def attempt_facts(attempt: KeptAttempt) -> dict[str, Any]:
    """Return the attempt with its turns. Lists of a turn have an entry per token, or are None if nothing is known."""
    return {
        "step": attempt.step,
        "status": attempt.status,
        "uid": attempt.uid,
        "draw": attempt.draw,
        "epoch": attempt.epoch,
        "sample": attempt.sample,
        "reward": attempt.reward,
        "rewards": dict(attempt.rewards),
        "advantage": attempt.advantage,
        "retries": attempt.retries,
        "finish": attempt.finish_reason,
        "tags": {**attempt.columns, **attempt.tags},
        "info": dict(attempt.info),
        "turns": [_turn_facts(turn) for turn in attempt.turns],
    }


def _turn_facts(turn: KeptTurn) -> dict[str, Any]:
    special = turn.special_ids
    return {
        "finish": turn.finish_reason,
        "reward": turn.reward,
        "prompt": {
            "pieces": turn.prompt_pieces,
            "special": [place for place, token in enumerate(turn.prompt_ids.tolist()) if token in special],
        },
        "response": {
            "pieces": turn.response_pieces,
            "special": [place for place, token in enumerate(turn.response_ids.tolist()) if token in special],
            "ids": turn.response_ids.tolist(),
            "logprobs": _numbers(turn.logprobs),
            "gap": _numbers(turn.gap),
            "advantages": _numbers(turn.advantages),
            "ages": None if turn.ages is None else turn.ages.tolist(),
            "trained": turn.loss_mask.tolist(),
        },
    }


def difference(left: KeptAttempt, right: KeptAttempt) -> list[dict[str, Any]]:
    """Return the runs of tokens that two attempts share, or that one has alone, over the responses of all turns.

    `kind` is `same`, `left` or `right`; `pieces` are the texts of the tokens.
    """
    ids, pieces = zip(_responses(left), _responses(right), strict=True)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[0], ids[1], strict=False)))
    ends = [len(ids[0]), len(ids[1])]
    while min(ends) > start and ids[0][ends[0] - 1] == ids[1][ends[1] - 1]:
        ends = [end - 1 for end in ends]
    found = [("same", pieces[0][:start])]
    middle = [ids[side][start : ends[side]] for side in (0, 1)]
    if max(map(len, middle)) > MOST_COMPARED:
        blocks: list[tuple[str, int, int, int, int]] = [("replace", 0, len(middle[0]), 0, len(middle[1]))]
    else:
        blocks = list(SequenceMatcher(None, middle[0], middle[1], autojunk=False).get_opcodes())
    for kind, left_from, left_to, right_from, right_to in blocks:
        if kind == "equal":
            found.append(("same", pieces[0][start + left_from : start + left_to]))
        else:
            found.append(("left", pieces[0][start + left_from : start + left_to]))
            found.append(("right", pieces[1][start + right_from : start + right_to]))
    found.append(("same", pieces[0][ends[0] :]))
    return [{"kind": kind, "pieces": tokens} for kind, tokens in found if tokens]


def _responses(attempt: KeptAttempt) -> tuple[list[int], list[str]]:
    """Return the response tokens of all turns, and their texts."""
    ids = [token for turn in attempt.turns for token in turn.response_ids.tolist()]
    return ids, [piece for turn in attempt.turns for piece in turn.response_pieces]


def _numbers(values: NDArray[Any] | None) -> Sequence[float | None] | None:
    """Return rounded numbers; JSON has no infinity and no NaN."""
    if values is None:
        return None
    return [round(value, 5) if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]
