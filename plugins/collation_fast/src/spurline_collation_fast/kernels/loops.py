"""Write segments into the columns of a batch: plain Python that numba compiles as it stands.

Segments are given row by row: those of row r are `row_offsets[r] : row_offsets[r + 1]`. Segment s is sample
`positions[s]`, whose values are found by `begins` and `lengths`, and takes that many columns from `columns[s]` on,
behind the segment before it. Everything between segments is padding, which these loops write too, since buffers are
reused. All tables are int64. Tests run the same source uncompiled, with errors put into it, so nothing here may depend
on being compiled.

past_caches: write the wide columns past the caches, which is faster for batches that do not fit them.
"""

from __future__ import annotations

from spurline_collation_fast.kernels.memory import fetch_ahead, store_past_caches


def fill(out, value):
    for place in range(out.shape[0]):
        out[place] = value


def zero(out):
    # Not `fill(out, 0)`: only a literal becomes one memset.
    for place in range(out.shape[0]):
        out[place] = 0


def fill_wide(out, value, past_caches):
    if past_caches:
        for place in range(out.shape[0]):
            store_past_caches(out, place, value)
    else:
        fill(out, value)


def copy(source, out, past_caches):
    """As many values as there is room for."""
    if past_caches:
        for place in range(out.shape[0]):
            store_past_caches(out, place, source[place])
    else:
        for place in range(out.shape[0]):
            out[place] = source[place]


def count_up(out, past_caches):
    if past_caches:
        for place in range(out.shape[0]):
            store_past_caches(out, place, place)
    else:
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
    past_caches,
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
            fill_wide(ids[free:start], pad, past_caches)
            copy(tokens[begins[sample] :], ids[start:stop], past_caches)
            zero(numbers[free:start])
            fill(numbers[start:stop], segment - first + 1)
            fill_wide(places[free:start], 0, past_caches)
            count_up(places[start:stop], past_caches)
            free = stop
            num_tokens += length
        fill_wide(ids[free:], pad, past_caches)
        zero(numbers[free:])
        fill_wide(places[free:], 0, past_caches)
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
            copy(values[begins[sample] :], line[start:stop], False)
            free = stop
        zero(line[free:])


HELPERS = (fill, zero, fill_wide, copy, count_up)
"""What the loops above call; numba compiles them along."""
