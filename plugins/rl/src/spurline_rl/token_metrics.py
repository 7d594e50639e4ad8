"""Numbers about the trained tokens of a batch: how far trainer and engine disagree, and how advantages spread.

A batch may have tens of millions of tokens, so each number is made of blocks that fit a processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline_rl.losses.batch_log_ratios import BLOCK_TOKENS, Scratch
from spurline_rl.losses.policy_loss import LARGEST_LOG_RATIO

_Floats = NDArray[np.float64]

_PERCENTILES = (1, 50, 99)


def mismatch_metrics(log_ratios: _Floats, scratch: Scratch | None = None) -> dict[str, float]:
    """How far the trainer's logprobs are from those the tokens were sampled with; nothing without tokens.

    `mismatch/logprob_diff` (mean of |trainer - rollout|, nats) and its `/max`, `mismatch/kl` (k3 estimate of
    KL(rollout || trainer), Schulman 2020), `mismatch/ratio_pN`: percentiles of the importance ratio.
    log_ratios: trainer - rollout of the trained tokens, float64 [N].
    """
    if not len(log_ratios):
        return {}
    ratio = (scratch or Scratch()).floats("ratios", len(log_ratios))
    largest: list[np.float64] = []

    def sums(start: int, stop: int) -> _Floats:
        """Return the sums of |difference| and of the k3 estimate."""
        # Logprobs are float32, and so is their difference; rounding it gives what subtracting them in float32 gives.
        difference = log_ratios[start:stop].astype(np.float32).astype(np.float64)
        of_block = ratio[start:stop]
        np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO, out=of_block)
        np.exp(of_block, out=of_block)
        k3 = of_block - 1
        k3 -= difference
        distance = np.abs(difference, out=difference)
        largest.append(distance.max())
        return np.array([distance.sum(), k3.sum()])

    distance, k3 = _sum_in_blocks(sums, 0, len(log_ratios)) / len(log_ratios)
    percentiles = zip(_PERCENTILES, _percentiles(ratio, _PERCENTILES), strict=True)
    return {
        "mismatch/logprob_diff": float(distance),
        "mismatch/logprob_diff/max": float(np.max(largest)),
        "mismatch/kl": float(k3),
        **{f"mismatch/ratio_p{percent}": value for percent, value in percentiles},
    }


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """`advantage/mean`, `advantage/std` and the extremes over trained tokens."""
    trained = batch.tokens["loss_weights"].numpy() != 0
    values: NDArray[np.float32] = batch.tokens["advantages"].numpy()[trained]
    if not len(values):
        return {}
    # Cast first: numpy adds up what it casts on the way in another order.
    total = _sum_in_blocks(lambda start, stop: values[start:stop].astype(np.float64).sum(), 0, len(values))
    mean = total / len(values)

    def square(start: int, stop: int) -> _Floats:
        deviation = np.subtract(values[start:stop], mean, dtype=np.float64)
        return np.square(deviation, out=deviation).sum()

    return {
        "advantage/mean": float(mean),
        "advantage/std": float(np.sqrt(_sum_in_blocks(square, 0, len(values)) / len(values))),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
    }


def _sum_in_blocks(sum_block: Callable[[int, int], _Floats], start: int, stop: int) -> _Floats:
    """The sum of values start to stop, from sums of blocks of them.

    Halves are added as numpy's pairwise summation adds them, so that the result is `np.sum` of the whole to the bit.
    """
    if stop - start <= BLOCK_TOKENS:
        return sum_block(start, stop)
    half = (stop - start) // 2
    middle = start + half - half % 8
    return _sum_in_blocks(sum_block, start, middle) + _sum_in_blocks(sum_block, middle, stop)


_SAMPLES = 1 << 16
"""Values that a bracket is estimated from; much shorter arrays are sorted themselves."""


def _percentiles(values: _Floats, percents: Sequence[float]) -> list[float]:
    """Return `np.percentile(values, percents)`, but sort only the values near each percentile."""
    if len(values) <= 8 * _SAMPLES or np.isnan(values.max()):
        return np.percentile(values, percents).tolist()
    # An odd stride, so that the sample does not meet the same few places of rows with a round length.
    sample = np.sort(values[:: len(values) // _SAMPLES | 1])
    return [_percentile(values, percent / 100, sample) for percent in percents]


def _percentile(values: _Floats, share: float, sample: _Floats) -> float:
    """Return one percentile as numpy does: interpolated between the two values around rank share * (N - 1), from 0."""
    place = share * (len(values) - 1)
    lower = int(place)
    # Eight standard deviations of a rank in a sample: a bracket that misses costs a sort, and is as good as impossible.
    margin = 8 * np.sqrt(share * (1 - share) * len(sample))
    ends = np.clip([share * len(sample) - margin, share * len(sample) + margin], 0, len(sample) - 1).astype(np.int64)
    low, high = sample[ends]
    around = _of_ranks(values, [lower, min(lower + 1, len(values) - 1)], low, high)
    return float(np.quantile(around, place - lower))


def _of_ranks(values: _Floats, ranks: Sequence[int], low: np.float64, high: np.float64) -> list[np.float64]:
    """The values of these ranks in ascending order; quick where they lie in low..high."""
    up_to_low = below_high = 0
    blocks: list[_Floats] = []
    for start in range(0, len(values), BLOCK_TOKENS):
        block = values[start : start + BLOCK_TOKENS]
        above, below = block > low, block < high
        up_to_low += len(block) - np.count_nonzero(above)
        below_high += np.count_nonzero(below)
        blocks.append(block[above & below])
    between = np.concatenate(blocks)

    def of_rank(rank: int) -> np.float64:
        if up_to_low <= rank < below_high:
            return np.partition(between, rank - up_to_low)[rank - up_to_low]
        # Many values may be equal, 0 where both are certain, and a bracket's end lies among them then.
        if rank < up_to_low and np.count_nonzero(values < low) <= rank:
            return low
        if rank >= below_high and np.count_nonzero(values <= high) > rank:
            return high
        return np.partition(values, rank)[rank]

    return [of_rank(rank) for rank in ranks]
