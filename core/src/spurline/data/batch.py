"""Define `TrainingBatch`, the row-aligned columns in which all data reaches a backend.

A collator makes the batch, the update cuts it into mini-batches, and the backend trains on them. SFT and RL use the
same columns. A row has one or more segments, and each segment is a sequence. A padded batch has one segment per row.
Select and pad rows with the methods here, which keep all columns aligned. The functions here compute sums by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOKEN_COLUMNS: dict[str, torch.dtype] = {
    "input_ids": torch.int32,
    "segment_ids": torch.int32,
    "position_ids": torch.int32,
    "loss_weights": torch.float32,
}
"""Columns that every batch has, `[rows, length]` with one value per token, and their dtypes on the host. On the device,
integers are int64, as indices must be."""

MAY_BE_WIDE = ("input_ids", "position_ids")
"""Columns that may be int64 on the host too, which takes more memory and copying."""

OPTIONAL_TOKEN_COLUMNS: dict[str, torch.dtype] = {
    "rollout_logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "reference_logprobs": torch.float32,
    "values": torch.float32,
    "rewards": torch.float32,
    "returns": torch.float32,
    "advantages": torch.float32,
    "correction_factors": torch.float32,
    "token_versions": torch.int32,
    "routed_experts": torch.int16,
    "support": torch.int32,
    "pair_ids": torch.int32,
    "labels": torch.int32,
}
"""Columns that RL and preference data add. For the n-th pair of a batch, counted from 1, `pair_ids` is n on the chosen
and -n on the rejected answer. `labels` is 1 on good and -1 on bad answers, and 0 on answers to other prompts, which
only measure a divergence. `routed_experts` is `[rows, length, layers, top_k]`: the experts that the engine chose in
each decoder layer for the token AT this position, or -1. `support` is `[rows, length, K]`: the ids of the tokens among
which the token AT this position was sampled, padded with -1; logprobs are renormalised over them. `correction_factors`
weigh the policy's loss; the reduction applies them."""

ROUTED_EXPERTS = "routed_experts"
"""Name of the only optional column that is read at all tokens. The others are read only at tokens with loss."""

SUPPORT = "support"
"""Name of the column with the tokens that top_p and top_k kept when a token was sampled."""

SEGMENT_COLUMNS: dict[str, Any] = {"uid": object, "sample": np.int32, "turn": np.int32, "length": np.int32}
"""Ragged columns with one value per segment: the prompt's name, the numbers of attempt and turn, the token count."""


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of tokens with all columns that belong to them. The batch is read-only, and valid until `release()`.

    Attributes:
        tokens: Tensors `[R, L, ...]` by name of the column; at least TOKEN_COLUMNS. `segment_ids` is 0 on padding and
            1, 2, ... on the segments of a row. `position_ids` begin at 0 in each segment. `loss_weights[r, t]` weighs
            the loss on predicting the token AT t: 0 on prompts, on the first token of each segment and on padding.
        segments: Ragged columns by name, with one value per segment in the order of the row.
        unit_ids: int64 [R]; rows with the same unit id (preference pairs) stay in one micro-batch and on one rank.
        is_padding_row: bool [R]; rows without tokens, which fill up the share of a data-parallel rank.
        info: Numbers about the layout for metrics, such as `packing/fill` in 0..1.
        on_release: Called by `release()` to return reused buffers to their owner.
    """

    tokens: Mapping[str, Tensor]
    segments: Mapping[str, Ragged]
    unit_ids: Tensor
    is_padding_row: Tensor
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    on_release: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return self.tokens["input_ids"].shape[0]

    @property
    def length(self) -> int:
        return self.tokens["input_ids"].shape[1]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens without padding."""
        return int(torch.count_nonzero(self.tokens["segment_ids"]))

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens with a loss weight other than 0."""
        return int(torch.count_nonzero(self.tokens["loss_weights"]))

    @property
    def num_trained_segments(self) -> int:
        """Return the number of segments with loss tokens."""
        numbers = segment_numbers(self)[self.tokens["loss_weights"] != 0]
        return int(torch.count_nonzero(torch.bincount(numbers)))

    def take(self, rows: Sequence[int] | NDArray[np.int64] | Tensor) -> TrainingBatch:
        """Return the chosen rows in that order, every column included."""
        index = np.asarray(rows, dtype=np.int64)
        return self._chosen(torch.from_numpy(index), lambda column: column.take(index))

    def between(self, start: int, stop: int) -> TrainingBatch:
        """Return the rows from `start` to before `stop` as views of the columns, valid as long as this batch is."""
        return self._chosen(slice(start, stop), lambda column: column.between(start, stop))

    def _chosen(self, rows: Tensor | slice, of_segments: Callable[[Ragged], Ragged]) -> TrainingBatch:
        return replace(
            self,
            tokens={name: column[rows] for name, column in self.tokens.items()},
            segments={name: of_segments(column) for name, column in self.segments.items()},
            unit_ids=self.unit_ids[rows],
            is_padding_row=self.is_padding_row[rows],
            on_release=None,
        )

    def pad_rows(self, multiple: int) -> TrainingBatch:
        """Return the batch with padding rows appended, up to a multiple of `multiple` (also for a batch of 0 rows)."""
        target = max(multiple, -(-self.num_rows // multiple) * multiple)
        missing = target - self.num_rows
        if missing == 0:
            return self
        first_unit = int(self.unit_ids.max()) + 1 if self.num_rows else 0
        return replace(
            self,
            tokens={
                name: torch.cat([column, column.new_zeros((missing, *column.shape[1:]))])
                for name, column in self.tokens.items()
            },
            segments={name: column.append_empty(missing) for name, column in self.segments.items()},
            unit_ids=torch.cat([self.unit_ids, torch.arange(first_unit, first_unit + missing)]),
            is_padding_row=torch.cat([self.is_padding_row, torch.ones(missing, dtype=torch.bool)]),
            on_release=None,
        )

    def without_padding_rows(self) -> TrainingBatch:
        """Return the batch without padding rows. If padding rows come last, the columns are views."""
        real = torch.nonzero(~self.is_padding_row).flatten()
        if len(real) == self.num_rows:
            return self
        are_first = len(real) == 0 or int(real[-1]) == len(real) - 1
        return self.between(0, len(real)) if are_first else self.take(real)

    def drop_padding_rows(self, values: Tensor) -> Tensor:
        """Return `values` [R, ...] that were computed for this batch, without padding rows."""
        assert values.shape[0] == self.num_rows, (values.shape, self.num_rows)
        padding = self.is_padding_row.to(values.device)
        return values[~padding] if bool(padding.any()) else values

    def with_tokens(self, **columns: Tensor) -> TrainingBatch:
        """Return a copy with token columns added or replaced, each `[R, L, ...]`."""
        return replace(self, tokens={**self.tokens, **columns}, on_release=None)

    def release(self) -> None:
        """Return the buffers to their owner. No column may be read after this."""
        if self.on_release is not None:
            self.on_release()


def segment_numbers(batch: TrainingBatch) -> Tensor:
    """Return the segment number of each token, int64 [R, L]. Numbers are distinct between rows.

    Segment s of row r has number r * (S + 1) + s. S is the largest number of segments in a row, s counts from 1, and
    padding has s = 0.
    """
    ids = batch.tokens["segment_ids"].long()
    return ids + numbers_per_row(batch) * torch.arange(batch.num_rows).unsqueeze(1)


def numbers_per_row(batch: TrainingBatch) -> int:
    """Return how many segment numbers a row takes: one for padding, and one for each segment of the fullest row."""
    ids = batch.tokens["segment_ids"]
    return int(ids.max()) + 1 if ids.numel() else 1


def sums_by_number(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the sum of the values for each number, float64 [largest number + 1]. The arguments have equal shapes."""
    size = int(numbers.max()) + 1 if numbers.numel() else 1
    return torch.zeros(size, dtype=torch.float64).index_add_(0, numbers.flatten(), values.flatten().double())


@dataclass(frozen=True)
class Ragged:
    """A column whose rows may have different numbers of values.

    Attributes:
        values: [V], any dtype (object for strings).
        offsets: int64 [R + 1]; row r is values[offsets[r]:offsets[r + 1]].
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert len(self.offsets) >= 1, "offsets must have one entry more than there are rows"
        assert int(self.offsets[-1]) == len(self.values), (int(self.offsets[-1]), len(self.values))

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]], dtype: Any) -> Ragged:
        """Build a column from one sequence of values per row."""
        values = np.fromiter((value for row in rows for value in row), dtype)
        return cls(values, _offsets(np.array([len(row) for row in rows], np.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def counts(self) -> NDArray[np.int64]:
        """Return the number of values in each row, int64 [R]."""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        """Return the chosen rows in that order."""
        counts = self.counts()[rows]
        offsets = _offsets(counts)
        source = np.arange(int(offsets[-1])) + np.repeat(self.offsets[rows] - offsets[:-1], counts)
        return self.derived(lambda: self.values[source], offsets)

    def between(self, start: int, stop: int) -> Ragged:
        """Return the rows from `start` to before `stop`; their values are a view."""
        first, last = self.offsets[start], self.offsets[stop]
        return self.derived(lambda: self.values[first:last], self.offsets[start : stop + 1] - first)

    def append_empty(self, count: int) -> Ragged:
        """Return the column with `count` empty rows appended."""
        offsets = np.concatenate([self.offsets, np.full(count, self.offsets[-1])])
        return self.derived(lambda: self.values, offsets)

    def derived(self, compute: Callable[[], NDArray[Any]], offsets: NDArray[np.int64]) -> Ragged:
        """Return a column with the values of `compute`. A subclass may call `compute` later, or never."""
        return Ragged(compute(), offsets)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets of rows with these numbers of values, int64 [R + 1]."""
    return np.append(np.int64(0), np.cumsum(counts))
