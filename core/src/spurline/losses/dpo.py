"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

With y+ the chosen and y- the rejected answer of a pair, and r(y) = beta * (log p(y|x) - log p_ref(y|x)) the implicit
reward of an answer, summed over its tokens:

    margin  = r(y+) - r(y-)
    sigmoid   l = -(1 - s) log sigma(margin) - s log sigma(-margin)
    hinge     l = max(0, 1 - margin)
    ipo       l = (margin / beta - 1 / (2 beta))^2

s is `label_smoothing` (conservative DPO, Mitchell 2023, "A note on DPO with noisy preferences"). The hinge is that of
SLiC (Zhao et al. 2023, arXiv:2305.10425) on DPO's reward (Liu et al. 2023, arXiv:2309.06657). For IPO (Azar et al.
2023, arXiv:2310.12036) the rewards are means over an answer's tokens instead of sums, as in TRL. To each

    + sft_weight * mean over the tokens of y+ of -log p

may be added (RPO, Pang et al. 2024, arXiv:2404.19733). Every token of a pair gets the loss of its pair; the source's
weights, which sum to 1 over a pair, make the step's loss the mean over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.builtin.preference_configs import DpoConfig
from spurline.losses.pairs import PairIndex
from spurline.protocols.loss import TokenLossInputs


class Dpo:
    """The loss of pairs."""

    needs: frozenset[str] = frozenset({"pair_ids", "reference_logprobs"})

    def __init__(self, config: DpoConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        pairs = PairIndex(inputs)
        chosen, rejected = self._rewards(inputs, pairs)
        loss = self._loss_of_margin(chosen - rejected)
        if self.config.sft_weight > 0:
            likelihood, _ = pairs.means(inputs.logprobs)
            loss = loss - self.config.sft_weight * likelihood
        return pairs.to_tokens(loss)

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Margin, share of pairs in the right order, both rewards, and mean log-probabilities of both answers' tokens.

        The last show what the margin hides: both answers may become less likely.
        """
        pairs = PairIndex(inputs)
        chosen, rejected = self._rewards(inputs, pairs)
        chosen_logprob, rejected_logprob = pairs.means(inputs.logprobs)
        values = {
            "dpo/margin": chosen - rejected,
            "dpo/accuracy": (chosen > rejected).to(chosen.dtype),
            "dpo/chosen_reward": chosen,
            "dpo/rejected_reward": rejected,
            "dpo/chosen_logprob": chosen_logprob,
            "dpo/rejected_logprob": rejected_logprob,
        }
        return {name: pairs.to_tokens(value) for name, value in values.items()}

    def describe(self) -> str:
        config = self.config
        kinds = {
            "sigmoid": "DPO: minus the log-sigmoid of the margin between the chosen and the rejected answer",
            "hinge": "DPO with a hinge: how far the margin between the chosen and the rejected answer is below 1",
            "ipo": "IPO: squared distance of the mean margin per token between both answers from 1 / (2 beta)",
        }
        parts = [f"{kinds[config.loss_type]}, with beta {config.beta:g} to the reference model"]
        if config.label_smoothing > 0:
            parts.append(f"{config.label_smoothing:.0%} of the pairs are taken to be the wrong way round")
        if config.sft_weight > 0:
            parts.append(f"plus {config.sft_weight:g} times the chosen answer's mean negative log-likelihood")
        return "; ".join(parts) + ". Every pair counts the same."

    def _rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        """Implicit rewards of the chosen and of the rejected answers, each [pairs]."""
        ratio = inputs.logprobs - inputs.columns["reference_logprobs"]
        chosen, rejected = pairs.means(ratio) if self.config.loss_type == "ipo" else pairs.sums(ratio)
        return self.config.beta * chosen, self.config.beta * rejected

    def _loss_of_margin(self, margin: Tensor) -> Tensor:
        config = self.config
        if config.loss_type == "hinge":
            return torch.relu(1 - margin)
        if config.loss_type == "ipo":
            return ((margin - 0.5) / config.beta).square()
        wrong_way_round = config.label_smoothing
        return -(1 - wrong_way_round) * F.logsigmoid(margin) - wrong_way_round * F.logsigmoid(-margin)
