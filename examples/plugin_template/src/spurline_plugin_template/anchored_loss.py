"""Anchored cross-entropy: -log q(token) + weight * KL(p || q), with p the distribution of a model that is not trained.

In: the distributions of both models at each trained token, for a chunk of tokens at a time. Out: a loss per token.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_models.losses.distributions import Distribution
from spurline_plugin_template.config import ANCHOR, AnchoredConfig


class AnchoredLoss:
    """Loss `anchored`, which keeps what the model `model.frozen.anchor` knows."""

    needs: frozenset[str] = frozenset()
    reads_logits = (ANCHOR,)

    def __init__(self, config: AnchoredConfig) -> None:
        self.config = config

    def from_logits(
        self, policy: Distribution, others: Mapping[str, Distribution], columns: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        anchor = others[ANCHOR].logprobs
        # Ranks may divide the vocabulary, so a plain sum would be a part of it.
        return {"anchored/kl": policy.total(anchor.exp() * (anchor - policy.logprobs))}

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return self.config.weight * inputs.columns["anchored/kl"] - inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {"anchored/kl": inputs.columns["anchored/kl"], "anchored/cross_entropy": -inputs.logprobs}

    def describe(self) -> str:
        return f"Cross-entropy plus {self.config.weight:g} times the KL divergence from the model 'anchor'."
