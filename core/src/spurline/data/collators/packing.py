"""Choose which samples share a packed row: the readable reference.

In: sample lengths. Out: for each row, the samples in it. Plain Python on purpose: fast implementations are compared
with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from spurline.errors import DataError

PackingAlgorithm = Literal["ffd", "bfd", "multifit"]


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pack(lengths: Sequence[int], capacity: int, num_ranks: int, algorithm: PackingAlgorithm = "ffd") -> list[list[int]]:
    """Rows of sample positions, a multiple of `num_ranks` of them, rank by rank; see the algorithms below."""
    if algorithm == "multifit":
        rows = multifit(lengths, capacity, num_ranks)
    else:
        fit = {"ffd": first_fit_decreasing, "bfd": best_fit_decreasing}[algorithm]
        rows = fit(lengths, capacity)
    return spread_over_ranks(rows, num_ranks)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of sample positions; every row's lengths sum to at most `capacity`.

    Longest first (ties: higher position first), each into the first row with room, else into a new row (Johnson 1973).
    No length may exceed `capacity`.
    """
    return _decreasing(
        lengths, capacity, lambda room, length: next((row for row, free in enumerate(room) if free >= length), None)
    )


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack as first_fit_decreasing, but each into the row that it leaves the least room in (ties: the earlier)."""

    def choose(room: Sequence[int], length: int) -> int | None:
        fitting = [(free, row) for row, free in enumerate(room) if free >= length]
        return min(fitting)[1] if fitting else None

    return _decreasing(lengths, capacity, choose)


def _decreasing(
    lengths: Sequence[int], capacity: int, choose: Callable[[Sequence[int], int], int | None]
) -> list[list[int]]:
    """choose: from the room in each row and a length to the row it goes into, or None to open another one."""
    rows: list[list[int]] = []
    room: list[int] = []
    for position in _longest_first(lengths):
        length = lengths[position]
        assert length <= capacity, (position, length, capacity)
        row = choose(room, length)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(position)
        room[row] -= length
    return rows


def multifit(lengths: Sequence[int], capacity: int, num_ranks: int) -> list[list[int]]:
    """First-fit-decreasing with about the smallest capacity for which the fewest rows of all ranks are enough.

    Rows are rounded up to a multiple of `num_ranks` anyway; a lower capacity spreads the samples evenly over them
    (Coffman, Garey and Johnson 1978, who search by bisection; see `even_capacities`).
    """
    num_rows = max(num_ranks, round_up(-(-sum(lengths) // capacity), num_ranks))
    while True:
        for lower in even_capacities(max([-(-sum(lengths) // num_rows), *lengths]), capacity):
            rows = first_fit_decreasing(lengths, lower)
            if len(rows) <= num_rows:
                return rows
        # The last were whole rows: where long samples leave much of them empty, so many are needed.
        num_rows = round_up(len(rows), num_ranks)


def even_capacities(least: int, capacity: int) -> Iterator[int]:
    """Capacities to try in turn, up to `capacity`: `least`, which rows cannot do without, and a margin that doubles.

    The first margin, a 2048th, is enough for most batches of hundreds of samples; bisection would look for the last
    token of it, at ten times the cost.
    """
    margin = max(1, least // 2048)
    while least + margin < capacity:
        yield least + margin
        margin *= 2
    yield capacity


def straggler_factor(used: Sequence[int], num_ranks: int) -> float:
    """Tokens of the fullest rank over the mean of all ranks; 1.0 is perfectly even.

    used: tokens of each row, alignment included, rank by rank.
    """
    per_rank = len(used) // num_ranks
    totals = [sum(used[rank * per_rank : (rank + 1) * per_rank]) for rank in range(num_ranks)]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def refuse_what_cannot_fit(
    lengths: Sequence[int], aligned: Sequence[int], capacity: int, name: Callable[[int], str], shorter: str
) -> None:
    """Raise DataError for the first sample that is longer than a row.

    name: what to call the sample at a position. shorter: what else the user may do, such as `lower data.max_length`.
    """
    for position, length in enumerate(aligned):
        if length > capacity:
            raise DataError(
                f"{name(position)} has {lengths[position]} tokens, {length} after alignment, but a packed row holds "
                f"{capacity}. Raise collator.max_tokens to at least {length}, or {shorter}."
            )


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Positions by falling length; ties: higher position first."""
    return sorted(range(len(lengths)), key=lambda position: (lengths[position], position), reverse=True)


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
