"""Corrections for the difference between the engine that generates and the trainer: factors on the loss of tokens.

All start from how far the two disagree about the tokens of a batch:

    rho_t = old_logprobs_t - rollout_logprobs_t                             token
    sum of rho over the segment                                             sequence: log of the product of the ratios
    mean of rho over the segment                                            geometric

Only tokens with loss count. Segments are found by `segment_ids`, so packed rows give what separate rows give. Weighing
the loss by p_old / p_rollout takes the expectation under the policy that the loss assumes instead of the one that
generated. With `loss: ppo` this is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): p_old is the proximal policy,
p_rollout the behaviour policy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch, segment_numbers, sums_by_number
from spurline.errors import DataError, listing
from spurline.losses.configs import (
    GeometricRejectionConfig,
    MaskedImportanceSamplingConfig,
    SequenceRejectionConfig,
    TruncatedImportanceSamplingConfig,
)
from spurline.losses.policy_loss import bounded_exp
from spurline.protocols.correction import Corrected

_COLUMNS = ("old_logprobs", "rollout_logprobs")


class TruncatedImportanceSampling:
    """TIS: factor = min(p_old / p_rollout, cap) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; Ionides 2008).

    The ratio is that of each token, or of a sequence the product of the ratios of its tokens. The cap bounds the
    variance at the price of a bias; with `cap: null` decoupled PPO is exact.
    """

    def __init__(self, config: TruncatedImportanceSamplingConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        ratios = _log_ratios(batch, self.config.level)
        largest = math.log(self.config.cap) if self.config.cap is not None else math.inf
        return _make_corrected(batch, bounded_exp(ratios.clamp(max=largest)), truncated=ratios > largest)

    def describe(self) -> str:
        cap = f", at most {self.config.cap:g}" if self.config.cap is not None else ""
        return f"TIS: weigh each {self.config.level} by its probability ratio of trainer to engine{cap}."


class MaskedImportanceSampling:
    """MIS: factor = p_old / p_rollout where that is in [low, high], else 0 (IcePop, Ling Team 2025, arXiv:2510.18855;
    per sequence: Liu, Li et al. 2025, "When Speed Kills Stability").

    The ratio is that of each token, or of a sequence the product of the ratios of its tokens. What `tis` truncates is
    left out here: such a token is more likely a numerical accident than a sample worth its cap.
    """

    def __init__(self, config: MaskedImportanceSamplingConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        ratios = _log_ratios(batch, self.config.level)
        accepted = _are_within(ratios, self.config.low, self.config.high)
        return _make_corrected(batch, torch.where(accepted, bounded_exp(ratios), 0.0), rejected=~accepted)

    def describe(self) -> str:
        band = f"{self.config.low:g}..{self.config.high:g}"
        return f"MIS: weigh each {self.config.level} by its probability ratio of trainer to engine, 0 outside {band}."


class _Rejection:
    """Leaves out whole sequences, and weighs the others by 1. level: the ratio that they are judged by."""

    level: Literal["geometric", "sequence"]

    def __init__(self, config: GeometricRejectionConfig | SequenceRejectionConfig):
        self.config = config

    def correct(self, batch: TrainingBatch) -> Corrected:
        accepted = _are_within(_log_ratios(batch, self.level), self.config.low, self.config.high)
        return _make_corrected(batch, accepted.double(), rejected=~accepted)

    def describe(self) -> str:
        mean = "mean " if self.level == "geometric" else ""
        return (
            f"{self.level.capitalize()} rejection: leave out sequences whose {mean}ratio of trainer to engine is not "
            f"in {self.config.low:g}..{self.config.high:g}."
        )


class GeometricRejection(_Rejection):
    """Factor = 1 where (p_old(y) / p_rollout(y))^(1 / |y|) is in [low, high], else 0, for the whole sequence y (Liu, Li
    et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch").

    The mean ratio per token judges long and short sequences by the same measure, so its band can be narrow. Weights
    stay 1: it removes outliers and corrects nothing else.
    """

    level = "geometric"


class SequenceRejection(_Rejection):
    """Factor = 1 where p_old(y) / p_rollout(y) is in [low, high], else 0, for the whole sequence y (Liu, Li et al.).

    The ratio is the product over all tokens, so long sequences leave the band more easily; `geometric_rejection` does
    not depend on length. Weights stay 1: it removes outliers and corrects nothing else.
    """

    level = "sequence"


def _log_ratios(batch: TrainingBatch, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """float64 [R, L]: the log ratio that each token with loss is judged by; 0 elsewhere."""
    missing = [name for name in _COLUMNS if name not in batch.tokens]
    if missing:
        raise DataError(
            f"The correction needs {listing(missing)}, which this run's batches do not have. Remove `correction`, or "
            "choose a `source` and a `rollout_engine` that provide them."
        )
    trained = batch.tokens["loss_weights"] != 0
    old, rollout = (batch.tokens[name].detach().double() for name in _COLUMNS)
    ratios = torch.where(trained, old - rollout, 0.0)
    if level == "token":
        return ratios
    numbers = segment_numbers(batch)
    sums = sums_by_number(ratios, numbers)
    if level == "geometric":
        sums = sums / sums_by_number(trained, numbers).clamp(min=1)
    return torch.where(trained, sums[numbers], 0.0)


def _are_within(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """bool [R, L]: low <= ratio <= high."""
    bounds = torch.tensor([low, high], dtype=torch.float64).log()
    return (log_ratios >= bounds[0]) & (log_ratios <= bounds[1])


def _make_corrected(batch: TrainingBatch, factors: Tensor, **shares: Tensor) -> Corrected:
    """The factors, and as metrics their mean and `shares` (bool [R, L]), both of the tokens with loss."""
    trained = batch.tokens["loss_weights"] != 0
    count = max(int(trained.sum()), 1)
    metrics = {f"correction/{name}": float((where & trained).sum()) / count for name, where in shares.items()}
    metrics["correction/factor"] = float(factors[trained].sum()) / count
    return Corrected(factors.float(), metrics)
