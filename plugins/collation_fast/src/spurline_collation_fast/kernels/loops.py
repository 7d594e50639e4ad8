"""Write segments into the columns of a batch: plain Python that numba compiles as it stands.

Segments are given row by row: those of row r are `row_offsets[r] : row_offsets[r + 1]`, and segment s takes
`lengths[s]` columns from `columns[s]` on, behind the one before it. Everything between segments is padding, which these
loops write too, since buffers are reused. All tables are int64. Tests run the same source uncompiled, with errors put
into it, so nothing here may depend on being compiled.

clear: zero the whole column first and skip the padding, which is faster where most of it is padding: one large fill
goes past the caches. It changes no result.
"""

from __future__ import annotations

from typing import Any

try:
    from numba.extending import register_jitable as _inlined
except ModuleNotFoundError:

    def _inlined(function: Any) -> Any:
        return function


@_inlined
def _fill(out, value):
    for place in range(out.shape[0]):
        out[place] = value


@_inlined
def _zero(out):
    # Not `_fill(out, 0)`: only a literal becomes one memset.
    for place in range(out.shape[0]):
        out[place] = 0


def write_tokens(tokens, begins, lengths, columns, row_offsets, pad, out):
    """out[R, L] = the tokens of each segment, from `tokens[begins[s]]` on; `pad` on padding."""
    for row in range(out.shape[0]):
        line = out[row]
        free = 0
        for segment in range(row_offsets[row], row_offsets[row + 1]):
            start, length, begin = columns[segment], lengths[segment], begins[segment]
            _fill(line[free:start], pad)
            source, target = tokens[begin : begin + length], line[start : start + length]
            for place in range(target.shape[0]):
                target[place] = source[place]
            free = start + length
        _fill(line[free:], pad)


def write_segment_ids(lengths, columns, row_offsets, clear, out):
    """out[R, L] = 1, 2, ... on the segments of each row; 0 on padding."""
    if clear:
        _zero(out.ravel())
    for row in range(out.shape[0]):
        line = out[row]
        free = 0
        first = row_offsets[row]
        for segment in range(first, row_offsets[row + 1]):
            start, length = columns[segment], lengths[segment]
            if not clear:
                _zero(line[free:start])
            _fill(line[start : start + length], segment - first + 1)
            free = start + length
        if not clear:
            _zero(line[free:])


def write_positions(lengths, columns, row_offsets, clear, out):
    """out[R, L] = 0, 1, 2, ... in each segment; 0 on padding."""
    if clear:
        _zero(out.ravel())
    for row in range(out.shape[0]):
        line = out[row]
        free = 0
        for segment in range(row_offsets[row], row_offsets[row + 1]):
            start, length = columns[segment], lengths[segment]
            if not clear:
                _zero(line[free:start])
            target = line[start : start + length]
            for place in range(target.shape[0]):
                target[place] = place
            free = start + length
        if not clear:
            _zero(line[free:])


def write_values(values, begins, skips, lengths, columns, row_offsets, clear, out):
    """out[R, L] = the values of each segment, from `values[begins[s]]` on, after `skips[s]` zeros; 0 on padding."""
    if clear:
        _zero(out.ravel())
    for row in range(out.shape[0]):
        line = out[row]
        free = 0
        for segment in range(row_offsets[row], row_offsets[row + 1]):
            begin, start = begins[segment], columns[segment] + skips[segment]
            length = lengths[segment] - skips[segment]
            if not clear:
                _zero(line[free:start])
            source, target = values[begin : begin + length], line[start : start + length]
            for place in range(target.shape[0]):
                target[place] = source[place]
            free = start + length
        if not clear:
            _zero(line[free:])
