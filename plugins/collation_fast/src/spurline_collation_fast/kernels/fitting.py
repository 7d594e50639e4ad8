"""The loops of packing: plain Python that numba compiles as it stands.

All arrays are int64, and come from the caller: compiling code that makes or slices arrays takes seconds, code that only
reads and writes them a tenth of one. `order` lists the samples longest first. `row_of` receives the row of each sample,
numbered as they were opened. Tests run the same source uncompiled, with errors put into it.
"""

from __future__ import annotations


def longest_first(lengths, free, order):
    """Positions by falling length; ties: higher position first. Lengths are counted, so it takes linear time.

    free: zeros, two more than the longest sample has tokens.
    """
    longest = free.shape[0] - 2
    for length in lengths:
        free[longest - length + 1] += 1
    for place in range(longest):
        free[place + 1] += free[place]
    for position in range(lengths.shape[0] - 1, -1, -1):
        place = longest - lengths[position]
        order[free[place]] = position
        free[place] += 1


def first_fit(lengths, order, row_of, room):
    """Each sample into the first row with room; returns the number of rows, or more than there can be if one fits into
    none.

    room: a tree over the rows, [2 * leaves] with a leaf for each row there can be, which holds the most room below each
    node; so a row is found in log2(rows) steps. All of it is the capacity of a row.
    """
    leaves = room.shape[0] // 2
    num_rows = 0
    for sample in order:
        length = lengths[sample]
        if room[1] < length:
            return room.shape[0]
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        row_of[sample] = node - leaves
        num_rows = max(num_rows, node - leaves + 1)
        most = room[node] - length
        room[node] = most
        while node > 1:
            most = max(most, room[node ^ 1])
            node //= 2
            if room[node] == most:
                break
            room[node] = most
    return num_rows


def best_fit(lengths, order, capacity, row_of, keys):
    """Each sample into the row it leaves the least room in, the earlier of equals; returns the number of rows.

    keys: room for as many as there are samples. Rows are kept sorted by (room, number), both in one key.
    """
    scale = order.shape[0]
    num_rows = 0
    for sample in order:
        length = lengths[sample]
        place = num_rows
        low = 0
        while low < place:
            middle = (low + place) // 2
            if keys[middle] < length * scale:
                low = middle + 1
            else:
                place = middle
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


def fill_missing_rows(order, row_of, num_rows, counts, donors, last, before):
    """Give rows beyond `num_rows` the last sample of the rows with the most samples, as
    `spurline.data.collators.packing.spread_over_ranks` says.

    counts: zeros, one for each row there is to be; receives the samples of each. donors, last: as long. before: as long
    as `order`.
    """
    for sample in order:
        row = row_of[sample]
        before[sample] = last[row]
        last[row] = sample
        counts[row] += 1
    for row in range(num_rows):
        donors[row] = counts[row]
    donor = -1
    for row in range(num_rows, counts.shape[0]):
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


def list_rows(order, row_of, counts, num_ranks, row_offsets, free, positions):
    """The samples rank by rank, row by row, in the order they were placed; row i goes to rank i mod `num_ranks`.

    counts [R]: samples of each row. row_offsets [R + 1], positions [S]: receive the result. free [R]: overwritten.
    """
    num_rows = counts.shape[0]
    place = total = 0
    for rank in range(num_ranks):
        for row in range(rank, num_rows, num_ranks):
            row_offsets[place] = free[row] = total
            total += counts[row]
            place += 1
    row_offsets[num_rows] = total
    for sample in order:
        row = row_of[sample]
        positions[free[row]] = sample
        free[row] += 1


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


LOOPS = (longest_first, first_fit, best_fit, fill_missing_rows, list_rows, place_in_rows)
"""The loops, in the order of `planning.FittingLoops`."""
