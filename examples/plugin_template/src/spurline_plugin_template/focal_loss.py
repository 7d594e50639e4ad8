"""Focal loss: -(1 - p)^gamma * log p of each trained token (Lin et al. 2017, arXiv:1708.02002).

In: logprobs of the target tokens. Out: a loss per token. The batch and the backend decide which tokens count, and
divide the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.protocols.loss import LogprobsOfRows, TokenLossInputs
from spurline_plugin_template.config import FocalConfig

# For gamma < 1 the slope of (1 - p)^gamma is infinite at p = 1. If 1 - p is smaller than this, the factor is constant.
SMALLEST_ERROR = 1e-6


class FocalLoss:
    """Loss `focal`."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: FocalConfig) -> None:
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -self._factor(inputs.logprobs) * inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Return the plain cross-entropy, for comparison with other runs, and the focal factor."""
        return {"focal/cross_entropy": -inputs.logprobs, "focal/factor": self._factor(inputs.logprobs)}

    def describe(self) -> str:
        return f"Focal loss: cross-entropy of each trained token times (1 - its probability)^{self.config.gamma:g}."

    def _factor(self, logprobs: Tensor) -> Tensor:
        # -expm1(x) is 1 - exp(x) without the rounding errors that 1 - exp(x) has near p = 1.
        return (-torch.expm1(logprobs)).clamp_min(SMALLEST_ERROR) ** self.config.gamma


class BalancedFocalLoss(FocalLoss):
    """Loss `balanced_focal`. A micro-batch has only some tokens of a step, so `prepare` computes the mean over all."""

    prepares = frozenset({"focal_mean"})
    needs = prepares

    def prepare(self, batch: TrainingBatch, logprobs: LogprobsOfRows) -> Mapping[str, Tensor]:
        weights = batch.tokens["loss_weights"]
        factors = self._factor(logprobs("policy"))
        return {"focal_mean": torch.full_like(factors, (factors * weights).sum() / weights.sum())}

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return super().token_loss(inputs) / inputs.columns["focal_mean"]
