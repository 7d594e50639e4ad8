"""Corrections and metrics of tokens are what whole columns give, for any layout and ratios; factors to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import mismatch_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.batch import TrainingBatch
from spurline_rl import metrics as rl_metrics
from spurline_rl.losses import configs, corrections
from spurline_rl.losses.corrections import compare
from spurline_rl.metrics import advantage_metrics

CASES: list[tuple[str, Any, Any]] = [
    *(
        (
            "tis",
            corrections.TruncatedImportanceSampling,
            configs.TruncatedImportanceSamplingConfig(level=level, cap=cap),
        )
        for level in ("token", "sequence")
        for cap in (1.0, 1.3, None)
    ),
    *(
        ("mis", corrections.MaskedImportanceSampling, configs.MaskedImportanceSamplingConfig(level=level, low=0.8))
        for level in ("token", "sequence")
    ),
    ("geometric", corrections.Rejection, configs.GeometricRejectionConfig(low=0.95, high=1.05)),
    ("sequence", corrections.Rejection, configs.SequenceRejectionConfig()),
]


@st.composite
def batches(draw: st.DrawFn) -> TrainingBatch:
    """Rows of several sequences between padding, with any share of trained tokens, ties and infinite logprobs."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_rows, length = draw(st.integers(0, 40)), draw(st.sampled_from([1, 7, 60, 200, 700]))
    segment_ids = np.zeros((num_rows, length), np.int32)
    most = draw(st.integers(1, 4))
    for row in segment_ids:
        ends = np.sort(random.integers(0, length + 1, 2 * random.integers(0, most + 1)))
        used = [(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True) if begin < end]
        for number, (begin, end) in enumerate(used, start=1):
            row[begin:end] = number
    shape = segment_ids.shape
    trained = (segment_ids > 0) & (random.random(shape) < draw(st.sampled_from([0.0, 0.02, 0.7, 1.0])))
    rollout = -3 * random.random(shape, dtype=np.float32)
    noise = random.normal(0, draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0, 30.0])), shape).astype(np.float32)
    noise[random.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    old = rollout + noise
    for column, share in ((old, draw(_RARE)), (rollout, draw(_RARE))):
        column[random.random(shape) < share] = -np.inf
    columns = {
        "input_ids": np.ones(shape, np.int64),
        "segment_ids": segment_ids,
        "position_ids": np.zeros(shape, np.int64),
        "loss_weights": np.where(trained, random.random(shape, dtype=np.float32) + 0.1, 0).astype(np.float32),
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "advantages": random.normal(0, 1, shape).astype(np.float32),
    }
    tokens = {name: torch.from_numpy(values) for name, values in columns.items()}
    return TrainingBatch(tokens, {}, torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.bool))


approx = partial(pytest.approx, rel=1e-9, abs=1e-12, nan_ok=True)
_RARE = st.sampled_from([0.0, 0.0, 0.001])


@given(batch=batches(), block_tokens=st.sampled_from([1, 1000, 1 << 16]))
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_blocks_of_tokens_with_loss_give_what_whole_columns_give(batch: TrainingBatch, block_tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrections, "BLOCK_TOKENS", block_tokens)
        patch.setattr(rl_metrics, "BLOCK_TOKENS", block_tokens)
        mismatch = oracle.mismatch(batch)
        assert compare(batch)[1] == approx(mismatch)
        assert advantage_metrics(batch) == approx(oracle.advantages(batch))
        for name, made, config in CASES:
            corrected, metrics = compare(batch, made(config))
            factors = corrected.tokens["correction_factors"]
            expected_factors, expected = oracle.corrected(batch, name, config)
            assert metrics == approx({**mismatch, **expected} if mismatch else {})
            assert factors.dtype == torch.float32
            assert np.array_equal(factors.numpy(), expected_factors.numpy(), equal_nan=True), config
