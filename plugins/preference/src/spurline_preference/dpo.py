"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

The implicit reward of an answer y to a prompt x is r(y) = beta * (log p(y|x) - log p_ref(y|x)), where log p(y|x) is a
sum over the tokens of y, or their mean with `length_normalized`. With margin = r(chosen) - r(rejected),

    sigmoid   l = -(1 - s) log sigma(margin) - s log sigma(-margin)
    robust    l = (-(1 - s) log sigma(margin) + s log sigma(-margin)) / (1 - 2 s)
    hinge     l = max(0, 1 - margin)
    ipo       l = (margin / beta - 1 / (2 beta))^2

s is `label_smoothing`. With `sigmoid`, this is conservative DPO (Mitchell 2023, "A note on DPO with noisy
preferences"). `robust` is an unbiased estimate of the loss on pairs in the right order, if a share s of the pairs is in
the wrong order (Chowdhury et al. 2024, arXiv:2403.00409). `hinge` applies the loss of SLiC (Zhao et al. 2023,
arXiv:2305.10425) to the reward of DPO (Liu et al. 2023, arXiv:2309.06657). For IPO (Azar et al. 2023, arXiv:2310.12036)
rewards are always means over the tokens of an answer, as in TRL. The likelihood term is that of RPO (Pang et al. 2024,
arXiv:2404.19733).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_preference.configs import DpoConfig
from spurline_preference.pairs import PairIndex, PairLoss, smoothed_logistic


class Dpo(PairLoss):
    """The loss `dpo`. It compares the log-probabilities of both answers with a reference model."""

    needs: frozenset[str] = frozenset({"pair_ids", "reference_logprobs"})
    config: DpoConfig

    def rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        ratio = inputs.logprobs - inputs.columns["reference_logprobs"]
        uses_means = self.config.length_normalized or self.config.loss_type == "ipo"
        chosen, rejected = pairs.means(ratio) if uses_means else pairs.sums(ratio)
        return self.config.beta * chosen, self.config.beta * rejected

    def loss_of_margin(self, margin: Tensor) -> Tensor:
        config = self.config
        if config.loss_type == "hinge":
            return torch.relu(1 - margin)
        if config.loss_type == "ipo":
            return ((margin - 0.5) / config.beta).square()
        wrong = config.label_smoothing
        if config.loss_type == "robust":
            return (wrong * F.logsigmoid(-margin) - (1 - wrong) * F.logsigmoid(margin)) / (1 - 2 * wrong)
        return smoothed_logistic(margin, wrong)

    def describe(self) -> str:
        config = self.config
        kinds = {
            "sigmoid": "DPO: minus the log-sigmoid of the margin between the chosen and the rejected answer",
            "robust": "Robust DPO: DPO without the bias of pairs in the wrong order",
            "hinge": "DPO with a hinge: how far the margin between the chosen and the rejected answer is below 1",
            "ipo": "IPO: squared difference of 1 / (2 beta) and the mean margin per token between both answers",
        }
        parts = [f"{kinds[config.loss_type]}, with beta {config.beta:g}, relative to the reference model"]
        if config.length_normalized:
            parts.append("rewards are means over the tokens of an answer")
        if config.label_smoothing > 0:
            parts.append(f"{config.label_smoothing:.0%} of the pairs are assumed to be in the wrong order")
        return self.describe_with(*parts)
