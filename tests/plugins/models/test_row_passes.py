"""How a stream is divided into passes over rows."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from spurline_models.streams.row_passes import row_passes
from spurline_models.streams.token_stream import plan_segments


@pytest.mark.parametrize(
    "lengths", [[1] * 4000 + [*range(2, 60)], [3] * 200 + [1000], [*range(100, 1000, 14)], [7], [2, 300]]
)
def test_large_passes_have_at_most_as_much_padding_as_tokens(lengths: list[int]) -> None:
    plan = plan_segments(np.array(lengths), 0, Tensor.contiguous)
    passes = row_passes(plan, 8192, Tensor.contiguous)
    assert [one.tokens.start for one in passes] == [0, *(one.tokens.stop for one in passes[:-1])]
    assert passes[-1].tokens.stop == sum(lengths)
    for one in passes:
        slots = one.bucket.count * one.bucket.length
        assert slots <= 8192 or slots <= 2 * one.bucket.tokens
