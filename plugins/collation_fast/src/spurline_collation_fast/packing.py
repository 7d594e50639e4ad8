"""Choose which samples share a packed row, for compiled loops; equal to `spurline.data.packing.pack`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spurline.data.packing import round_up

Fit = Callable[[NDArray[np.int64], NDArray[np.int64], int, NDArray[np.int64]], int]


@dataclass(frozen=True)
class Planner:
    """Planning on top of three loops of `kernels/fitting.py`."""

    first_fit: Fit
    best_fit: Fit
    arrange_rows: Callable[..., None]

    def plan_rows(
        self, lengths: NDArray[np.int64], capacity: int, num_ranks: int, algorithm: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sample positions int64 [S] row by row, and row offsets into them, int64 [R + 1].

        lengths: int64 [n], aligned, none above `capacity`. R is a multiple of `num_ranks`; rows lie rank by rank.
        """
        # Reversed stable order: longest first, ties by higher position first. 16-bit keys are sorted in linear time.
        keys = lengths.astype(np.uint16) if capacity < 1 << 16 else lengths
        order = np.argsort(keys, kind="stable")[::-1]
        row_of = np.empty(len(lengths), np.int64)
        fit = self.best_fit if algorithm == "bfd" else self.first_fit
        num_rows = fit(lengths, order, capacity, row_of)
        target = max(num_ranks, round_up(num_rows, num_ranks))
        if algorithm == "multifit":
            row_of, num_rows = self._even_out(lengths, order, capacity, target, row_of, num_rows)
        positions, row_offsets = (
            np.empty(len(lengths), np.int64),
            np.empty(max(num_ranks, round_up(num_rows, num_ranks)) + 1, np.int64),
        )
        self.arrange_rows(order, row_of, num_rows, num_ranks, positions, row_offsets)
        return positions, row_offsets

    def _even_out(
        self,
        lengths: NDArray[np.int64],
        order: NDArray[np.int64],
        capacity: int,
        target: int,
        row_of: NDArray[np.int64],
        num_rows: int,
    ) -> tuple[NDArray[np.int64], int]:
        """First fit with the smallest capacity, by bisection, that needs at most `target` rows."""
        trial = np.empty_like(row_of)
        low, high = max(-(-int(lengths.sum()) // target), int(lengths.max(initial=1))), capacity
        while low < high:
            middle = (low + high) // 2
            needed = self.first_fit(lengths, order, middle, trial)
            if needed <= target:
                row_of, trial = trial, row_of
                num_rows, high = needed, middle
            else:
                low = middle + 1
        return row_of, num_rows
