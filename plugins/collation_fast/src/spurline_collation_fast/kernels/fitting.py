"""Put samples into rows: plain Python that numba compiles as it stands.

All arrays are int64. `order` lists the samples longest first. `row_of` receives the row of each sample, numbered as
they were opened. Tests run the same source uncompiled, with errors put into it.
"""

from __future__ import annotations

import numpy as np


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
    the last sample of the rows with the most samples, as `spurline.data.packing.spread_over_ranks` says.
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
    for row in range(target):
        row_offsets[row % num_ranks * per_rank + row // num_ranks + 1] = counts[row]
    row_offsets[0] = 0
    for row in range(target):
        row_offsets[row + 1] += row_offsets[row]
    free = row_offsets[:-1].copy()
    for sample in order:
        row = row_of[sample] % num_ranks * per_rank + row_of[sample] // num_ranks
        positions[free[row]] = sample
        free[row] += 1
