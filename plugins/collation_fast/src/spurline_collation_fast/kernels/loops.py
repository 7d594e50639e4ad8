"""The innermost loops of collation, in plain Python that `compiled.py` compiles.

All tables are int64. No loop creates an array, and the packing loops do not slice arrays either. Compiling code that
creates or slices arrays takes seconds. Compiling code that only reads and writes them takes a tenth of a second.

`write_rows` and `write_values` write segments into the columns of a batch, row by row. Row r holds the segments
`row_offsets[r] : row_offsets[r + 1]`. Segment s is sample `positions[s]`. `begins` and `lengths` locate the values of
a sample. Segment s begins at column `columns[s]`, after the segment before it. Everything between segments is padding.
These loops write the padding too, since buffers are reused.

The other loops pack samples into rows. `order` lists the samples, longest first. `row_of` receives the row of each
sample; rows are numbered in the order in which they were opened.
"""

from __future__ import annotations

LINE = 64
"""Bytes of a cache line."""
AHEAD = 4
"""A segment is fetched this many segments before it is read. A core can wait for about as many cache lines at once."""
FETCHED_LINES = 16
"""Cache lines to fetch at the beginning of each segment. The processor fetches the following lines by itself."""


def fetch(values, place):
    """Load the cache line of `values[place]` early. `place` may lie beyond the end.

    Plain Python does nothing here. `compiled.py` inserts the instruction.
    """


def fetch_ahead(values, begins, lengths, positions, segment):
    """Fetch the first lines of the segment that is read `AHEAD` segments later. Segments are scattered in memory."""
    if segment + AHEAD >= positions.shape[0]:
        return
    sample = positions[segment + AHEAD]
    begin, each = begins[sample], LINE // values.itemsize
    for place in range(begin, begin + min(lengths[sample], FETCHED_LINES * each), each):
        fetch(values, place)


def fill(out, value):
    for place in range(out.shape[0]):
        out[place] = value


def zero(out):
    # The compiler makes one memset of this loop, because the 0 is a literal. It would not do so for `fill(out, 0)`.
    for place in range(out.shape[0]):
        out[place] = 0


def copy(source, out):
    """Copy as many values as fit into `out`."""
    for place in range(out.shape[0]):
        out[place] = source[place]


def count_up(out):
    for place in range(out.shape[0]):
        out[place] = place


def write_rows(
    tokens,
    begins,
    rest,
    rest_begins,
    heads,
    lengths,
    positions,
    columns,
    row_offsets,
    pad,
    input_ids,
    segment_ids,
    position_ids,
):
    """Fill three columns [R, L] and return the number of tokens.

    `input_ids` receives the tokens of each segment, and `pad` on padding. The first `heads[sample]` tokens are those
    from `tokens[begins[sample]]` on, the others those from `rest[rest_begins[sample]]` on.
    `segment_ids` receives 1, 2, ... on the segments of each row, `position_ids` 0, 1, 2, ... in each segment. Both are
    0 on padding.
    """
    num_tokens = 0
    for row in range(input_ids.shape[0]):
        ids, numbers, places = input_ids[row], segment_ids[row], position_ids[row]
        free = 0
        first = row_offsets[row]
        for segment in range(first, row_offsets[row + 1]):
            # The rest of a segment follows the rest before it in memory, so the processor fetches it by itself.
            fetch_ahead(tokens, begins, heads, positions, segment)
            sample = positions[segment]
            start, length = columns[segment], lengths[sample]
            middle, stop = start + heads[sample], start + length
            fill(ids[free:start], pad)
            zero(numbers[free:start])
            zero(places[free:start])
            copy(tokens[begins[sample] :], ids[start:middle])
            copy(rest[rest_begins[sample] :], ids[middle:stop])
            fill(numbers[start:stop], segment - first + 1)
            count_up(places[start:stop])
            free = stop
            num_tokens += length
        fill(ids[free:], pad)
        zero(numbers[free:])
        zero(places[free:])
    return num_tokens


def write_values(values, begins, skips, lengths, positions, columns, row_offsets, out):
    """Fill one column [R, L]. A segment has `skips[sample]` zeros, then the values from `values[begins[sample]]` on.

    Padding is 0.
    """
    for row in range(out.shape[0]):
        line = out[row]
        free = 0
        for segment in range(row_offsets[row], row_offsets[row + 1]):
            fetch_ahead(values, begins, lengths, positions, segment)
            sample = positions[segment]
            start, stop = columns[segment] + skips[sample], columns[segment] + lengths[sample]
            zero(line[free:start])
            copy(values[begins[sample] :], line[start:stop])
            free = stop
        zero(line[free:])


def longest_first(lengths, free, order):
    """Write the positions of the samples into `order`, longest first. Among equal lengths the higher position is first.

    This counting sort takes linear time. `free` must contain zeros. Its length is the tokens of the longest sample
    plus 2.
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
    """Put each sample into the first row into which it fits, and return the number of rows.

    `room` is a binary tree [2 * leaves] with one leaf for each possible row. A leaf is the free tokens of its row. Each
    other node is the larger of its two children, so a row is found in log2(rows) steps. At first every node is the
    capacity of a row. If some sample fits into no row, the result is larger than the number of leaves.
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


def fill_missing_rows(order, row_of, num_rows, counts, donors, last, before):
    """Fill each row beyond `num_rows` with the last sample of a row with the most samples.

    Core's `spread_over_ranks` does the same. `counts` must contain zeros, one for each row of the result, and receives
    the number of samples in each row. `donors` and `last` have the length of `counts`, and `before` has the length of
    `order`. All three are overwritten.
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
    """List the samples rank by rank, row by row, in the order in which they were placed.

    Row i goes to rank i mod `num_ranks`. `row_offsets` [R + 1] and `positions` [S] receive the result. `free` [R] is
    overwritten.
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
    """Write the column of each segment into `columns`.

    Returns the tokens of the fullest row, and the tokens of the fullest rank divided by the mean.
    """
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
