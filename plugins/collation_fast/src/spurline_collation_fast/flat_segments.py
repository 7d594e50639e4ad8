"""What is to be laid out, in flat arrays: the one form that the kernels read.

Place on the way: TokenView or trajectories -> FlatSegments -> rows -> TrainingBatch. A view of a store is flat already
and costs nothing; trajectories are joined once, column by column.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spurline.data.collators.layout import RESPONSE_COLUMNS, turn_name
from spurline.data.token_store import TokenView
from spurline.rl.trajectory import Trajectory
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
    fields = {name: [*map(attrgetter(name), turns)] for name in _FIELDS}
    uids = [trajectory.uid for trajectory in trajectories]
    counts = np.array([len(trajectory.turns) for trajectory in trajectories], np.int64)
    owners = np.repeat(np.arange(len(trajectories)), counts)
    samples = np.array([trajectory.sample for trajectory in trajectories], np.int32)[owners]
    numbers = (np.arange(len(turns)) - _starts(counts)[owners]).astype(np.int32)
    num_prompt, num_response = ([*map(len, fields[name])] for name in ("prompt_ids", "response_ids"))
    prompts, responses = np.array(num_prompt, np.int64), np.array(num_response, np.int64)
    lengths = prompts + responses
    begins, response_begins = _starts(lengths), _starts(responses)
    # Nothing predicts the first token of a segment, even where there is no prompt.
    skips = np.maximum(prompts, np.minimum(lengths, 1))
    both = itertools.chain.from_iterable(zip(fields["prompt_ids"], fields["response_ids"], strict=True))
    weights = _joined(fields["loss_mask"], num_response, np.uint8)
    return FlatSegments(
        tokens=_join([*both], np.int32),
        begins=begins,
        lengths=lengths,
        values={
            "loss_weights": FlatColumn(weights, response_begins + (skips - prompts), skips),
            **_optional_columns(fields, num_response, FlatColumn(np.empty(0), response_begins, prompts)),
            **_routed_experts(fields["routed_experts"], lengths, begins),
        },
        uids=lambda positions: _strings(uids[owner] for owner in owners[positions].tolist()),
        samples=samples,
        turns=numbers,
        name=lambda position: turn_name(uids[owners[position]], int(samples[position]), int(numbers[position])),
    )


_FIELDS = ("prompt_ids", "response_ids", "loss_mask", "routed_experts", *RESPONSE_COLUMNS.values())

Parts = list[Any]
"""What each turn has in one field: arrays, or None."""


def _optional_columns(fields: Mapping[str, Parts], counts: list[int], like: FlatColumn) -> dict[str, FlatColumn]:
    """The columns that every turn has; one that only some have is left out."""
    columns: dict[str, FlatColumn] = {}
    for name, field in RESPONSE_COLUMNS.items():
        parts = fields[field]
        if _all_given(parts):
            columns[name] = FlatColumn(_joined(parts, counts, parts[0].dtype), like.begins, like.skips)
    return columns


def _routed_experts(parts: Parts, lengths: Table, begins: Table) -> dict[str, FlatColumn]:
    """One entry per token, prompt included."""
    if not _all_given(parts):
        return {}
    shape = (-1, *parts[0].shape[1:])
    values = _joined(parts, lengths.tolist(), np.int16).reshape(shape)
    return {"routed_experts": FlatColumn(values, begins, np.zeros_like(begins))}


def _all_given(parts: Parts) -> bool:
    return bool(parts) and type(None) not in set(map(type, parts))


def _joined(parts: Parts, counts: list[int], dtype: Any) -> NDArray[Any]:
    assert [*map(len, parts)] == counts, "a column of a turn has not one value per token"
    return _join(parts, dtype)


def _join(parts: Parts, dtype: Any) -> NDArray[Any]:
    """End to end, read-only, flat. Bytes: for many short arrays that takes half the time of `np.concatenate`."""
    try:
        return np.frombuffer(b"".join(parts), dtype)
    except TypeError:
        # An array with gaps, such as every second value of another one.
        return read_only(np.concatenate([part.ravel() for part in parts]).astype(dtype, copy=False))


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
