"""Choose which samples share a packed row: the readable reference.

In: sample lengths. Out: for each row, the samples in it. Plain Python on purpose: fast implementations are compared
with this one.
"""

from __future__ import annotations

from collections.abc import Sequence


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of sample positions; every row's lengths sum to at most `capacity`.

    Longest first (ties: higher position first), each into the first row with room, else into a new row (Johnson 1973).
    No length may exceed `capacity`.
    """
    order = sorted(range(len(lengths)), key=lambda position: (lengths[position], position), reverse=True)
    rows: list[list[int]] = []
    room: list[int] = []
    for position in order:
        length = lengths[position]
        assert length <= capacity, (position, length, capacity)
        for row in range(len(rows)):
            if room[row] >= length:
                rows[row].append(position)
                room[row] -= length
                break
        else:
            rows.append([position])
            room.append(capacity - length)
    return rows


def spread_over_ranks(rows: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """The same samples in a number of rows that is a multiple of `num_ranks`, rank by rank.

    Missing rows are made by moving the last sample of the rows with the most samples (ties: later row first); when
    there are fewer samples than rows needed, the rest stay empty. Row i of the packing goes to rank i mod num_ranks,
    and the rows of one rank lie together in the result.
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
