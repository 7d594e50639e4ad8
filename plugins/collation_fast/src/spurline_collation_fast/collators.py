"""Vectorized collators `padded`, `packed` and `rollouts`. They make the reference collators' batches, bit for bit.

Data flow: TokenView or FlatTurns -> FlatSegments -> rows -> TrainingBatch. Both inputs are flat arrays already,
so FlatSegments refers to their tokens and copies only the bounds of segments. This module plans the rows. The loops
over samples and tokens are compiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packing import PackingAlgorithm, even_capacities, refuse_what_cannot_fit, round_up
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline_collation_fast.kernels import compiled
from spurline_collation_fast.row_writer import FlatColumn, FlatSegments, Placement, RowWriter, Table
from spurline_rl.rollout_batches import RESPONSE_COLUMNS
from spurline_rl.trajectory import FlatTurns, Group

Rows = tuple[Table, Table, Table]
"""Positions of the samples, row by row; the offset of each row in them; and the first column of each sample."""


def flat_samples(view: TokenView) -> FlatSegments:
    """Describe the samples of a view as segments."""
    store, indices = view.store, view.indices
    offsets = np.asarray(store.offsets)
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    # No prediction exists for the first token of a sample, so its mask is skipped.
    skips = np.minimum(lengths, 1)
    nothing = np.zeros(len(indices), np.int32)
    tokens = _read_only(store.tokens)
    return FlatSegments(
        tokens=tokens,
        begins=begins,
        lengths=lengths,
        # All tokens of a sample are in one place.
        rest=FlatColumn(tokens, begins, lengths),
        values={"loss_weights": FlatColumn(_read_only(store.loss_mask), begins + skips, skips)},
        uids=lambda positions: np.array([store.uid(index) for index in indices[positions].tolist()], object),
        samples=nothing,
        turns=nothing,
    )


def flat_turns(turns: FlatTurns) -> FlatSegments:
    """Describe turns as segments."""
    # numba would compile the loops again for read-only lengths, which only joined blocks have.
    prompts, lengths = turns.num_prompt.copy(), turns.lengths
    response_begins = _starts(turns.num_response)
    # No prediction exists for the first token of a segment, even if it is not a prompt token.
    skips = np.maximum(prompts, np.minimum(lengths, 1))
    values = {"loss_weights": FlatColumn(turns.columns["loss_mask"], response_begins + (skips - prompts), skips)}
    for name, field in RESPONSE_COLUMNS.items():
        if field in turns.columns:
            values[name] = FlatColumn(turns.columns[field], response_begins, prompts)
    if turns.routed_experts is not None:
        # Prompt tokens have routed experts too, so nothing is skipped.
        values["routed_experts"] = FlatColumn(turns.routed_experts, _starts(lengths), np.zeros_like(lengths))
    uids = list(turns.uids)
    return FlatSegments(
        tokens=turns.prompts,
        begins=turns.prompt_starts,
        lengths=lengths,
        rest=FlatColumn(turns.responses, response_begins, prompts),
        values=values,
        uids=lambda positions: np.array([uids[position] for position in positions.tolist()], object),
        samples=turns.samples,
        turns=turns.numbers,
    )


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that numba sees the same type for arrays in memory and for mapped arrays."""
    view = np.asarray(values).view()
    view.flags.writeable = False
    return view


def _starts(lengths: Table) -> Table:
    return np.cumsum(lengths) - lengths


class FastPaddedCollator:
    """Lays out one sample per row. Batches are valid until released; see `TrainingBatch`."""

    def __init__(self, config: PaddedCollatorConfig, pad_token_id: int, layout: ParallelLayout) -> None:
        self._config = config
        self._ranks = layout.data
        self._multiple = math.lcm(config.pad_to_multiple_of, layout.align_to)
        self._writer = RowWriter(pad_token_id)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """Return rows [R, L]. R is a multiple of the number of ranks. L is the longest sample, rounded up."""
        return self._lay_out(flat_samples(samples), _dealt_out)

    def _lay_out(self, segments: FlatSegments, rows_of: Callable[[int, int], Rows]) -> TrainingBatch:
        lengths = segments.lengths
        positions, row_offsets, starts = rows_of(len(lengths), self._ranks)
        length = round_up(int(lengths.max(initial=1)), self._multiple)
        if self._config.pad_side == "left":
            starts = length - lengths[positions]
        # The user of a batch may write to its offsets, so each batch gets a copy of the cached offsets.
        return self._writer.write(segments, Placement(positions, row_offsets.copy(), starts, length))


@functools.lru_cache(maxsize=8)
def _dealt_out(count: int, num_ranks: int) -> Rows:
    """Give sample i to rank i mod `num_ranks`. A rank's rows are adjacent, and rows beyond the samples stay empty."""
    sample_of_row = np.arange(round_up(max(count, 1), num_ranks)).reshape(-1, num_ranks).T.ravel()
    filled = sample_of_row < count
    row_offsets = np.zeros(len(filled) + 1, np.int64)
    np.cumsum(filled, out=row_offsets[1:])
    return sample_of_row[filled], row_offsets, np.zeros(count, np.int64)


class FastPackedCollator:
    """Lays out several samples per row. Batches are valid until released; see `TrainingBatch`."""

    def __init__(self, config: PackedCollatorConfig, pad_token_id: int, layout: ParallelLayout) -> None:
        self._capacity = config.max_tokens
        self._ranks = layout.data
        self._align_to = math.lcm(config.align_to, layout.align_to)
        self._algorithm: PackingAlgorithm = config.algorithm_for(layout.data)
        self._fixed_length = config.pad_to_max or layout.pipeline > 1
        self._writer = RowWriter(pad_token_id)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """Return rows [R, L]. R is a multiple of the number of ranks, and L is at most `max_tokens`.

        Raises DataError if a sample, rounded up to the alignment, is longer than `max_tokens`.
        """
        segments = flat_samples(samples)
        capacity, align_to = self._capacity, self._align_to
        if segments.lengths.max(initial=0) > capacity // align_to * align_to:
            aligned = -(-segments.lengths // align_to) * align_to
            refuse_what_cannot_fit(segments.lengths.tolist(), aligned.tolist(), capacity, samples.uid)
        positions, row_offsets, columns, used, straggler = pack_rows(
            segments.lengths, align_to, capacity, self._ranks, self._algorithm
        )
        length = capacity if self._fixed_length else max(align_to, used)
        placement = Placement(positions, row_offsets, columns, length)
        return self._writer.write(segments, placement, {"packing/straggler": straggler})


class FastRolloutsCollator(FastPaddedCollator):
    """Lays out one turn per row. Tokenized samples are laid out as by `padded`."""

    def collate_rollouts(self, groups: Sequence[Group]) -> TrainingBatch:
        """Return the turns in order, as rows [R, L]. Empty rows at the end make R a multiple of the rank count."""
        return self._lay_out(flat_turns(FlatTurns.join([group.flat for group in groups])), _in_order)


@functools.lru_cache(maxsize=8)
def _in_order(count: int, num_ranks: int) -> Rows:
    num_rows = round_up(max(count, 1), num_ranks)
    return np.arange(count), np.minimum(np.arange(num_rows + 1), count), np.zeros(count, np.int64)


def pack_rows(
    lengths: Table, align_to: int, capacity: int, num_ranks: int, algorithm: PackingAlgorithm
) -> tuple[Table, Table, Table, int, float]:
    """Pack samples into the rows that core's `packing.pack` would return for their aligned lengths.

    Args:
        lengths: Tokens of each sample; at most `capacity` when rounded up to `align_to`.
        align_to: Samples begin at multiples of this.
        capacity: Tokens that a row may hold.
        num_ranks: The number of rows R is a multiple of this. The rows of a rank are adjacent.
        algorithm: The packing algorithm.

    Returns:
        Sample positions, row by row [S]; the offset of each row in them [R + 1]; the column at which each segment
        begins [S]; the tokens of the fullest row; and the tokens of the fullest rank divided by the mean of all ranks.
    """
    aligned = lengths if align_to == 1 else -(-lengths // align_to) * align_to
    order, row_of = (np.empty(len(lengths), np.int64) for _ in range(2))
    compiled.longest_first(aligned, np.zeros(int(aligned.max(initial=0)) + 2, np.int64), order)
    if algorithm == "ffd":
        num_rows = compiled.first_fit(aligned, order, row_of, _empty_rows(_most_rows(aligned, capacity), capacity))
    else:
        num_rows = _fit_evenly(aligned, order, capacity, num_ranks, row_of)
    num_all = round_up(max(num_rows, 1), num_ranks)
    counts, donors, last, free = np.zeros((4, num_all), np.int64)
    compiled.fill_missing_rows(order, row_of, num_rows, counts, donors, last, np.empty(len(lengths), np.int64))
    positions, columns = (np.empty(len(lengths), np.int64) for _ in range(2))
    row_offsets = np.empty(num_all + 1, np.int64)
    compiled.list_rows(order, row_of, counts, num_ranks, row_offsets, free, positions)
    longest, straggler = compiled.place_in_rows(aligned, positions, row_offsets, num_ranks, columns)
    return positions, row_offsets, columns, longest, straggler


def _most_rows(lengths: Table, capacity: int) -> int:
    """Return the most rows that first fit can open.

    Any two rows together hold more than `capacity`. Otherwise the first sample of the later row would have fitted into
    the earlier row.
    """
    return min(len(lengths), 2 * int(lengths.sum()) // capacity + 1)


def _empty_rows(num_rows: int, capacity: int) -> Table:
    """Return the tree that `first_fit` needs for this many empty rows."""
    leaves = 1 << max(0, num_rows - 1).bit_length()
    return np.full(2 * leaves, capacity, np.int64)


def _fit_evenly(lengths: Table, order: Table, capacity: int, num_ranks: int, row_of: Table) -> int:
    """Pack samples as core's `packing.multifit` does, and return the number of rows."""
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    num_rows = round_up(max(-(-total // capacity), 1), num_ranks)
    while True:
        for lower in even_capacities(max(-(-total // num_rows), longest), capacity):
            at_most = num_rows if lower < capacity else _most_rows(lengths, capacity)
            needed = int(compiled.first_fit(lengths, order, row_of, _empty_rows(at_most, lower)))
            if needed <= num_rows:
                return needed
        num_rows = round_up(needed, num_ranks)
