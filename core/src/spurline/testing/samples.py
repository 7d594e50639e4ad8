"""Make random samples for tests, and check batches. This module needs only the libraries that core needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spurline.data.batch import MAY_BE_WIDE, OPTIONAL_TOKEN_COLUMNS, SEGMENT_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView

PAD = 0
VOCABULARY = 128


def make_store(lengths: Sequence[int], seed: int = 0, vocabulary: int = VOCABULARY) -> TokenStore:
    """Return a store with samples of these lengths. Equal arguments give equal samples.

    Tokens are random, but never `PAD`. Loss masks are random, but 0 for the first token.
    """
    random = np.random.default_rng(seed)
    builder = TokenStoreBuilder(["random"])
    for row, length in enumerate(lengths):
        tokens = random.integers(1, vocabulary, length)
        mask = (random.random(length) < 0.6).astype(np.uint8)
        mask[:1] = 0
        builder.add(tokens.tolist(), mask.tolist(), source=0, row=row)
    return builder.build()


def make_view(lengths: Sequence[int], seed: int = 0) -> TokenView:
    """Return all samples of `make_store`, in order."""
    store = make_store(lengths, seed)
    return store.view(np.arange(len(store), dtype=np.int64))


def check_batch(batch: TrainingBatch) -> None:
    """Assert the invariants that the docstring of `TrainingBatch` lists."""
    shape = (batch.num_rows, batch.length)
    for name in TOKEN_COLUMNS:
        assert name in batch.tokens, f"column {name} is missing"
    for name, column in batch.tokens.items():
        assert tuple(column.shape[:2]) == shape, (name, tuple(column.shape), shape)
        dtype = (TOKEN_COLUMNS | OPTIONAL_TOKEN_COLUMNS).get(name, column.dtype)
        is_wide = name in MAY_BE_WIDE and column.dtype == torch.int64
        assert column.dtype == dtype or is_wide, (name, column.dtype, dtype)
    for name in SEGMENT_COLUMNS:
        assert len(batch.segments[name]) == batch.num_rows, (name, len(batch.segments[name]), batch.num_rows)
    for column, dtype in ((batch.unit_ids, torch.int64), (batch.is_padding_row, torch.bool)):
        assert column.shape == (batch.num_rows,), (tuple(column.shape), batch.num_rows)
        assert column.dtype == dtype, (column.dtype, dtype)
    _check_segments(batch)


def _check_segments(batch: TrainingBatch) -> None:
    segment_ids, positions = batch.tokens["segment_ids"], batch.tokens["position_ids"]
    weights = batch.tokens["loss_weights"]
    assert bool((weights[segment_ids == 0] == 0).all()), "padding has loss"
    for row in range(batch.num_rows):
        lengths = batch.segments["length"][row]
        assert bool(batch.is_padding_row[row]) == (len(lengths) == 0), f"row {row} has {len(lengths)} segments"
        previous_start = -1
        for segment, length in enumerate(lengths.tolist(), start=1):
            (where,) = torch.nonzero(segment_ids[row] == segment, as_tuple=True)
            assert len(where) == length, (row, segment, len(where), length)
            start = int(where[0])
            assert int(where[-1]) - start + 1 == length, f"row {row}: segment {segment} is not contiguous"
            assert start > previous_start, f"row {row}: segment {segment} lies before segment {segment - 1}"
            previous_start = start
            assert torch.equal(positions[row, where], torch.arange(length)), f"row {row}: positions do not restart"
            assert float(weights[row, start]) == 0, f"row {row}: first token of segment {segment} has loss"
        assert int(segment_ids[row].max()) == len(lengths)
