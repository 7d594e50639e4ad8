"""Negative log-likelihood, the loss of supervised fine-tuning.

In: logprobs of the target tokens. Out: their negatives. Weights and reduction belong to
`spurline.update.reduction`, not here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spurline.losses.configs import CrossEntropyConfig
from spurline.protocols.loss import TokenLossInputs


class CrossEntropy:
    """-log p(token)."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: CrossEntropyConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {}

    def describe(self) -> str:
        return "Cross-entropy: the negative log-probability of each trained token."
