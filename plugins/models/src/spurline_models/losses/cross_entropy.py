"""Losses of supervised fine-tuning: cross-entropy and dynamic fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_models.losses.configs import CrossEntropyConfig, DynamicFineTuningConfig


class CrossEntropy:
    """-log p(token), the negative log-likelihood."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: CrossEntropyConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {}

    def describe(self) -> str:
        return "Cross-entropy: the negative log-probability of each trained token."


class DynamicFineTuning:
    """DFT: -sg(p(token)) * log p(token), where sg stops the gradient (Wu et al. 2025, arXiv:2508.05629).

    Plain cross-entropy is a policy gradient with importance weight 1/p. The factor p cancels this weight, so that
    unlikely tokens do not dominate.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, config: DynamicFineTuningConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return -inputs.logprobs.detach().exp() * inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Return the plain cross-entropy, to compare with other runs, and the factor p."""
        return {"dft/cross_entropy": -inputs.logprobs, "dft/probability": inputs.logprobs.exp()}

    def describe(self) -> str:
        return "Dynamic fine-tuning: cross-entropy of each trained token times its probability, which gets no gradient."
