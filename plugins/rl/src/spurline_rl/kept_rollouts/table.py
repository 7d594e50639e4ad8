"""Make a table of the attempts of a step: one row per attempt, with its numbers, its texts and its tokens.

docs/inspecting.md describes each column. The table is made on a thread while the model trains. The code uses operations
over whole arrays, which slow the training thread down less than Python loops.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spurline_rl.group_runner import GivenUpPrompt
from spurline_rl.trajectory import FlatTurns, Group, Trajectory, trajectories_of
from spurline_text.token_pieces import TokenPieces

_HALF, _FLOAT, _INT, _BYTE = (pa.list_(kind) for kind in (pa.float16(), pa.float32(), pa.int32(), pa.uint8()))
SEARCHED: Mapping[str, pa.DataType] = {
    "step": pa.int32(),
    "status": pa.string(),
    "uid": pa.string(),
    "draw": pa.int64(),
    "epoch": pa.int64(),
    "tags": pa.string(),
    "columns": pa.string(),
    "sample": pa.int32(),
    "reward": pa.float64(),
    "advantage": pa.float32(),
    "tokens": pa.int64(),
    "turns": pa.int64(),
    "finish": pa.string(),
    "max_age": pa.int32(),
    "max_gap": pa.float32(),
    "prompt": pa.string(),
    "response": pa.string(),
    "reason": pa.string(),
}
"""Columns that `spurline view` searches, or shows in its lists."""
DETAILS: Mapping[str, pa.DataType] = {
    "rewards": pa.string(),
    "retries": pa.int32(),
    "counts": pa.bool_(),
    "info": pa.string(),
    "info_is_whole": pa.bool_(),
    "engines": pa.string(),
    "turn_prompt": _INT,
    "turn_response": _INT,
    "turn_finish": pa.list_(pa.string()),
    "ids": _INT,
    "logprobs": _FLOAT,
    "token_rewards": _FLOAT,
    "gap": _HALF,
    "advantages": _HALF,
    "versions": _INT,
    "loss_mask": _BYTE,
}
"""Columns that are read only when one attempt is shown."""
SCHEMA = pa.schema([*SEARCHED.items(), *DETAILS.items()])


@dataclass(frozen=True, eq=False)
class KeptStep:
    """The data of a step that is written to the step's file.

    Attributes:
        groups: Groups that were trained on.
        filtered: Groups that were not trained on: all their attempts got the same reward, and other prompts took their
            place (`zero_variance: refill`).
        lost: Prompts that were given up because their attempts failed.
        prompts_per_epoch: Number of prompts in a pass over the data.
        column: Returns a token column of the batch for the response tokens of `groups`, turn after turn. The writing
            thread calls this function.
    """

    step: int
    groups: Sequence[Group]
    filtered: Sequence[Group]
    lost: Sequence[GivenUpPrompt]
    prompts_per_epoch: int
    column: Callable[[str], NDArray[Any]]


class TokenTexts:
    """The text of each token that occurs in some groups."""

    def __init__(self, pieces: TokenPieces, groups: Sequence[Group]) -> None:
        arrays = [array for group in groups for array in (group.flat.prompts, group.flat.responses)]
        is_used = np.zeros(1 + max((int(array.max(initial=-1)) for array in arrays), default=-1), np.bool_)
        for array in arrays:
            is_used[array] = True
        self._ids = np.flatnonzero(is_used).tolist()
        self._bytes = pieces.of_all(self._ids)
        self._special = [token_id for token_id in self._ids if pieces.is_special(token_id)]
        self._array = pa.array(self._bytes, pa.large_binary())
        self._places = np.cumsum(is_used) - 1

    def of(self, sequences: Sequence[NDArray[np.int32]]) -> list[str]:
        """Return the text of each sequence. Bytes that are not UTF-8 are written as escapes such as `\\xff`."""
        tokens = np.concatenate([np.empty(0, np.int32), *sequences])
        # Arrow joins the bytes of all tokens without making a Python object for each token.
        _, offsets, data = self._array.take(pa.array(self._places[tokens])).buffers()
        if data is None or not len(tokens):
            return [""] * len(sequences)
        places = np.frombuffer(offsets, np.int64)[_ends([*map(len, sequences)])].tolist()
        text = memoryview(data)
        return [str(text[start:end], "utf-8", "backslashreplace") for start, end in pairwise(places)]

    def as_metadata(self) -> dict[str, str]:
        """Return two JSON texts: `pieces` has the text of each token, and `special` the ids of special tokens.

        A byte that is not UTF-8 becomes half of a surrogate pair, as with Python's `surrogateescape`.
        """
        pieces = [piece.decode(errors="surrogateescape") for piece in self._bytes]
        return {"pieces": json.dumps(dict(zip(self._ids, pieces, strict=True))), "special": json.dumps(self._special)}


def step_table(kept: KeptStep, pieces: TokenPieces) -> pa.Table:
    """Return one row for each attempt, then one for each prompt that was given up.

    The metadata of the table is `TokenTexts.as_metadata`.
    """
    texts = TokenTexts(pieces, [*kept.groups, *kept.filtered])
    known = {"step": kept.step, "status": "given_up"}
    lost = [
        known
        | {"uid": _utf8(each.uid), "draw": each.draw, "reason": _utf8(each.reason)}
        | ({"info": _json({"environment": each.environment})} if each.environment else {})
        for each in kept.lost
    ]
    tables = [pa.Table.from_pylist(lost, schema=SCHEMA)]
    if kept.filtered:
        tables.insert(0, _attempts_table(kept, "filtered", kept.filtered, {}, texts))
    if kept.groups:
        scores = {name: kept.column(name) for name in ("old_logprobs", "advantages")}
        tables.insert(0, _attempts_table(kept, "trained", kept.groups, scores, texts))
    return pa.concat_tables(tables).replace_schema_metadata(texts.as_metadata())


def _attempts_table(
    kept: KeptStep, status: str, groups: Sequence[Group], scores: Mapping[str, NDArray[np.float32]], texts: TokenTexts
) -> pa.Table:
    """Return the attempts of these groups. Each column of `scores` has one value per response token of the groups."""
    step = kept.step
    flat = FlatTurns.join([group.flat for group in groups])
    attempts = trajectories_of(groups)
    group_of = [group for group in groups for _ in group.trajectories]
    turn_ends = _ends(flat.attempt_turns)
    token_ends = _ends(flat.num_response)[turn_ends]
    stored = ("logprobs", "versions", "loss_mask", "rewards")
    token_columns = {name: flat.columns[name] for name in stored if name in flat.columns}
    responses = texts.of([turn.response_ids for attempt in attempts for turn in attempt.turns])
    columns: dict[str, Any] = {
        "step": [step] * len(attempts),
        "status": [status] * len(attempts),
        "uid": [_utf8(group.uid) for group in group_of],
        "draw": [group.draw for group in group_of],
        "epoch": [group.draw // kept.prompts_per_epoch for group in group_of],
        "tags": [text for group in groups for text in [_json(group.tags)] * len(group.trajectories)],
        "columns": [text for group in groups for text in [_json(group.columns)] * len(group.trajectories)],
        "sample": [attempt.sample for attempt in attempts],
        "reward": np.concatenate([group.returns for group in groups]),
        "tokens": np.diff(token_ends),
        "turns": flat.attempt_turns,
        "finish": [attempt.turns[-1].finish_reason for attempt in attempts],
        "prompt": _prompt_texts(attempts, texts),
        "response": ["\n".join(responses[start:end]) for start, end in pairwise(turn_ends.tolist())],
        "rewards": [_json({name: float(value) for name, value in attempt.rewards.items()}) for attempt in attempts],
        "retries": [attempt.retries for attempt in attempts],
        "counts": [attempt.counts for attempt in attempts],
        "info": [_json(attempt.info) for attempt in attempts],
        "info_is_whole": [_is_json(attempt.info) for attempt in attempts],
        "engines": [
            json.dumps([*dict.fromkeys(name for turn in attempt.turns for name in turn.engines)])
            for attempt in attempts
        ],
        "turn_prompt": _lists(flat.num_prompt, turn_ends, _INT),
        "turn_response": _lists(flat.num_response, turn_ends, _INT),
        "turn_finish": _lists(flat.finish_reasons, turn_ends, DETAILS["turn_finish"]),
        "ids": _lists(flat.tokens(), _ends(flat.lengths)[turn_ends], _INT),
    }
    starts = token_ends[:-1]
    if "versions" in token_columns:
        columns["max_age"] = step - 1 - np.minimum.reduceat(token_columns["versions"], starts)
    if "old_logprobs" in scores and "logprobs" in token_columns:
        # Store the difference itself. The difference of two numbers rounded to float16 would be only rounding error.
        token_columns["gap"] = scores["old_logprobs"] - token_columns["logprobs"]
        # `fmax` ignores NaN.
        columns["max_gap"] = np.fmax.reduceat(np.abs(token_columns["gap"]), starts)
    if "advantages" in scores:
        token_columns["advantages"] = scores["advantages"]
        columns["advantage"] = _same(scores["advantages"], starts, columns["tokens"])
    if "rewards" in token_columns:
        token_columns["token_rewards"] = token_columns.pop("rewards")
    columns |= {name: _lists(values, token_ends, DETAILS[name]) for name, values in token_columns.items()}
    arrays = [pa.array(columns.get(field.name, [None] * len(attempts)), field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _prompt_texts(attempts: Sequence[Trajectory], texts: TokenTexts) -> list[str]:
    """Return the text of each attempt's first prompt. A prompt that several attempts share is decoded once."""
    prompts = {attempt.turns[0].prompt_ids.tobytes(): attempt.turns[0].prompt_ids for attempt in attempts}
    found = dict(zip(prompts, texts.of([*prompts.values()]), strict=True))
    return [found[attempt.turns[0].prompt_ids.tobytes()] for attempt in attempts]


def _same(values: NDArray[np.float32], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[float | None]:
    """Return for each attempt the value that all its tokens have, or None if they have different values."""
    first = values[starts]
    differs = np.add.reduceat(values != np.repeat(first, counts), starts)
    return [None if several else value for value, several in zip(first.tolist(), differs.tolist(), strict=True)]


def _lists(values: Any, ends: NDArray[np.int64], kind: Any) -> pa.Array:
    if pa.types.is_float16(kind.value_type):
        largest = float(np.finfo(np.float16).max)
        values = np.clip(values, -largest, largest).astype(np.float16)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, kind.value_type))


def _ends(counts: Any) -> NDArray[np.int64]:
    """Return 0 followed by the running sums."""
    return np.append(0, np.cumsum(counts, dtype=np.int64))


def _json(values: Mapping[str, Any]) -> str:
    """Return the values as a JSON object. If a value cannot be written as JSON, all values are written as texts."""
    try:
        # Python would write infinity and NaN, which are not JSON.
        return json.dumps(dict(values), default=_plain, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps({str(name): str(value) for name, value in values.items()})


def _is_json(values: Mapping[str, Any]) -> bool:
    """Return whether `_json` writes all values as they are, and none as a text."""
    try:
        json.dumps(dict(values), default=np.generic.item, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
