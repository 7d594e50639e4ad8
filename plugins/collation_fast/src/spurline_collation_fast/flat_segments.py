"""Hold the segments to lay out as flat arrays, the only form that the kernels read.

Place on the way: TokenView or FlatTurns -> FlatSegments -> rows -> TrainingBatch. Both inputs are flat already; this
adds the bounds of each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spurline.data.collators.layout import RESPONSE_COLUMNS, turn_name
from spurline.data.token_store import TokenView
from spurline_rl.trajectory import FlatTurns

Table = NDArray[np.int64]


class FlatColumn(NamedTuple):
    """Values of one token column [V, ...].

    Segment i has `skips[i]` zeros, then the values from `values[begins[i]]` on to its end.
    """

    values: NDArray[Any]
    begins: Table
    skips: Table


class FlatSegments(NamedTuple):
    """n segments that have no place yet. All arrays are read-only.

    Segment i is `tokens[begins[i] : begins[i] + lengths[i]]`. `values` holds `loss_weights` and optional columns, by
    name.
    """

    tokens: NDArray[np.int32]
    begins: Table
    lengths: Table
    values: Mapping[str, FlatColumn]


class SegmentNames(NamedTuple):
    """Names of n segments. A batch keeps them for as long as it lives, so they hold no tokens.

    Attributes:
        uids: Makes the uids of the segments at some positions.
        samples: Number of the sample of each segment, int32 [n].
        turns: Number of the turn of each segment, int32 [n].
        name: Makes the name of the segment at a position, for messages.
    """

    uids: Callable[[Table], NDArray[Any]]
    samples: NDArray[np.int32]
    turns: NDArray[np.int32]
    name: Callable[[int], str]


def flat_samples(view: TokenView) -> tuple[FlatSegments, SegmentNames]:
    """Describe the samples of a view as segments; copies nothing but their bounds."""
    store, indices = view.store, view.indices
    offsets = np.asarray(store.offsets)
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    # Nothing predicts a first token, so its mask is skipped.
    skips = np.minimum(lengths, 1)
    nothing = np.zeros(len(indices), np.int32)
    values = {"loss_weights": FlatColumn(_read_only(store.loss_mask), begins + skips, skips)}
    names = SegmentNames(
        uids=lambda positions: _strings([store.uid(index) for index in indices[positions].tolist()]),
        samples=nothing,
        turns=nothing,
        name=lambda position: f"Sample {view.uid(position)}",
    )
    return FlatSegments(_read_only(store.tokens), begins, lengths, values), names


def flat_turns(turns: FlatTurns) -> tuple[FlatSegments, SegmentNames]:
    """Describe turns as segments; copies nothing but their bounds."""
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
    uids, samples, numbers = list(turns.uids), turns.samples, turns.numbers
    names = SegmentNames(
        uids=lambda positions: _strings([uids[position] for position in positions.tolist()]),
        samples=samples,
        turns=numbers,
        name=lambda position: turn_name(uids[position], int(samples[position]), int(numbers[position])),
    )
    return FlatSegments(turns.tokens, begins, lengths, values), names


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that numba sees one type for values in memory and for mapped ones."""
    view = np.asarray(values).view()
    view.flags.writeable = False
    return view


def _starts(lengths: Table) -> Table:
    return np.cumsum(lengths) - lengths


def _strings(values: list[str]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array
