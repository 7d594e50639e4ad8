"""Dynamic fine-tuning (Wu et al. 2025, arXiv:2508.05629): cross-entropy weighted by the token's own probability.

In: logprobs of the target tokens. Out: -sg(p) * log p, where sg stops the gradient. The gradient of plain
cross-entropy is an importance-weighted policy gradient with weight 1/p; the factor p takes that weight away, so that
unlikely tokens no longer dominate. Weights and reduction belong to `spurline.update.reduction`, not here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spurline.losses.configs import DynamicFineTuningConfig
from spurline.protocols.loss import TokenLossInputs


class DynamicFineTuning:
    """-sg(p(token)) * log p(token)."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: DynamicFineTuningConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -inputs.logprobs.detach().exp() * inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """The plain cross-entropy, to compare with other runs, and the factor p."""
        return {"dft/cross_entropy": -inputs.logprobs, "dft/probability": inputs.logprobs.exp()}

    def describe(self) -> str:
        return "Dynamic fine-tuning: cross-entropy of each trained token times its own probability, held constant."
