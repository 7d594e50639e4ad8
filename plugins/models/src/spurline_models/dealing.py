"""Distribute the rows of a mini-batch to data-parallel ranks and their micro-batches, and gather the results.

The process that directs the ranks sends each rank a `RankShare` as plain arrays. Every rank gets the same number of
micro-batches, so that all take part in the same collectives. In an empty micro-batch, a rank runs `TokenStream.idle`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import TOKEN_COLUMNS, Ragged, TrainingBatch

Rows = NDArray[np.int64]
"""Row numbers of a batch."""


@dataclass(frozen=True)
class RankShare:
    """The share of a mini-batch that one rank gets.

    Attributes:
        batch: The rank's rows, with the columns that it needs and the lengths of segments.
        rows: Numbers of these rows in the mini-batch.
        microbatches: For each micro-batch, its rows as indices into `batch`. A micro-batch may be empty.
        num_sequences: Number of sequences with loss in the whole mini-batch.
    """

    batch: TrainingBatch
    rows: Rows
    microbatches: tuple[Rows, ...]
    num_sequences: int

    def to_wire(self) -> dict[str, Any]:
        """Return the share as numpy arrays, which are pickled twice as fast as tensors."""
        lengths = self.batch.segments["length"]
        return {
            "tokens": {name: column.numpy() for name, column in self.batch.tokens.items()},
            "lengths": lengths.values,
            "offsets": lengths.offsets,
            "unit_ids": self.batch.unit_ids.numpy(),
            "rows": self.rows,
            "microbatches": self.microbatches,
            "num_sequences": self.num_sequences,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RankShare:
        """Make a share from the result of `to_wire`."""
        batch = TrainingBatch(
            tokens={name: torch.from_numpy(column) for name, column in wire["tokens"].items()},
            segments={"length": Ragged(wire["lengths"], wire["offsets"])},
            unit_ids=torch.from_numpy(wire["unit_ids"]),
            is_padding_row=torch.zeros(len(wire["rows"]), dtype=torch.bool),
        )
        return cls(batch, wire["rows"], tuple(wire["microbatches"]), wire["num_sequences"])


@dataclass(frozen=True)
class Dealing:
    """The shares of all ranks, and estimated costs [ranks, micro-batches]. An empty micro-batch costs 0."""

    shares: tuple[RankShare, ...]
    costs: NDArray[np.float64]

    def gather(self, values: Sequence[NDArray[Any] | Tensor]) -> Tensor:
        """Join the values [rows of the share, ...] of all ranks, in mini-batch order. Padding rows are left out."""
        assert len(values) == len(self.shares), (len(values), len(self.shares))
        dealt = torch.cat([torch.as_tensor(value) for value in values])
        order = np.argsort(np.concatenate([share.rows for share in self.shares]))
        assert len(dealt) == len(order), (len(dealt), len(order))
        return dealt[torch.from_numpy(order)]


def deal(
    batch: TrainingBatch,
    num_ranks: int,
    *,
    columns: Collection[str] = (),
    max_tokens: int | None = None,
    hidden: int = 4096,
) -> Dealing:
    """Distribute the rows to ranks so that all ranks take about equally long, and drop padding rows.

    Rows of one unit (`unit_ids`) stay together. Units are assigned one by one, the costliest first. Each goes to the
    rank with the lowest cost so far. The units of a rank are assigned to its micro-batches in the same way.

    Args:
        batch: The mini-batch.
        num_ranks: Number of data-parallel ranks.
        columns: Token columns that ranks need, besides those of every batch.
        max_tokens: Limit on the tokens of a micro-batch, without padding. A unit over the limit gets a micro-batch of
            its own. If None, there is no limit.
        hidden: Hidden size of the model. It sets how much attention costs relative to the matrix products.
    """
    units = _Units.of(batch, hidden)
    costliest_first = sorted(range(len(units.costs)), key=lambda unit: -units.costs[unit])
    dealt = _spread(costliest_first, units, num_ranks, math.inf)
    assert dealt is not None
    microbatches = _microbatches(dealt, units, math.inf if max_tokens is None else max_tokens)
    costs = np.array([[units.cost(slot) for slot in slots] for slots in microbatches]).reshape(num_ranks, -1)
    wanted = [*TOKEN_COLUMNS, *(name for name in columns if name not in TOKEN_COLUMNS)]
    sequences = batch.num_trained_segments
    shares = tuple(_share(batch, wanted, [units.rows_of(slot) for slot in slots], sequences) for slots in microbatches)
    return Dealing(shares, costs)


@dataclass(frozen=True)
class _Units:
    """Costs, tokens and rows of each unit of a batch, without padding rows."""

    costs: list[float]
    tokens: list[int]
    rows: list[Rows]

    @classmethod
    def of(cls, batch: TrainingBatch, hidden: int) -> _Units:
        rows = torch.nonzero(~batch.is_padding_row).flatten().numpy()
        lengths = batch.segments["length"].take(rows)
        ids, unit_of_row, sizes = np.unique(batch.unit_ids.numpy()[rows], return_inverse=True, return_counts=True)
        unit_of_segment = np.repeat(unit_of_row, lengths.counts())
        length = lengths.values.astype(np.float64)
        # Per layer, a token takes 12 h^2 multiplications in matrices and h * length in attention. Divide both by h.
        costs = np.bincount(unit_of_segment, 12 * hidden * length + length**2, minlength=len(ids))
        tokens = np.bincount(unit_of_segment, length, minlength=len(ids)).astype(np.int64)
        by_unit = np.split(rows[np.argsort(unit_of_row, kind="stable")], np.cumsum(sizes)[:-1]) if len(ids) else []
        return cls(costs.tolist(), tokens.tolist(), by_unit)

    def cost(self, units: Sequence[int]) -> float:
        return sum(self.costs[unit] for unit in units)

    def rows_of(self, units: Sequence[int]) -> Rows:
        return np.sort(np.concatenate([self.rows[unit] for unit in units])) if units else np.zeros(0, np.int64)


def _microbatches(dealt: Sequence[Sequence[int]], units: _Units, limit: float) -> list[list[list[int]]]:
    """Return each rank's micro-batches as lists of units. All ranks get as many as the rank that needs the most."""
    if not units.costs:
        return [[] for _ in dealt]
    # A unit over the limit counts as a full micro-batch, since it gets one of its own.
    needed = [math.ceil(sum(min(units.tokens[unit], limit) for unit in mine) / limit) for mine in dealt]
    count = max(1, *needed)
    while True:
        found = [_spread(mine, units, count, limit) for mine in dealt]
        complete = [slots for slots in found if slots is not None]
        if len(complete) == len(found):
            # Ranks wait for each other in every micro-batch, so all begin with their costliest micro-batch.
            return [sorted(slots, key=lambda slot: -units.cost(slot)) for slots in complete]
        count += 1


def _spread(chosen: Sequence[int], units: _Units, count: int, limit: float) -> list[list[int]] | None:
    """Spread the chosen units, the costliest first, over `count` bins of about equal cost.

    A bin has at most `limit` tokens, unless it has a single unit. Returns None if some unit fits into no bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    loads = [(0.0, number) for number in range(count)]
    for unit in chosen:
        full: list[tuple[float, int]] = []
        while loads and filled[loads[0][1]] and filled[loads[0][1]] + units.tokens[unit] > limit:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = loads[0]
        heapq.heapreplace(loads, (load + units.costs[unit], number))
        bins[number].append(unit)
        filled[number] += units.tokens[unit]
        for entry in full:
            heapq.heappush(loads, entry)
    return bins


def _share(batch: TrainingBatch, columns: Sequence[str], slots: Sequence[Rows], num_sequences: int) -> RankShare:
    rows = np.sort(np.concatenate([*slots, np.zeros(0, np.int64)]))
    selector = torch.from_numpy(rows)
    part = TrainingBatch(
        tokens={name: batch.tokens[name][selector] for name in columns},
        segments={"length": batch.segments["length"].take(rows)},
        unit_ids=batch.unit_ids[selector],
        is_padding_row=torch.zeros(len(rows), dtype=torch.bool),
    )
    return RankShare(part, rows, tuple(np.searchsorted(rows, slot) for slot in slots), num_sequences)
