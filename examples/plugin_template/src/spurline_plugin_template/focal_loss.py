"""Focal loss: -(1 - p)^gamma * log p of each trained token (Lin et al. 2017, arXiv:1708.02002).

In: logprobs of the target tokens. Out: a loss per token. Which tokens count, and what the sum is divided by, belongs to
the batch and the backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_plugin_template.config import FocalConfig

# For gamma < 1 the slope of (1 - p)^gamma is infinite at p = 1; below this distance the factor counts as constant.
SMALLEST_ERROR = 1e-6


class FocalLoss:
    """Loss `focal`."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: FocalConfig) -> None:
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -self._factor(inputs.logprobs) * inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """The plain cross-entropy, to compare with other runs, and the focal factor."""
        return {"focal/cross_entropy": -inputs.logprobs, "focal/factor": self._factor(inputs.logprobs)}

    def describe(self) -> str:
        return f"Focal loss: cross-entropy of each trained token times (1 - its probability)^{self.config.gamma:g}."

    def _factor(self, logprobs: Tensor) -> Tensor:
        # -expm1(x) is 1 - exp(x) without cancellation, which near p = 1 would leave no digit.
        return (-torch.expm1(logprobs)).clamp_min(SMALLEST_ERROR) ** self.config.gamma
