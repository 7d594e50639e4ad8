"""Put samples into rows: plain Python that numba compiles as it stands.

All arrays are int64. `order` lists the samples longest first. `row_of` receives the row of each sample, numbered as
they were opened. Tests run the same source uncompiled, with errors put into it.
"""

from __future__ import annotations

import numpy as np


def pack_rows(lengths, align_to, capacity, num_ranks, algorithm):
    """Which samples share a row, and where in it; equal to core's `packing.pack` of the aligned lengths.

    lengths: int64 [n], none above `capacity` when rounded up to `align_to`. algorithm: place in `ALGORITHMS`.
    Returns sample positions int64 [S] row by row; row offsets into them, int64 [R + 1], R a multiple of `num_ranks`,
    rows rank by rank; the column at which each segment begins, int64 [S]; the tokens of the fullest row; and the
    straggler factor.
    """
    aligned = lengths if align_to == 1 else -(-lengths // align_to) * align_to
    order = longest_first(aligned)
    row_of = np.empty(lengths.shape[0], np.int64)
    num_rows = (
        best_fit(aligned, order, capacity, row_of) if algorithm == 1 else first_fit(aligned, order, capacity, row_of)
    )
    target = max(num_ranks, -(-num_rows // num_ranks) * num_ranks)
    if algorithm == 2:
        num_rows = even_out(aligned, order, capacity, target, row_of, num_rows)
        target = max(num_ranks, -(-num_rows // num_ranks) * num_ranks)
    positions, row_offsets = np.empty(lengths.shape[0], np.int64), np.empty(target + 1, np.int64)
    arrange_rows(order, row_of, num_rows, num_ranks, positions, row_offsets)
    columns = np.empty(lengths.shape[0], np.int64)
    length, straggler = place_in_rows(aligned, positions, row_offsets, num_ranks, columns)
    return positions, row_offsets, columns, length, straggler


def longest_first(lengths):
    """Positions by falling length; ties: higher position first. Lengths are counted, so it takes linear time."""
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    free = np.zeros(longest + 2, np.int64)
    for length in lengths:
        free[longest - length + 1] += 1
    for place in range(longest):
        free[place + 1] += free[place]
    order = np.empty(lengths.shape[0], np.int64)
    for position in range(lengths.shape[0] - 1, -1, -1):
        place = longest - lengths[position]
        order[free[place]] = position
        free[place] += 1
    return order


def even_out(lengths, order, capacity, target, row_of, num_rows):
    """First fit with the smallest capacity, by bisection, that needs at most `target` rows; returns their number."""
    trial = np.empty_like(row_of)
    low, high = max(1, -(-lengths.sum() // target)), capacity
    for length in lengths:
        low = max(low, length)
    while low < high:
        middle = (low + high) // 2
        needed = first_fit(lengths, order, middle, trial)
        if needed <= target:
            row_of[:] = trial
            num_rows, high = needed, middle
        else:
            low = middle + 1
    return num_rows


def place_in_rows(aligned, positions, row_offsets, num_ranks, columns):
    """The column of each segment; returns the tokens of the fullest row and those of the fullest rank over the mean."""
    longest_row = fullest = total = 0
    per_rank = (row_offsets.shape[0] - 1) // num_ranks
    for rank in range(num_ranks):
        of_rank = 0
        for row in range(rank * per_rank, (rank + 1) * per_rank):
            used = 0
            for segment in range(row_offsets[row], row_offsets[row + 1]):
                columns[segment] = used
                used += aligned[positions[segment]]
            longest_row = max(longest_row, used)
            of_rank += used
        fullest = max(fullest, of_rank)
        total += of_rank
    return longest_row, fullest * num_ranks / total if total else 1.0


def first_fit(lengths, order, capacity, row_of):
    """Each sample into the first row with room; returns the number of rows.

    A tree over the rows holds the most room below each node, so a row is found in log2(rows) steps.
    """
    # Any two rows hold more than `capacity` together, else the later one's first sample had gone into the earlier.
    at_most = min(order.shape[0], 2 * lengths.sum() // capacity + 1)
    leaves = 1
    while leaves < at_most:
        leaves *= 2
    room = np.full(2 * leaves, capacity, np.int64)
    num_rows = 0
    for sample in order:
        length = lengths[sample]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row_of[sample] = node - leaves
        num_rows = max(num_rows, node - leaves + 1)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return num_rows


def best_fit(lengths, order, capacity, row_of):
    """Each sample into the row it leaves the least room in, the earlier of equals; returns the number of rows.

    Rows are kept sorted by (room, number), both in one key.
    """
    scale = order.shape[0]
    keys = np.zeros(scale, np.int64)
    num_rows = 0
    for sample in order:
        length = lengths[sample]
        place = np.searchsorted(keys[:num_rows], length * scale)
        if place == num_rows:
            row, room = num_rows, capacity
            num_rows += 1
        else:
            row, room = keys[place] % scale, keys[place] // scale
        key = (room - length) * scale + row
        while place > 0 and keys[place - 1] > key:
            keys[place] = keys[place - 1]
            place -= 1
        keys[place] = key
        row_of[sample] = row
    return num_rows


def arrange_rows(order, row_of, num_rows, num_ranks, positions, row_offsets):
    """Fill up missing rows, and list the samples rank by rank, row by row, in the order they were placed.

    positions [S], row_offsets [R + 1]: receive the result; R is a multiple of `num_ranks`. Rows beyond `num_rows` get
    the last sample of the rows with the most samples, as `spurline.data.collators.packing.spread_over_ranks` says.
    """
    target = row_offsets.shape[0] - 1
    counts = np.zeros(target, np.int64)
    last = np.zeros(target, np.int64)
    before = np.empty(order.shape[0], np.int64)
    for sample in order:
        row = row_of[sample]
        before[sample] = last[row]
        last[row] = sample
        counts[row] += 1
    donors = counts.copy()
    donor = -1
    for row in range(num_rows, target):
        if donor < 0 or counts[donor] == 1:
            donor = 0
            for other in range(num_rows):
                if donors[other] >= donors[donor]:
                    donor = other
            if donors[donor] <= 1:
                break
            donors[donor] = 0
        moved = last[donor]
        last[donor] = before[moved]
        counts[donor] -= 1
        row_of[moved] = row
        counts[row] = 1
    per_rank = target // num_ranks
    place_of = np.empty(target, np.int64)
    for row in range(target):
        place_of[row] = row % num_ranks * per_rank + row // num_ranks
        row_offsets[place_of[row] + 1] = counts[row]
    row_offsets[0] = 0
    for row in range(target):
        row_offsets[row + 1] += row_offsets[row]
    free = row_offsets[:-1].copy()
    for sample in order:
        place = place_of[row_of[sample]]
        positions[free[place]] = sample
        free[place] += 1


HELPERS = (longest_first, first_fit, best_fit, even_out, arrange_rows, place_in_rows)
"""What `pack_rows` calls; numba compiles them along."""
