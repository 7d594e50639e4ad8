"""Compute the loss weights and the normaliser that reduce token losses to one number per optimizer step.

A reduction gets a mini-batch and returns weights w and a normaliser Z. The backend minimises sum(w * l) / Z. Both
w and Z are computed for all rows of an optimizer step together, before the rows are divided into micro-batches and
among ranks. If each micro-batch were averaged alone, tokens in micro-batches with few tokens would count too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from spurline.config.run_config import ReductionConfig
from spurline.data.batch import TrainingBatch, numbers_per_row, segment_numbers, sums_by_number

Reduce = Callable[[TrainingBatch], tuple[TrainingBatch, float]]
"""A function that takes a mini-batch and returns its rows with final loss weights, and the normaliser."""


def token_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Weight every loss token equally: w is unchanged, and Z is the sum of w."""
    return batch, _normalizer(float(batch.tokens["loss_weights"].double().sum()))


def sequence_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Weight every segment with loss equally: w is divided by its sum per segment, and Z counts segments with loss."""
    return _equal_shares(batch, segment_numbers(batch))


def prompt_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Weight every prompt with loss equally: w is divided by its sum per prompt, and Z counts prompts with loss.

    A prompt is one uid with all its samples and turns. All loss tokens of a prompt count the same (ScaleRL, Khatri et
    al. 2025, arXiv:2510.13786).
    """
    uids = batch.segments["uid"]
    prompts = {uid: number for number, uid in enumerate(dict.fromkeys(uids.values.tolist()), start=1)}
    # Number 0 is reserved for padding, whose weights are 0.
    places = torch.arange(numbers_per_row(batch))
    is_segment = (places > 0) & (places <= torch.from_numpy(uids.counts()).unsqueeze(1))
    prompt_of_segment = torch.zeros(is_segment.shape, dtype=torch.int64)
    prompt_of_segment[is_segment] = torch.tensor([prompts[uid] for uid in uids.values.tolist()], dtype=torch.int64)
    return _equal_shares(batch, prompt_of_segment.flatten()[segment_numbers(batch)])


def fixed_norm(length: int) -> Reduce:
    """Divide by `length` times the number of trajectories (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    The weights are unchanged, so tokens of long answers count as much as other tokens. Trajectories without loss count
    too. A trajectory counts once, even if its turns are in several rows.
    """

    def reduce(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
        return batch, _normalizer(float(_num_trajectories(batch) * length))

    return reduce


REDUCTIONS: dict[str, Reduce] = {"token_mean": token_mean, "sequence_mean": sequence_mean, "prompt_mean": prompt_mean}
"""The reductions without settings."""


def make_reduction(config: ReductionConfig) -> Reduce:
    if config.name != "fixed_norm":
        return REDUCTIONS[config.name]
    assert config.length is not None, "fixed_norm without a length passed the config's check"
    return fixed_norm(config.length)


def reduce_corrected(batch: TrainingBatch, factors: Tensor, reduce: Reduce) -> tuple[TrainingBatch, float]:
    """Reduce a mini-batch with correction factors, float32 [R, L], which are 0 for rejected tokens.

    Rejected tokens get weight 0 before the reduction, so the reduction does not count them. The other factors are
    applied after it. If applied before it, they would also change Z or a sequence's sum, and partly cancel out.
    """
    accepted = batch.with_tokens(loss_weights=torch.where(factors != 0, batch.tokens["loss_weights"], 0.0))
    reduced, normalizer = reduce(accepted)
    return reduced.with_tokens(loss_weights=reduced.tokens["loss_weights"] * factors), normalizer


def _equal_shares(batch: TrainingBatch, numbers: Tensor) -> tuple[TrainingBatch, float]:
    """Divide w by its sum over tokens with the same number. Z is the number of sums above zero."""
    weights = batch.tokens["loss_weights"]
    sums = sums_by_number(weights, numbers)
    shares = torch.where(sums > 0, 1 / sums, 0.0)[numbers]
    reduced = batch.with_tokens(loss_weights=(weights * shares).to(weights.dtype))
    return reduced, _normalizer(float((sums > 0).sum()))


def _num_trajectories(batch: TrainingBatch) -> int:
    """Return the number of trajectories (attempts at a prompt) in the batch. One that occurs twice counts twice."""
    columns = (batch.segments[name].values.tolist() for name in ("uid", "sample", "turn"))
    copies = Counter(zip(*columns, strict=True))
    attempts: Counter[tuple[str, int]] = Counter()
    for (uid, sample, _), count in copies.items():
        attempts[uid, sample] = max(count, attempts[uid, sample])
    return attempts.total()


def _normalizer(value: float) -> float:
    # If no token has loss, the gradient is zero and any divisor will do.
    return value if value > 0 else 1.0
