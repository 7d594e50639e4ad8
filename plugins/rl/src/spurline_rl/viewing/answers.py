"""Answer requests about rollouts from the page of `spurline view`, with JSON values.

A request names a run by its number, and an attempt by its step and its row in the step's file. A request for a list
filters the files one after the other. The columns that lists show are kept in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache, partial, reduce
from operator import and_
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from spurline.errors import RunDirectoryError
from spurline_rl.kept_rollouts import KeptAttempt, KeptRollouts, KeptTurn
from spurline_rl.kept_rollouts.reader import read_step, step_files
from spurline_rl.kept_rollouts.table import SCHEMA, SEARCHED

pc: Any = pyarrow.compute
"""`pyarrow.compute`. It creates its functions at import, so a type checker does not know them."""

_PREVIEW = 200
"""Number of characters that a list shows of each prompt and response."""
_MOST_GIVEN_UP = 200
_TEXTS = ("prompt", "response")
"""Long columns, which are not kept in memory. A filter that searches them reads the files again."""
_BOUNDS = {
    "min_reward": ("reward", pc.greater_equal),
    "max_reward": ("reward", pc.less_equal),
    "min_age": ("max_age", pc.greater_equal),
    "min_gap": ("max_gap", pc.greater_equal),
}
"""For each bound in a filter: the column, and the function that compares the column with the bound."""


class ListQuery(BaseModel):
    """A filter for attempts, and the page of the list that is shown. A field that is None or "" filters nothing.

    Searches ignore case. `prompt` is searched for in the uid and the text of the prompt, `text` in the responses. `tag`
    is a whole `name=value`, or a part of it. `min_age` bounds the age of an attempt's oldest token, and `min_gap` its
    largest difference between the trainer's and the engine's logprobs.
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
    """The run, step and row number (`place`) of one attempt."""

    run: int
    step: int
    place: int


def answers(run_dirs: Sequence[Path]) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
    """Return the functions that answer requests about the rollouts of these runs, by the name of the request."""
    return {"rollouts": partial(_rollouts, run_dirs), "attempt": partial(_attempt, run_dirs)}


def _rollouts(run_dirs: Sequence[Path], query: Mapping[str, str]) -> Any:
    # The page sends an empty text for a field that is not filled in.
    wanted = ListQuery.model_validate({name: value for name, value in query.items() if value != ""})
    files, error = step_files(_run(run_dirs, wanted.run)), None
    first, last = wanted.min_step or 0, math.inf if wanted.max_step is None else wanted.max_step
    found, lost, num_attempts = [_with_place(SCHEMA.empty_table()).drop_columns(_TEXTS)], list[dict[str, Any]](), 0
    for step, path in files.items():
        try:
            stat = path.stat()
            listed = _listed(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            num_attempts += pc.sum(pc.not_equal(listed["status"], "given_up")).as_py() or 0
            if first <= step <= last:
                table = _read(path) if wanted.prompt or wanted.text else listed
                found.append(table.filter(_expression(wanted, table)).select(listed.column_names))
                lost[:0] = listed.filter(_is_lost(wanted)).select(["step", "uid", "draw", "reason"]).to_pylist()
        except FileNotFoundError:
            # The run has removed the file in the meantime.
            continue
        except RunDirectoryError as failure:
            error = str(failure)
    return {
        "steps": len(files),
        "attempts": num_attempts,
        "error": error,
        **_page(pa.concat_tables(found), wanted),
        "given_up": {"matching": len(lost), "prompts": lost[:_MOST_GIVEN_UP]},
    }


def _attempt(run_dirs: Sequence[Path], query: Mapping[str, str]) -> Any:
    asked = AttemptQuery.model_validate(query)
    attempts = list(KeptRollouts(_run(run_dirs, asked.run)).attempts([asked.step]))
    if not 0 <= asked.place < len(attempts):
        raise LookupError(f"Step {asked.step} has no attempt {asked.place}, or it is not kept any more.")
    return _attempt_facts(attempts[asked.place])


def _run(run_dirs: Sequence[Path], number: int) -> Path:
    if not 0 <= number < len(run_dirs):
        raise LookupError(f"There is no run {number}.")
    return run_dirs[number]


@lru_cache(maxsize=100_000)
def _listed(path: Path, *mark: int) -> pa.Table:
    """Return the columns that lists show. `mark` identifies the file's version, so a replaced file is read again."""
    return _read(path).drop_columns(_TEXTS)


def _read(path: Path) -> pa.Table:
    return _with_place(read_step(path, list(SEARCHED)))


def _with_place(table: pa.Table) -> pa.Table:
    """Add the row number of each attempt, and the beginnings of its texts."""
    table = table.select(list(SEARCHED)).append_column("place", pa.array(range(len(table)), pa.int32()))
    for name, text in (("begins", "prompt"), ("preview", "response")):
        table = table.append_column(name, pc.utf8_slice_codeunits(table[text], 0, _PREVIEW))
    return table


def _page(found: pa.Table, wanted: ListQuery) -> dict[str, Any]:
    """Return the rows of the page, and the number of all matching attempts. Ties are sorted newest first."""
    keys = [(wanted.sort, "ascending" if wanted.ascending else "descending")]
    keys += [key for key in (("step", "descending"), ("place", "ascending")) if key[0] != wanted.sort]
    order = pc.sort_indices(found, sort_keys=keys)[wanted.offset : wanted.offset + wanted.limit]
    return {"matching": len(found), "rows": found.take(order).to_pylist()}


def _is_lost(wanted: ListQuery) -> Any:
    """Return a pyarrow filter for given-up prompts whose uid contains the searched text."""
    of_prompt = pc.match_substring(pc.field("uid"), wanted.prompt, ignore_case=True)
    return (pc.field("status") == "given_up") & of_prompt


def _expression(wanted: ListQuery, table: pa.Table) -> Any:
    """Return a pyarrow filter for attempts."""
    parts = [pc.field("status") != "given_up"]
    for name, (column, compare) in _BOUNDS.items():
        if (bound := getattr(wanted, name)) is not None:
            # A request may hold an integer that is too large for the column's type, but not for a float.
            parts.append(compare(pc.field(column), float(bound)))
    if wanted.status:
        parts.append(pc.field("status") == wanted.status)
    if wanted.tag:
        parts.append(_has_tag(table, "columns", wanted.tag.lower()) | _has_tag(table, "tags", wanted.tag.lower()))
    if wanted.prompt:
        in_uid, in_prompt = (
            pc.match_substring(pc.field(column), wanted.prompt, ignore_case=True) for column in ("uid", "prompt")
        )
        parts.append(in_uid | in_prompt)
    if wanted.text:
        parts.append(pc.match_substring(pc.utf8_lower(pc.field("response")), wanted.text.lower()))
    return reduce(and_, parts)


def _has_tag(table: pa.Table, column: str, wanted: str) -> Any:
    """Return a pyarrow filter for the rows whose JSON in this column has the tag."""

    def matches(values: str) -> bool:
        tags = [f"{name}={value}".lower() for name, value in json.loads(values).items()]
        return any(tag == wanted if "=" in wanted else wanted in tag for tag in tags)

    texts = [text for text in pc.unique(table[column]).to_pylist() if matches(text)]
    return pc.is_in(pc.field(column), pa.array(texts, pa.string()))


def _attempt_facts(attempt: KeptAttempt) -> dict[str, Any]:
    """Return the attempt and its turns. Lists in a turn have one entry per token, or are None if not recorded."""
    facts = {field.name: getattr(attempt, field.name) for field in fields(attempt) if not field.name.startswith("_")}
    return facts | {"turns": [_turn_facts(turn) for turn in attempt.turns]}


def _turn_facts(turn: KeptTurn) -> dict[str, Any]:
    special = [*turn.special_ids]
    return {
        "finish": turn.finish_reason,
        "reward": turn.reward,
        "prompt": {"pieces": turn.prompt_pieces, "special": np.flatnonzero(np.isin(turn.prompt_ids, special)).tolist()},
        "response": {
            "pieces": turn.response_pieces,
            "special": np.flatnonzero(np.isin(turn.response_ids, special)).tolist(),
            "ids": turn.response_ids.tolist(),
            "logprobs": _numbers(turn.logprobs),
            "gap": _numbers(turn.gap),
            "advantages": _numbers(turn.advantages),
            "ages": None if turn.ages is None else turn.ages.tolist(),
            "trained": turn.loss_mask.tolist(),
        },
    }


def _numbers(values: NDArray[Any] | None) -> Sequence[float | None] | None:
    """Return rounded numbers. Infinity and NaN become None, because JSON cannot hold them."""
    if values is None:
        return None
    return [round(value, 5) if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]
