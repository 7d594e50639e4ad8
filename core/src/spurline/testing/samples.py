"""Random samples for tests: the same arguments give the same data. Needs no more than core does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView

PAD = 0
VOCABULARY = 128


def make_store(lengths: Sequence[int], seed: int = 0, vocabulary: int = VOCABULARY) -> TokenStore:
    """A store with samples of these lengths: random tokens (never `PAD`), random loss masks, first token without."""
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
