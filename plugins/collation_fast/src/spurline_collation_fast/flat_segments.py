"""What is to be laid out, in flat arrays: the one form that the kernels read.

Place on the way: TokenView or trajectories -> FlatSegments -> rows -> TrainingBatch. A view of a store is flat already
and costs nothing; trajectories are joined once, column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spurline.data.token_store import TokenView
from spurline.data.turn_segments import turn_name
from spurline.rl.trajectory import Trajectory, Turn
from spurline_collation_fast.kernels import Table


class FlatColumn(NamedTuple):
    """Values of one token column.

    values: [V, ...]. Segment i has `skips[i]` zeros, then values from `values[begins[i]]` on to its end.
    """

    values: NDArray[Any]
    begins: Table
    skips: Table


class FlatSegments(NamedTuple):
    """n segments, not placed yet.

    tokens: int32 [T]; segment i is `tokens[begins[i] : begins[i] + lengths[i]]`. values: `loss_weights` and optional
    columns by name. tokens and values are read-only arrays. uids: makes the uid of each of these segments, object [k]
    for positions int64 [k]. samples, turns: int32 [n]. name: what messages call the segment at a position.
    """

    tokens: NDArray[np.int32]
    begins: Table
    lengths: Table
    values: Mapping[str, FlatColumn]
    uids: Callable[[Table], NDArray[Any]]
    samples: NDArray[np.int32]
    turns: NDArray[np.int32]
    name: Callable[[int], str]


def flat_samples(view: TokenView) -> FlatSegments:
    """The samples of a view; nothing is copied but their bounds."""
    store, indices = view.store, view.indices
    offsets = np.asarray(store.offsets)
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    # Nothing predicts a first token, so its mask is skipped.
    skips = np.minimum(lengths, 1)
    nothing = np.zeros(len(indices), np.int32)
    return FlatSegments(
        tokens=read_only(store.tokens),
        begins=begins,
        lengths=lengths,
        values={"loss_weights": FlatColumn(read_only(store.loss_mask), begins + skips, skips)},
        uids=lambda positions: _strings(store.uid(index) for index in indices[positions].tolist()),
        samples=nothing,
        turns=nothing,
        name=lambda position: f"Sample {view.uid(position)}",
    )


def flat_turns(trajectories: Sequence[Trajectory]) -> FlatSegments:
    """The turns of all trajectories, in order, joined into flat arrays."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    counts = [len(trajectory.turns) for trajectory in trajectories]
    uids = np.repeat(_strings(trajectory.uid for trajectory in trajectories), counts)
    samples = np.repeat(np.array([trajectory.sample for trajectory in trajectories], np.int32), counts)
    numbers = np.array([number for count in counts for number in range(count)], np.int32)
    prompts = np.array([len(turn.prompt_ids) for turn in turns], np.int64)
    responses = np.array([len(turn.response_ids) for turn in turns], np.int64)
    lengths = prompts + responses
    begins, response_begins = _starts(lengths), _starts(responses)
    # Nothing predicts the first token of a segment, even where there is no prompt.
    skips = np.maximum(prompts, np.minimum(lengths, 1))
    weights = read_only(_joined([turn.loss_mask for turn in turns], responses, np.uint8))
    return FlatSegments(
        tokens=read_only(_join([part for turn in turns for part in (turn.prompt_ids, turn.response_ids)], np.int32)),
        begins=begins,
        lengths=lengths,
        values={
            "loss_weights": FlatColumn(weights, response_begins + (skips - prompts), skips),
            **_optional_columns(turns, responses, FlatColumn(np.empty(0), response_begins, prompts)),
            **_routed_experts(turns, lengths, begins),
        },
        uids=lambda positions: uids[positions],
        samples=samples,
        turns=numbers,
        name=lambda position: turn_name(str(uids[position]), int(samples[position]), int(numbers[position])),
    )


_TURN_FIELDS = {
    "rollout_logprobs": "logprobs",
    "token_versions": "versions",
    "rewards": "rewards",
    "advantages": "advantages",
    "values": "values",
}
"""Optional columns with one value per response token -> field of Turn."""


def _optional_columns(turns: Sequence[Turn], responses: Table, like: FlatColumn) -> dict[str, FlatColumn]:
    """The columns that every turn has; one that only some have is left out."""
    columns: dict[str, FlatColumn] = {}
    for name, field in _TURN_FIELDS.items():
        parts = [getattr(turn, field) for turn in turns]
        if parts and all(part is not None for part in parts):
            columns[name] = FlatColumn(read_only(_joined(parts, responses, parts[0].dtype)), like.begins, like.skips)
    return columns


def _routed_experts(turns: Sequence[Turn], lengths: Table, begins: Table) -> dict[str, FlatColumn]:
    """One entry per token, prompt included."""
    parts = [turn.routed_experts for turn in turns if turn.routed_experts is not None]
    if not parts or len(parts) < len(turns):
        return {}
    return {"routed_experts": FlatColumn(read_only(_joined(parts, lengths, np.int16)), begins, np.zeros_like(begins))}


def _joined(parts: Sequence[NDArray[Any]], lengths: Table, dtype: Any) -> NDArray[Any]:
    assert list(map(len, parts)) == lengths.tolist(), "a column of a turn has not one value per token"
    return _join(parts, dtype)


def _join(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def read_only(values: NDArray[Any]) -> NDArray[Any]:
    """So that numba sees one type for values in memory and for mapped ones, and compiles once."""
    view = np.asarray(values).view()
    view.flags.writeable = False
    return view


def _starts(lengths: Table) -> Table:
    return np.cumsum(lengths) - lengths


def _strings(values: Any) -> NDArray[Any]:
    strings = list(values)
    array = np.empty(len(strings), object)
    array[:] = strings
    return array
