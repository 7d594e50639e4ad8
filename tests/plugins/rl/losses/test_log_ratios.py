"""Corrections and metrics of tokens are what whole columns give, for any layout and ratios; factors to the bit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spurline.data.batch import TrainingBatch, segment_numbers, sums_by_number
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


def expected_factors(batch: TrainingBatch, name: str, config: Any) -> tuple[Tensor, dict[str, float]]:
    """Factors float32 [R, L] and metrics of a correction of core. config: its settings."""
    if name == "tis":
        ratios = _log_ratios(batch, config.level)
        largest = math.log(config.cap) if config.cap is not None else math.inf
        return _with_metrics(batch, _exp(ratios.clamp(max=largest)), truncated=ratios > largest)
    level = config.level if name == "mis" else name
    ratios = _log_ratios(batch, level)
    bounds = torch.tensor([config.low, config.high], dtype=torch.float64).log()
    accepted = (ratios >= bounds[0]) & (ratios <= bounds[1])
    factors = torch.where(accepted, _exp(ratios), 0.0) if name == "mis" else accepted.double()
    return _with_metrics(batch, factors, rejected=~accepted)


def expected_mismatch(batch: TrainingBatch) -> dict[str, float]:
    trained = (batch.tokens["loss_weights"] != 0).numpy()
    if not trained.any():
        return {}
    difference = (batch.tokens["old_logprobs"].double() - batch.tokens["rollout_logprobs"].double()).numpy()[trained]
    ratio = np.exp(np.clip(difference, -20.0, 20.0))
    return {
        "mismatch/logprob_diff": float(np.abs(difference).mean()),
        "mismatch/logprob_diff/max": float(np.abs(difference).max()),
        "mismatch/kl": float((ratio - 1 - difference).mean()),
        **{f"mismatch/ratio_p{percent}": float(np.percentile(ratio, percent)) for percent in (1, 50, 99)},
    }


def expected_advantages(batch: TrainingBatch) -> dict[str, float]:
    trained = (batch.tokens["loss_weights"] != 0).numpy()
    values = batch.tokens["advantages"].numpy()[trained].astype(np.float64)
    if not len(values):
        return {}
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std()),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
    }


def _exp(values: Tensor) -> Tensor:
    return values.clamp(-20.0, 20.0).exp()


def _log_ratios(batch: TrainingBatch, level: str) -> Tensor:
    trained = batch.tokens["loss_weights"] != 0
    old, rollout = (batch.tokens[name].double() for name in ("old_logprobs", "rollout_logprobs"))
    ratios = torch.where(trained, old - rollout, 0.0)
    if level == "token":
        return ratios
    numbers = segment_numbers(batch)
    sums = sums_by_number(ratios, numbers)
    if level == "geometric":
        sums = sums / sums_by_number(trained, numbers).clamp(min=1)
    return torch.where(trained, sums[numbers], 0.0)


def _with_metrics(batch: TrainingBatch, factors: Tensor, **shares: Tensor) -> tuple[Tensor, dict[str, float]]:
    trained = batch.tokens["loss_weights"] != 0
    count = max(int(trained.sum()), 1)
    metrics = {f"correction/{name}": float((where & trained).sum()) / count for name, where in shares.items()}
    metrics["correction/factor"] = float(factors[trained].sum()) / count
    return factors.float(), metrics


approx = partial(pytest.approx, rel=1e-9, abs=1e-12, nan_ok=True)
_RARE = st.sampled_from([0.0, 0.0, 0.001])


@given(batch=batches(), block_tokens=st.sampled_from([1, 1000, 1 << 16]))
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_blocks_of_tokens_with_loss_give_what_whole_columns_give(batch: TrainingBatch, block_tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrections, "BLOCK_TOKENS", block_tokens)
        patch.setattr(rl_metrics, "BLOCK_TOKENS", block_tokens)
        mismatch = expected_mismatch(batch)
        assert compare(batch)[1] == approx(mismatch)
        assert advantage_metrics(batch) == approx(expected_advantages(batch))
        for name, made, config in CASES:
            corrected, metrics = compare(batch, made(config))
            factors = corrected.tokens["correction_factors"]
            expected, expected_metrics = expected_factors(batch, name, config)
            assert metrics == approx({**mismatch, **expected_metrics} if mismatch else {})
            assert factors.dtype == torch.float32
            assert np.array_equal(factors.numpy(), expected.numpy(), equal_nan=True), config
