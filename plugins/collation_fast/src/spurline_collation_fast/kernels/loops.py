"""Write segments into the columns of a batch: plain Python that numba compiles as it stands.

Segments are given row by row: those of row r are `row_offsets[r] : row_offsets[r + 1]`. Segment s is sample
`positions[s]`, whose values are found by `begins` and `lengths`, and takes that many columns from `columns[s]` on,
behind the segment before it. Everything between segments is padding, which these loops write too, since buffers are
reused. All tables are int64. Tests run the same source uncompiled, with errors put into it, so nothing here may depend
on being compiled.
"""

from __future__ import annotations

from spurline_collation_fast.kernels.memory import fetch_ahead


def fill(out, value):
    for place in range(out.shape[0]):
        out[place] = value


def zero(out):
    # Not `fill(out, 0)`: only a literal becomes one memset.
    for place in range(out.shape[0]):
        out[place] = 0


def copy(source, out):
    """Copy as many values as fit."""
    for place in range(out.shape[0]):
        out[place] = source[place]


def count_up(out):
    for place in range(out.shape[0]):
        out[place] = place


def write_rows(
    tokens,
    begins,
    lengths,
    positions,
    columns,
    row_offsets,
    pad,
    input_ids,
    segment_ids,
    position_ids,
):
    """Fill three columns [R, L]; returns the number of tokens.

    input_ids: the tokens of each segment, from `tokens[begins[sample]]` on; `pad` on padding. segment_ids: 1, 2, ... on
    the segments of each row; 0 on padding. position_ids: 0, 1, 2, ... in each segment; 0 on padding.
    """
    num_tokens = 0
    for row in range(input_ids.shape[0]):
        ids, numbers, places = input_ids[row], segment_ids[row], position_ids[row]
        free = 0
        first = row_offsets[row]
        for segment in range(first, row_offsets[row + 1]):
            fetch_ahead(tokens, begins, lengths, positions, segment)
            sample = positions[segment]
            start, length = columns[segment], lengths[sample]
            stop = start + length
            fill(ids[free:start], pad)
            zero(numbers[free:start])
            zero(places[free:start])
            copy(tokens[begins[sample] :], ids[start:stop])
            fill(numbers[start:stop], segment - first + 1)
            count_up(places[start:stop])
            free = stop
            num_tokens += length
        fill(ids[free:], pad)
        zero(numbers[free:])
        zero(places[free:])
    return num_tokens


def write_values(values, begins, skips, lengths, positions, columns, row_offsets, out):
    """out[R, L] = the values of each segment, from `values[begins[sample]]` on, after `skips[sample]` zeros; 0 on
    padding."""
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


HELPERS = (fill, zero, copy, count_up)
"""Functions that the loops above call; numba compiles them along."""
