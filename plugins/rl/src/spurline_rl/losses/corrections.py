"""Corrections for the difference between the engine that generates and the trainer: factors on the loss of tokens.

All start from log ratios of the tokens with loss (`spurline_rl.losses.log_ratios`):

    rho_t = old_logprobs_t - rollout_logprobs_t                             token
    sum of rho over the segment                                             sequence: log of the product of the ratios
    mean of rho over the segment                                            geometric

A loss weighed by p_old / p_rollout is an expectation under the policy that the loss assumes, not under the engine's.
With `loss: ppo` this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): p_old is the proximal policy, p_rollout
the behaviour policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline_rl.losses.configs import (
    GeometricRejectionConfig,
    MaskedImportanceSamplingConfig,
    SequenceRejectionConfig,
    TruncatedImportanceSamplingConfig,
)
from spurline_rl.losses.log_ratios import LogRatios, log_ratios_in_blocks
from spurline_rl.losses.policy_loss import bounded_exp
from spurline_rl.protocols.correction import Corrected, Correction


def correct_batch(batch: TrainingBatch, correction: Correction) -> tuple[Tensor, dict[str, float]]:
    """Apply a correction to a batch.

    Returns:
        The factors, float32 [R, L] and 1 on tokens without loss; and the means over the tokens with loss of the
        factors, as `correction/factor`, and of the correction's metrics.

    Raises:
        DataError: If the batch lacks the logprobs of trainer or engine.
    """
    column = np.ones((batch.num_rows, batch.length), np.float32)
    sums: defaultdict[str, float] = defaultdict(float)
    count = 0
    for rows, ratios in log_ratios_in_blocks(batch):
        corrected = correction.correct(ratios)
        column[rows][ratios.where] = corrected.factors.numpy()
        count += len(ratios.values)
        for name, values in (*corrected.metrics.items(), ("correction/factor", corrected.factors)):
            sums[name] += float(values.sum())
    return torch.from_numpy(column), {name: total / max(count, 1) for name, total in sums.items()}


class TruncatedImportanceSampling:
    """TIS: factor = min(p_old / p_rollout, cap) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; Ionides 2008).

    The ratio of a sequence is the product of its tokens' ratios. The cap bounds the variance at the price of a bias;
    with `cap: null` decoupled PPO is exact.
    """

    def __init__(self, config: TruncatedImportanceSamplingConfig):
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
    """MIS: factor = p_old / p_rollout where that is in [low, high], else 0 (IcePop, Ling Team 2025, arXiv:2510.18855;
    per sequence: Liu, Li et al. 2025, "When Speed Kills Stability").

    The ratio of a sequence is the product of its tokens' ratios. `tis` truncates large ratios; here they are left out,
    as they are more likely numerical accidents.
    """

    def __init__(self, config: MaskedImportanceSamplingConfig):
        self.config = config

    def correct(self, ratios: LogRatios) -> Corrected:
        judged = _judged(ratios, self.config.level)
        accepted = _are_within(judged, self.config.low, self.config.high)
        factors = torch.where(accepted, bounded_exp(judged), 0.0)
        return _of_tokens(ratios, self.config.level, factors, rejected=~accepted)

    def describe(self) -> str:
        band = f"{self.config.low:g}..{self.config.high:g}"
        return f"MIS: weigh each {self.config.level} by its probability ratio of trainer to engine, 0 outside {band}."


class _Rejection:
    """Leaves out whole sequences by a ratio of this level, and weighs the others by 1."""

    level: Literal["geometric", "sequence"]

    def __init__(self, config: GeometricRejectionConfig | SequenceRejectionConfig):
        self.config = config

    def correct(self, ratios: LogRatios) -> Corrected:
        accepted = _are_within(_judged(ratios, self.level), self.config.low, self.config.high)
        return _of_tokens(ratios, self.level, accepted.double(), rejected=~accepted)

    def describe(self) -> str:
        mean = "mean " if self.level == "geometric" else ""
        return (
            f"{self.level.capitalize()} rejection: leave out sequences whose {mean}ratio of trainer to engine is not "
            f"in {self.config.low:g}..{self.config.high:g}."
        )


class GeometricRejection(_Rejection):
    """Factor = 1 where (p_old(y) / p_rollout(y))^(1 / |y|) is in [low, high], else 0, for the whole sequence y (Liu, Li
    et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch").

    The mean ratio per token does not grow with the length, so the band can be narrow. Weights stay 1: it removes
    outliers and corrects nothing else.
    """

    level = "geometric"


class SequenceRejection(_Rejection):
    """Factor = 1 where p_old(y) / p_rollout(y) is in [low, high], else 0, for the whole sequence y (Liu, Li et al.).

    The ratio is the product over all tokens, so long sequences leave the band more easily than short ones. Weights stay
    1: it removes outliers and corrects nothing else.
    """

    level = "sequence"


_Level = Literal["token", "sequence", "geometric"]


def _judged(ratios: LogRatios, level: _Level) -> Tensor:
    """Return the log ratios that tokens or whole sequences are judged by: float64 [N] or [S]."""
    if level == "token":
        return ratios.values
    return ratios.sums() if level == "sequence" else ratios.means()


def _are_within(log_ratios: Tensor, low: float, high: float) -> Tensor:
    bounds = torch.tensor([low, high], dtype=torch.float64).log()
    return (log_ratios >= bounds[0]) & (log_ratios <= bounds[1])


def _of_tokens(ratios: LogRatios, level: _Level, factors: Tensor, **shares: Tensor) -> Corrected:
    """Spread factors and shares over the tokens of each judged ratio."""
    if level != "token":
        factors = ratios.spread(factors)
        shares = {name: ratios.spread(where) for name, where in shares.items()}
    return Corrected(factors, {f"correction/{name}": where for name, where in shares.items()})
