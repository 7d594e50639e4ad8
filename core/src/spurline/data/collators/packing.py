"""Choose which samples share a packed row. This is the readable reference: tests compare fast implementations with it.

In: sample lengths. Out: for each row, the samples in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from spurline.errors import DataError

PackingAlgorithm = Literal["ffd", "multifit"]


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pack(lengths: Sequence[int], capacity: int, num_ranks: int, algorithm: PackingAlgorithm = "ffd") -> list[list[int]]:
    """Return rows of sample positions. All ranks have equally many rows, and the rows of rank 0 come first."""
    if algorithm == "multifit":
        return spread_over_ranks(multifit(lengths, capacity, num_ranks), num_ranks)
    return spread_over_ranks(first_fit_decreasing(lengths, capacity), num_ranks)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of sample positions whose lengths sum to at most `capacity` (Johnson 1973).

    Samples are placed in the order of `_longest_first`. Each sample goes into the first row with enough space, or else
    into a new row. No length may exceed `capacity`.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for position in _longest_first(lengths):
        length = lengths[position]
        assert length <= capacity, (position, length, capacity)
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(position)
        room[row] -= length
    return rows


def multifit(lengths: Sequence[int], capacity: int, num_ranks: int) -> list[list[int]]:
    """Pack by first-fit-decreasing, with roughly the lowest capacity at which the number of rows stays the same.

    The number of rows is rounded up to a multiple of `num_ranks` anyway. A lower capacity spreads the samples evenly
    over these rows (Coffman, Garey and Johnson 1978). Unlike these authors, `even_capacities` does not bisect.
    """
    num_rows = max(num_ranks, round_up(-(-sum(lengths) // capacity), num_ranks))
    while True:
        for lower in even_capacities(max([-(-sum(lengths) // num_rows), *lengths]), capacity):
            rows = first_fit_decreasing(lengths, lower)
            if len(rows) <= num_rows:
                return rows
        # Even the full capacity needs more rows, since long samples leave much of each row empty.
        num_rows = round_up(len(rows), num_ranks)


def even_capacities(least: int, capacity: int) -> Iterator[int]:
    """Yield capacities to try, in rising order: `least` plus a margin that doubles each time, and at last `capacity`.

    The first margin, a 2048th of `least`, is enough for most batches of hundreds of samples. Bisection would find the
    exact capacity at ten times the cost.
    """
    margin = max(1, least // 2048)
    while least + margin < capacity:
        yield least + margin
        margin *= 2
    yield capacity


def straggler_factor(used: Sequence[int], num_ranks: int) -> float:
    """Return the tokens of the fullest rank divided by the mean of all ranks; 1.0 is perfectly even.

    `used` is the number of tokens of each row, alignment included, with the rows of each rank together.
    """
    per_rank = len(used) // num_ranks
    totals = [sum(used[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def refuse_what_cannot_fit(
    lengths: Sequence[int], aligned: Sequence[int], capacity: int, uid: Callable[[int], str]
) -> None:
    """Raise DataError for the first sample that is longer than a row. `uid(position)` names a sample."""
    for position, length in enumerate(aligned):
        if length > capacity:
            raise DataError(
                f"Sample {uid(position)} has {lengths[position]} tokens, {length} after alignment, but a packed row "
                f"holds {capacity}. Raise collator.max_tokens to at least {length}, or lower data.max_length."
            )


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Return positions by falling length; among equal lengths, the higher position comes first."""
    return sorted(range(len(lengths)), key=lambda position: (lengths[position], position), reverse=True)


def spread_over_ranks(rows: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Return the same samples in a number of rows that is a multiple of `num_ranks`, rank by rank.

    Each missing row gets the last sample of the row with the most samples (among equal rows, the later one). When that
    row has one sample left, the row with the next most samples takes its place. With fewer samples than rows, some rows
    stay empty. Row i of the packing goes to rank i mod num_ranks. The result has the rows of each rank together.
    """
    balanced = [list(row) for row in rows]
    target = max(num_ranks, round_up(len(balanced), num_ranks))
    donors = sorted(range(len(balanced)), key=lambda row: (len(balanced[row]), row), reverse=True)
    next_donor = 0
    while len(balanced) < target:
        while next_donor < len(donors) and len(balanced[donors[next_donor]]) <= 1:
            next_donor += 1
        moved = [balanced[donors[next_donor]].pop()] if next_donor < len(donors) else []
        balanced.append(moved)
    return [row for rank in range(num_ranks) for row in balanced[rank::num_ranks]]
