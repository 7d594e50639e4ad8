"""Measure the difference between the logprobs of engine and trainer, and correct for it with factors on the loss.

Corrections start from log ratios of the tokens with loss (`spurline_rl.losses.log_ratios`):

    rho_t = old_logprobs_t - rollout_logprobs_t                             token
    sum of rho over the segment                                             sequence: log of the product of the ratios
    mean of rho over the segment                                            geometric

The weight p_old / p_rollout turns an expectation under the engine's policy into one under p_old, as the loss assumes.
With `loss: ppo` this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): p_old is the proximal policy, p_rollout
the behaviour policy.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline_rl.losses import configs
from spurline_rl.losses.configs import Level
from spurline_rl.losses.log_ratios import COLUMNS, LogRatios
from spurline_rl.losses.policy_loss import LARGEST_LOG_RATIO, bounded_exp
from spurline_rl.protocols.correction import Corrected, Correction

BLOCK_TOKENS = 1 << 16
"""Largest number of tokens in a block of several rows. The arrays of such a block fit into a processor's cache."""
_PERCENTILES = (1, 50, 99)
_SAMPLED_TOKENS = 1 << 20
"""In batches with more tokens, percentiles are computed from about this many tokens, which are evenly spread."""


def compare(batch: TrainingBatch, correction: Correction | None = None) -> tuple[TrainingBatch, dict[str, float]]:
    """Measure the difference between the trainer's and the engine's logprobs, and correct for it.

    The rows are read in blocks, which is several times faster than one pass over a large batch.

    Returns:
        The batch and metrics over the tokens with loss. With a correction the batch has the column
        `correction_factors`, which is 1 on tokens without loss. The metrics are `mismatch/logprob_diff` (mean of
        |trainer - rollout|, nats) and its `/max`; `mismatch/kl` (the k3 estimate of KL(rollout || trainer), Schulman
        2020); `mismatch/ratio_pN`, percentiles of the importance ratio; and the means of `correction/factor` and of the
        correction's own metrics. If logprobs are missing and there is no correction, there are no metrics.

    Raises:
        DataError: If there is a correction and logprobs are missing.
    """
    if correction is None and any(name not in batch.tokens for name in COLUMNS):
        return batch, {}
    count = batch.num_loss_tokens
    done, largest = 0, 0.0
    # With an odd stride, the sampled tokens are not always at the same few positions of their rows.
    stride, sampled = count // _SAMPLED_TOKENS | 1, [np.empty(0)]
    factors = np.ones((batch.num_rows, batch.length), np.float32) if correction is not None else None
    sums: defaultdict[str, float] = defaultdict(float)
    size = max(1, BLOCK_TOKENS // max(batch.length, 1))
    # A batch without rows is one block.
    for start in range(0, max(batch.num_rows, 1), size):
        block = LogRatios(batch.between(start, min(start + size, batch.num_rows)))
        difference = block.values.numpy()
        ratio = np.exp(np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        sampled.append(ratio[-done % stride :: stride].copy())
        done += len(difference)
        distances = np.abs(difference)
        largest = np.maximum(largest, distances.max(initial=0.0))
        sums["mismatch/logprob_diff"] += float(distances.sum())
        sums["mismatch/kl"] += float((ratio - 1 - difference).sum())
        if correction is not None and factors is not None:
            corrected = correction.correct(block)
            factors[start : start + size][block.where] = corrected.factors.numpy()
            for name, values in (*corrected.metrics.items(), ("correction/factor", corrected.factors)):
                sums[name] += float(values.sum())
    if factors is not None:
        batch = batch.with_tokens(correction_factors=torch.from_numpy(factors))
    if not count:
        return batch, {}
    metrics = {name: total / count for name, total in sums.items()}
    percentiles = np.percentile(np.concatenate(sampled), _PERCENTILES).tolist()
    metrics |= {f"mismatch/ratio_p{percent}": value for percent, value in zip(_PERCENTILES, percentiles, strict=True)}
    return batch, {**metrics, "mismatch/logprob_diff/max": float(largest)}


class TruncatedImportanceSampling:
    """TIS: factor = min(p_old / p_rollout, cap) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; Ionides 2008).

    The ratio of a sequence is the product of its tokens' ratios. The cap bounds the variance at the price of a bias.
    With `cap: null` decoupled PPO is exact.
    """

    def __init__(self, config: configs.TruncatedImportanceSamplingConfig):
        self.config = config

    def correct(self, ratios: LogRatios) -> Corrected:
        largest = math.log(self.config.cap) if self.config.cap is not None else math.inf
        judged = _judged(ratios, self.config.level)
        factors, truncated = bounded_exp(judged.clamp(max=largest)), judged > largest
        return _of_tokens(ratios, self.config.level, factors, truncated=truncated)

    def describe(self) -> str:
        cap = f", at most {self.config.cap:g}" if self.config.cap is not None else ""
        return f"TIS: weigh each {self.config.level} by its probability ratio of trainer to engine{cap}."


class MaskedImportanceSampling:
    """MIS: factor = p_old / p_rollout if it is in [low, high], else 0 (IcePop, Ling Team 2025, arXiv:2510.18855; per
    sequence: Liu, Li et al. 2025, "When Speed Kills Stability").

    The ratio of a sequence is the product of its tokens' ratios. `tis` truncates large ratios. This correction gives
    them the factor 0, since they are probably numerical accidents.
    """

    def __init__(self, config: configs.MaskedImportanceSamplingConfig):
        self.config = config

    def correct(self, ratios: LogRatios) -> Corrected:
        judged = _judged(ratios, self.config.level)
        accepted = _are_within(judged, self.config.low, self.config.high)
        factors = torch.where(accepted, bounded_exp(judged), 0.0)
        return _of_tokens(ratios, self.config.level, factors, rejected=~accepted)

    def describe(self) -> str:
        band = f"{self.config.low:g}..{self.config.high:g}"
        return f"MIS: weigh each {self.config.level} by its probability ratio of trainer to engine, 0 outside {band}."


class Rejection:
    """Factor = 1 for a whole sequence y if its ratio is in [low, high], else 0 (Liu, Li et al. 2025, "When Speed Kills
    Stability: Demystifying RL Collapse from the Training-Inference Mismatch").

    `geometric_rejection` takes the mean ratio per token, (p_old(y) / p_rollout(y))^(1 / |y|). The mean does not grow
    with the length, so the band can be narrow. `sequence_rejection` takes the product over all tokens. Long sequences
    then leave the band more easily than short ones. Both rejections only remove outliers.
    """

    def __init__(self, config: configs.GeometricRejectionConfig | configs.SequenceRejectionConfig):
        self.config = config

    def correct(self, ratios: LogRatios) -> Corrected:
        level = self.config.level
        accepted = _are_within(_judged(ratios, level), self.config.low, self.config.high)
        return _of_tokens(ratios, level, accepted.double(), rejected=~accepted)

    def describe(self) -> str:
        level, mean = self.config.level, "mean " if self.config.level == "geometric" else ""
        return (
            f"{level.capitalize()} rejection: leave out sequences whose {mean}ratio of trainer to engine is not in "
            f"{self.config.low:g}..{self.config.high:g}."
        )


def _judged(ratios: LogRatios, level: Level) -> Tensor:
    """Return the log ratios to compare with the limits: of tokens, float64 [N], or of whole sequences, [S]."""
    if level == "token":
        return ratios.values
    return ratios.sums() if level == "sequence" else ratios.means()


def _are_within(log_ratios: Tensor, low: float, high: float) -> Tensor:
    bounds = torch.tensor([low, high], dtype=torch.float64).log()
    return (log_ratios >= bounds[0]) & (log_ratios <= bounds[1])


def _of_tokens(ratios: LogRatios, level: Level, factors: Tensor, **metrics: Tensor) -> Corrected:
    """Give each token the factor and the metrics of its sequence, unless `level` is `token`."""
    if level != "token":
        factors = ratios.spread(factors)
        metrics = {name: ratios.spread(values) for name, values in metrics.items()}
    return Corrected(factors, {f"correction/{name}": values for name, values in metrics.items()})
