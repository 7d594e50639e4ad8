"""How token losses become one number per optimizer step: the reduction sets the weights and the normaliser.

Place on the way: mini-batch -> reduction -> (weights w, normaliser Z) -> backend, which minimises sum(w * l) / Z. Both
are fixed here, for all rows of the optimizer step and before any cutting into micro-batches or ranks: means of parts
would overweight parts with short samples. Pure; knows no loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from spurline.config.run_config import ReductionConfig
from spurline.data.batch import TrainingBatch, numbers_per_row, segment_numbers, sums_by_number

Reduce = Callable[[TrainingBatch], tuple[TrainingBatch, float]]
"""A function from a mini-batch to the same rows with final loss weights, and the normaliser."""


def token_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Count every loss token the same: w as in the batch, Z the sum of w."""
    return batch, _normalizer(float(batch.tokens["loss_weights"].double().sum()))


def sequence_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Count every segment with loss the same: w divided by its sum in the segment, Z the number of such segments."""
    return _equal_shares(batch, segment_numbers(batch))


def prompt_mean(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
    """Count every prompt with loss the same: w divided by its sum over the prompt, Z the number of such prompts.

    A prompt is one uid with all its samples and turns; within it every loss token counts the same (ScaleRL, Khatri et
    al. 2025, arXiv:2510.13786).
    """
    uids = batch.segments["uid"]
    rows = np.repeat(np.arange(batch.num_rows), uids.counts())
    within_row = np.arange(len(uids.values)) - uids.offsets[rows]
    prompts = {uid: number for number, uid in enumerate(dict.fromkeys(uids.values.tolist()), start=1)}
    # Number 0 is left to padding, whose weights are 0.
    prompt_of_segment = torch.zeros(batch.num_rows * numbers_per_row(batch), dtype=torch.int64)
    segments = torch.from_numpy(rows * numbers_per_row(batch) + within_row + 1)
    prompt_of_segment[segments] = torch.tensor([prompts[uid] for uid in uids.values.tolist()], dtype=torch.int64)
    return _equal_shares(batch, prompt_of_segment[segment_numbers(batch)])


def fixed_norm(length: int) -> Reduce:
    """Z the number of trajectories times `length`, w as in the batch (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    No token counts less because its answer, or another one, is long. All trajectories count, also those without loss,
    and one trajectory counts once whether its turns are one row or several.
    """

    def reduce(batch: TrainingBatch) -> tuple[TrainingBatch, float]:
        return batch, _normalizer(float(_num_trajectories(batch) * length))

    return reduce


REDUCTIONS: dict[str, Reduce] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
}
"""The reductions without settings. `fixed_norm` has one."""


def make_reduction(config: ReductionConfig) -> Reduce:
    """Return the reduction that the config asks for."""
    if config.name != "fixed_norm":
        return REDUCTIONS[config.name]
    assert config.length is not None, "fixed_norm without a length passed the config's check"
    return fixed_norm(config.length)


def reduce_corrected(batch: TrainingBatch, factors: Tensor, reduce: Reduce) -> tuple[TrainingBatch, float]:
    """Reduce a mini-batch whose tokens a correction judged; factors: float32 [R, L], 0 where it rejects.

    A rejected token leaves before the reduction, which does not count it. All other factors come after it: counted in
    Z or in the sum of a sequence, they would cancel out, and a sequence would weigh the same whatever its ratio.
    """
    accepted = batch.with_tokens(loss_weights=torch.where(factors != 0, batch.tokens["loss_weights"], 0.0))
    reduced, normalizer = reduce(accepted)
    return reduced.with_tokens(loss_weights=reduced.tokens["loss_weights"] * factors), normalizer


def _equal_shares(batch: TrainingBatch, numbers: Tensor) -> tuple[TrainingBatch, float]:
    """w divided by its sum over the tokens of the same number, Z how many numbers have any weight."""
    weights = batch.tokens["loss_weights"]
    sums = sums_by_number(weights, numbers)
    shares = torch.where(sums > 0, 1 / sums, 0.0)[numbers]
    reduced = batch.with_tokens(loss_weights=(weights * shares).to(weights.dtype))
    return reduced, _normalizer(float((sums > 0).sum()))


def _num_trajectories(batch: TrainingBatch) -> int:
    """Attempts at a prompt in the batch. A sample that is there twice, as an epoch's end may have it, counts twice."""
    columns = (batch.segments[name].values.tolist() for name in ("uid", "sample", "turn"))
    copies = Counter(zip(*columns, strict=True))
    attempts: Counter[tuple[str, int]] = Counter()
    for (uid, sample, _), count in copies.items():
        attempts[uid, sample] = max(count, attempts[uid, sample])
    return attempts.total()


def _normalizer(value: float) -> float:
    # A mini-batch without any loss token has gradient zero, whatever it is divided by.
    return value if value > 0 else 1.0
