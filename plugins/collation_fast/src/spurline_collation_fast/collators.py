"""Collators `padded`, `packed` and `rollouts`, vectorized: equal bit for bit to those of `spurline.data.collators`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packing import refuse_what_cannot_fit, round_up
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenView
from spurline.protocols.collator import ParallelLayout
from spurline_collation_fast.flat_segments import (
    FlatSegments,
    SegmentNames,
    flat_samples,
    names_of,
    segments_of,
    shared_values,
)
from spurline_collation_fast.kernels import ALGORITHMS, Kernels, Table, best_kernels
from spurline_collation_fast.row_writer import Placement, RowWriter
from spurline_rl.trajectory import FlatTurns, Trajectory

Rows = tuple[Table, Table, Table]
"""Sample positions row by row, row offsets into them, and zeros for each: for as many samples, the same every time."""


class FastPaddedCollator:
    """Batches are valid until released; see `TrainingBatch`."""

    def __init__(
        self,
        config: PaddedCollatorConfig,
        pad_token_id: int,
        layout: ParallelLayout,
        kernels: Kernels | None = None,
    ) -> None:
        self._config = config
        self._ranks = layout.data
        self._multiple = math.lcm(config.pad_to_multiple_of, layout.align_to)
        self._writer = RowWriter(pad_token_id, kernels or best_kernels())

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """One row a sample, [R, L]: R a multiple of the ranks, L the longest sample, rounded up as configured."""
        segments, names = flat_samples(samples)
        return self._writer.write(segments, names, self._place(segments.lengths, _dealt_out))

    def _place(self, lengths: Table, rows_of: Callable[[int, int], Rows]) -> Placement:
        """rows_of: which segment each row holds, from the number of segments and of ranks."""
        positions, row_offsets, starts = rows_of(len(lengths), self._ranks)
        # A batch hands its offsets out, and what somebody writes there must not reach the next one.
        row_offsets = row_offsets.copy()
        length = round_up(int(lengths.max(initial=1)), self._multiple)
        if self._config.pad_side == "left":
            starts = length - lengths[positions]
        return Placement(positions, row_offsets, starts, length)


@functools.lru_cache(maxsize=8)
def _dealt_out(count: int, num_ranks: int) -> Rows:
    """Sample i goes to rank i mod ranks, and the rows of a rank lie together; rows beyond the samples stay empty."""
    sample_of_row = np.arange(round_up(max(count, 1), num_ranks)).reshape(-1, num_ranks).T.ravel()
    filled = sample_of_row < count
    row_offsets = np.zeros(len(filled) + 1, np.int64)
    np.cumsum(filled, out=row_offsets[1:])
    return sample_of_row[filled], row_offsets, np.zeros(count, np.int64)


class FastPackedCollator:
    """Batches are valid until released; see `TrainingBatch`."""

    def __init__(
        self,
        config: PackedCollatorConfig,
        pad_token_id: int,
        layout: ParallelLayout,
        kernels: Kernels | None = None,
    ) -> None:
        self._config = config
        self._ranks = layout.data
        self._align_to = math.lcm(config.align_to, layout.align_to)
        self._algorithm = ALGORITHMS.index(config.algorithm_for(layout.data))
        self._fixed_length = config.pad_to_max or layout.pipeline > 1
        self._kernels = kernels or best_kernels()
        self._writer = RowWriter(pad_token_id, self._kernels)

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """Rows of several samples, [R, L], L <= max_tokens, R a multiple of the ranks.

        Raises DataError naming a sample that is longer than `max_tokens` when aligned.
        """
        return self._pack(*flat_samples(samples), "lower data.max_length")

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """The same for turns, each in exactly one segment. Raises DataError naming a turn that cannot fit."""
        return self.collate_flat([FlatTurns.of(trajectories)])

    def collate_flat(self, blocks: Sequence[FlatTurns]) -> TrainingBatch:
        """The same for turns that are flat already. Rows may hold turns of any blocks, so these are joined first."""
        turns = FlatTurns.join(blocks)
        return self._pack(segments_of(turns), names_of([turns]), "limit prompts and responses")

    def _pack(self, segments: FlatSegments, names: SegmentNames, shorter: str) -> TrainingBatch:
        """shorter: how a user makes segments shorter, for the message about one that cannot fit."""
        capacity, align_to = self._config.max_tokens, self._align_to
        if segments.lengths.max(initial=0) > capacity // align_to * align_to:
            aligned = -(-segments.lengths // align_to) * align_to
            refuse_what_cannot_fit(segments.lengths.tolist(), aligned.tolist(), capacity, names.name, shorter)
        positions, row_offsets, columns, used, straggler = self._kernels.pack_rows(
            segments.lengths, align_to, capacity, self._ranks, self._algorithm
        )
        length = capacity if self._fixed_length else max(align_to, used)
        placement = Placement(positions, row_offsets, columns, length)
        return self._writer.write(segments, names, placement, {"packing/straggler": straggler})


class FastRolloutsCollator(FastPaddedCollator):
    """Also collates tokenized samples as `padded` does."""

    def collate_rollouts(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """One row a turn, [R, L], in order; padding rows, which make R a multiple of the ranks, come last."""
        return self.collate_flat([FlatTurns.of(trajectories)])

    def collate_flat(self, blocks: Sequence[FlatTurns]) -> TrainingBatch:
        """The same for turns that are flat already."""
        pieces = [*_pieces([block for block in blocks if len(block)])]
        if len(pieces) < 2:
            turns = FlatTurns.join(blocks)
            return self._writer.write(segments_of(turns), names_of([turns]), self._place(turns.lengths, _in_order))
        filled = [block for piece in pieces for block in piece]
        lengths = np.concatenate([block.lengths for block in filled])
        return self._writer.write_pieces(
            (segments_of(FlatTurns.join(piece)) for piece in pieces),
            shared_values(filled),
            lengths,
            names_of(filled),
            self._place(lengths, _in_order),
        )


@functools.lru_cache(maxsize=8)
def _in_order(count: int, num_ranks: int) -> Rows:
    num_rows = round_up(max(count, 1), num_ranks)
    return np.arange(count), np.minimum(np.arange(num_rows + 1), count), np.zeros(count, np.int64)


_OWN_PIECE_TOKENS = 1 << 14
"""Tokens of a block from which on reading it where it is costs less than joining it with others."""
_PIECE_TOKENS = 1 << 18
"""Tokens that are joined at most, so that what was joined is still in a cache when it is laid out."""


def _pieces(blocks: Sequence[FlatTurns]) -> Iterator[list[FlatTurns]]:
    """The blocks in order: large ones alone, small ones with their neighbours."""
    piece: list[FlatTurns] = []
    joined = last = 0
    for block in blocks:
        size = len(block.tokens)
        if piece and (max(last, size) >= _OWN_PIECE_TOKENS or joined + size > _PIECE_TOKENS):
            yield piece
            piece, joined = [], 0
        piece.append(block)
        joined, last = joined + size, size
    if piece:
        yield piece
