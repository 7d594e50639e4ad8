"""One line of the file: the attempts at some prompts of a step, as a JSON object of columns.

    {"format": 1, "step": 7, "status": "trained", "one_in": 1,
     "prompts":  [{"uid", "draw", "epoch", "columns", "tags"}, ...],
     "attempts": {"prompt": [0, ...], "sample": [...], "turns": [...], "return": [...], "rewards": [{...}, ...],
                  "advantage": [...], "retries": [...], "info": [...]},
     "turns":    {"shared": [...], "prompt": [...], "response": [...], "finish": [...], "reward": [...]},
     "tokens":   {"ids": i32, "logprobs": f16, "gap": f16, "advantages": f16,
                  "versions": {"values", "counts"}, "loss_mask": {"values", "counts"}},
     "pieces":   {"ID": "text" or [bytes]}, "special": [IDs]}

docs/inspecting.md says what each is. Arrays are base64 of little-endian numbers. What does not exist is left out.
`encode` is called on a thread beside the training: it works on the flat arrays of the groups, with few operations that
are long ones, so that the other thread is not held up.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spurline_rl.flat_turns import FlatTurns
from spurline_rl.trajectory import Group, Trajectory, Turn, trajectories_of

FORMAT = 1
"""Raised with every change that an earlier reader would read wrongly; new names alone are none."""

Status = Literal["trained", "filtered", "given_up"]
"""What became of a prompt: its attempts were trained on; they were all rewarded alike and others took their place
(`zero_variance: refill`); or they failed, and the prompt is quarantined."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What was computed for the response tokens of some attempts, all turns one after another, float32 [A].

    old_logprobs: of the trained model before the update. advantages: as the loss has them.
    """

    old_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]


class PieceTable:
    """What tokens stand for, as JSON values. pieces: bytes of a token. is_special: whether it is no text."""

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces
        self._known: dict[int, str | list[int]] = {}

    def of(self, ids: NDArray[np.int32]) -> tuple[dict[str, str | list[int]], list[int]]:
        """Pieces of these tokens by id, and which of them are special."""
        found = np.unique(ids).tolist()
        table = {str(token_id): self._piece(token_id) for token_id in found}
        return table, [token_id for token_id in found if self._pieces.is_special(token_id)]

    def _piece(self, token_id: int) -> str | list[int]:
        known = self._known.get(token_id)
        if known is None:
            piece: bytes = self._pieces.of(token_id)
            try:
                known = piece.decode()
            except UnicodeDecodeError:
                known = list(piece)
            self._known[token_id] = known
        return known


def encode(
    step: int,
    status: Status,
    groups: Sequence[Group],
    scores: TokenScores | None,
    pieces: PieceTable,
    *,
    prompts_per_epoch: int,
    one_in: int = 1,
) -> bytes:
    """The line of these groups. scores: None for groups that no model has looked at again.

    one_in: of so many groups of the step these are one each.
    """
    flat = FlatTurns.join([group.flat for group in groups])
    attempts = trajectories_of(groups)
    ids, shared = _unshared(groups)
    table, special = pieces.of(ids)
    of_attempts = _of_attempts(groups, attempts)
    of_tokens = _of_tokens(ids, flat)
    if scores is not None:
        of_tokens |= _rescored(scores.old_logprobs, flat)
        constant = _constant(scores.advantages, flat.num_response, of_attempts["turns"])
        if constant is not None:
            of_attempts["advantage"] = constant
        else:
            of_tokens["advantages"] = _half(scores.advantages)
    of_tokens |= {name: _runs(flat.columns[name]) for name in ("versions", "loss_mask") if name in flat.columns}
    block = {
        "format": FORMAT,
        "step": step,
        "status": status,
        "one_in": one_in,
        "prompts": [_prompt(group, prompts_per_epoch) for group in groups],
        "attempts": of_attempts,
        "turns": _of_turns(flat, shared, num_attempts=len(attempts)),
        "tokens": of_tokens,
        "pieces": table,
        "special": special,
    }
    return _line(block)


def _prompt(group: Group, prompts_per_epoch: int) -> dict[str, Any]:
    return {
        "uid": group.uid,
        "draw": group.draw,
        "epoch": group.draw // prompts_per_epoch,
        "columns": dict(group.columns),
        "tags": dict(group.tags),
    }


def _of_attempts(groups: Sequence[Group], attempts: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "prompt": [number for number, group in enumerate(groups) for _ in group.trajectories],
        "sample": [attempt.sample for attempt in attempts],
        "turns": [len(attempt.turns) for attempt in attempts],
        "return": [value for group in groups for value in group.returns.tolist()],
        "rewards": [{name: float(value) for name, value in attempt.rewards.items()} for attempt in attempts],
        "retries": [attempt.retries for attempt in attempts],
        "info": [_plain(attempt.info) for attempt in attempts],
    }


def _of_turns(flat: FlatTurns, shared: Sequence[int], *, num_attempts: int) -> dict[str, Any]:
    """shared: as `_unshared` counts them. Rewards are of a turn only where attempts have several."""
    columns: dict[str, Any] = {
        "shared": shared,
        "prompt": flat.num_prompt.tolist(),
        "response": flat.num_response.tolist(),
        "finish": list(flat.finish_reasons),
    }
    if "rewards" in flat.columns and len(shared) > num_attempts:
        ends = np.cumsum(flat.num_response)
        sums = np.cumsum(np.append(0.0, flat.columns["rewards"].astype(np.float64)))
        columns["reward"] = np.round(sums[ends] - sums[ends - flat.num_response], 6).tolist()
    return columns


def _of_tokens(ids: NDArray[np.int32], flat: FlatTurns) -> dict[str, Any]:
    logprobs = flat.columns.get("logprobs")
    return {"ids": _packed(ids, "<i4")} | ({} if logprobs is None else {"logprobs": _half(logprobs)})


def _rescored(old_logprobs: NDArray[np.float32], flat: FlatTurns) -> dict[str, str]:
    """What the trained model gives the tokens."""
    logprobs = flat.columns.get("logprobs")
    if logprobs is None:
        return {"old_logprobs": _half(old_logprobs)}
    # The difference of two rounded numbers would be rounding where the two models agree.
    return {"gap": _half(old_logprobs - logprobs)}


def encode_lost(step: int, lost: Sequence[Mapping[str, Any]]) -> bytes:
    """The line of prompts that were given up. lost: uid, draw and reason of each."""
    return _line({"format": FORMAT, "step": step, "status": "given_up", "prompts": [dict(prompt) for prompt in lost]})


def _line(block: Mapping[str, Any]) -> bytes:
    text = json.dumps(block, ensure_ascii=False, separators=(",", ":"), default=str)
    # Half a surrogate pair becomes what JSON writes for it.
    return text.encode(errors="backslashreplace") + b"\n"


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment tells may look like anything; what JSON has no form for becomes text."""
    try:
        # JSON has no infinity and no NaN either, though Python writes them.
        json.dumps(info, default=str, allow_nan=False)
    except (TypeError, ValueError):
        return {str(name): str(value) for name, value in info.items()}
    return dict(info)


def _unshared(groups: Sequence[Group]) -> tuple[NDArray[np.int32], list[int]]:
    """The tokens of all turns but for those that are written already, and how many these are of each turn.

    A turn's prompt mostly begins with all that the turn before it held; that of a first turn is the same in a group.
    """
    parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    shared: list[int] = []
    for group in groups:
        first: NDArray[np.int32] | None = None
        for attempt in group.trajectories:
            before = first
            for turn in attempt.turns:
                if first is None:
                    first = turn.prompt_ids
                size = 0 if before is None else _begins_with(turn.prompt_ids, before)
                shared.append(size)
                parts += [turn.prompt_ids[size:], turn.response_ids]
                before = _seen(turn) if len(attempt.turns) > 1 else first
    return np.concatenate(parts), shared


def _begins_with(tokens: NDArray[np.int32], start: NDArray[np.int32]) -> int:
    """The length of `start` where the tokens begin with it, else 0."""
    size = len(start)
    return size if tokens[:size].tobytes() == start.tobytes() else 0


def _seen(turn: Turn) -> NDArray[np.int32]:
    return np.concatenate([turn.prompt_ids, turn.response_ids])


def _constant(values: NDArray[np.float32], lengths: NDArray[np.int64], counts: Sequence[int]) -> list[float] | None:
    """The one value of each attempt's tokens, or None where some attempt has several."""
    turn_of_attempt = np.repeat(np.arange(len(counts)), counts)
    attempt_of_token = np.repeat(turn_of_attempt, lengths)
    constant = np.zeros(len(counts), values.dtype)
    constant[attempt_of_token] = values
    return constant.tolist() if np.array_equal(constant[attempt_of_token], values) else None


def _runs(values: NDArray[Any]) -> dict[str, list[int]]:
    """Values and how often each comes one after the other."""
    if not len(values):
        return {"values": [], "counts": []}
    starts = np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)
    return {"values": values[starts].tolist(), "counts": np.diff(np.append(starts, len(values))).tolist()}


def _half(values: NDArray[np.float32]) -> str:
    largest = float(np.finfo(np.float16).max)
    return _packed(np.clip(values, -largest, largest), "<f2")


def _packed(values: NDArray[Any], dtype: str) -> str:
    return b64encode(values.astype(dtype).tobytes()).decode("ascii")


def unpacked(text: str, dtype: str) -> NDArray[Any]:
    """The array of a base64 text, read-only."""
    return np.frombuffer(b64decode(text), dtype)


def of_runs(runs: Mapping[str, Sequence[int]], dtype: Any) -> NDArray[Any]:
    """The values that `_runs` was given."""
    return np.repeat(np.asarray(runs["values"], dtype), runs["counts"])


def split_groups(groups: Sequence[Group], most_tokens: int) -> Iterator[slice]:
    """Parts of the groups with about `most_tokens` each, at least one group."""
    start, size = 0, 0
    for number, group in enumerate(groups):
        tokens = len(group.flat.tokens)
        if number > start and size + tokens > most_tokens:
            yield slice(start, number)
            start, size = number, 0
        size += tokens
    if start < len(groups):
        yield slice(start, len(groups))
