"""Hold the segments to lay out as flat arrays, the only form that the kernels read.

Place on the way: TokenView or FlatTurns -> FlatSegments -> rows -> TrainingBatch. Both inputs are flat already; this
adds the bounds of each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spurline.data.collators.layout import RESPONSE_COLUMNS, turn_name
from spurline.data.token_store import TokenView
from spurline_collation_fast.kernels import Table
from spurline_rl.trajectory import FlatTurns, shared_columns


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
    columns by name. tokens and values are read-only arrays.
    """

    tokens: NDArray[np.int32]
    begins: Table
    lengths: Table
    values: Mapping[str, FlatColumn]


class SegmentNames(NamedTuple):
    """Names of n segments, apart from their tokens: a batch keeps it for as long as it lives.

    uids: makes the uid of each of these segments, object [k] for positions int64 [k]. samples, turns: int32 [n]. name:
    what messages call the segment at a position.
    """

    uids: Callable[[Table], NDArray[Any]]
    samples: NDArray[np.int32]
    turns: NDArray[np.int32]
    name: Callable[[int], str]


def flat_samples(view: TokenView) -> tuple[FlatSegments, SegmentNames]:
    """The samples of a view; nothing is copied but their bounds."""
    store, indices = view.store, view.indices
    offsets = np.asarray(store.offsets)
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    # Nothing predicts a first token, so its mask is skipped.
    skips = np.minimum(lengths, 1)
    nothing = np.zeros(len(indices), np.int32)
    values = {"loss_weights": FlatColumn(read_only(store.loss_mask), begins + skips, skips)}
    names = SegmentNames(
        uids=lambda positions: _strings(store.uid(index) for index in indices[positions].tolist()),
        samples=nothing,
        turns=nothing,
        name=lambda position: f"Sample {view.uid(position)}",
    )
    return FlatSegments(read_only(store.tokens), begins, lengths, values), names


def segments_of(turns: FlatTurns) -> FlatSegments:
    """Turns in flat arrays; nothing is copied but their bounds."""
    prompts, lengths = turns.num_prompt, turns.lengths
    begins, response_begins = _starts(lengths), _starts(turns.num_response)
    # Nothing predicts the first token of a segment, even where there is no prompt.
    skips = np.maximum(prompts, np.minimum(lengths, 1))
    values = {"loss_weights": FlatColumn(turns.columns["loss_mask"], response_begins + (skips - prompts), skips)}
    for name, field in RESPONSE_COLUMNS.items():
        if field in turns.columns:
            values[name] = FlatColumn(turns.columns[field], response_begins, prompts)
    if turns.routed_experts is not None:
        # One entry per token, prompt included.
        values["routed_experts"] = FlatColumn(turns.routed_experts, begins, np.zeros_like(begins))
    return FlatSegments(turns.tokens, begins, lengths, values)


def shared_values(blocks: Sequence[FlatTurns]) -> dict[str, tuple[int, ...]]:
    """Names of the values that the turns of all blocks have, with the shape of what each has per token."""
    fields = set(shared_columns(blocks))
    shapes: dict[str, tuple[int, ...]] = {name: () for name, field in RESPONSE_COLUMNS.items() if field in fields}
    experts = [block.routed_experts for block in blocks if block.routed_experts is not None]
    if len(experts) == len(blocks):
        shapes["routed_experts"] = experts[0].shape[1:]
    return {"loss_weights": (), **shapes}


def names_of(blocks: Sequence[FlatTurns]) -> SegmentNames:
    """Name the turns of these blocks; keeps none of their tokens."""
    uids = [uid for block in blocks for uid in block.uids]
    none = np.empty(0, np.int32)
    samples = np.concatenate([none, *(block.samples for block in blocks)])
    numbers = np.concatenate([none, *(block.numbers for block in blocks)])
    return SegmentNames(
        uids=lambda positions: _strings(uids[position] for position in positions.tolist()),
        samples=samples,
        turns=numbers,
        name=lambda position: turn_name(uids[position], int(samples[position]), int(numbers[position])),
    )


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
