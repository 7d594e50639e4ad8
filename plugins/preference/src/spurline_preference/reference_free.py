"""Losses on pairs without a reference model: SimPO, CPO and ORPO.

log p(y) is the sum of the log-probabilities of the tokens of an answer y, and log q(y) their mean. y+ is the chosen and
y- the rejected answer. sigma_s(m) = (1 - s) log sigma(m) + s log sigma(-m), where s is `label_smoothing`.

    simpo   r(y) = beta * log q(y)             l = -sigma_s(r(y+) - r(y-) - gamma)
    cpo     r(y) = beta * log p(y)             l = -sigma_s(r(y+) - r(y-))              + sft_weight * -log q(y+)
    orpo    r(y) = log(q(y) / (1 - q(y)))      l = -beta * log sigma(r(y+) - r(y-))     + sft_weight * -log q(y+)

SimPO: Meng et al. 2024, arXiv:2405.14734; with `sft_weight` it is CPO-SimPO. CPO: Xu et al. 2024, arXiv:2401.08417.
ORPO: Hong et al. 2024, arXiv:2403.07691. The likelihood term is the mean over the tokens of the chosen answer, averaged
over pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_preference.configs import CpoConfig, OrpoConfig, SimpoConfig
from spurline_preference.pairs import PairIndex, PairLoss, smoothed_logistic

_CLOSEST_TO_CERTAIN = -1e-6
"""Largest mean log-probability in odds. Those of an answer that is certain would be infinite."""


class Simpo(PairLoss):
    """The loss `simpo`. Rewards are mean log-probabilities, so that long answers are not preferred."""

    config: SimpoConfig

    def rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        chosen, rejected = pairs.means(inputs.logprobs)
        return self.config.beta * chosen, self.config.beta * rejected

    def loss_of_margin(self, margin: Tensor) -> Tensor:
        return smoothed_logistic(margin - self.config.gamma, self.config.label_smoothing)

    def describe(self) -> str:
        config = self.config
        return self.describe_with(
            "SimPO: minus the log-sigmoid of how far the margin between the chosen and the rejected answer exceeds "
            f"{config.gamma:g}, where rewards are {config.beta:g} times mean log-probabilities"
        )


class Cpo(PairLoss):
    """The loss `cpo`. It is DPO with a uniform reference model, beside the likelihood of the chosen answer."""

    config: CpoConfig

    def rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        chosen, rejected = pairs.sums(inputs.logprobs)
        return self.config.beta * chosen, self.config.beta * rejected

    def loss_of_margin(self, margin: Tensor) -> Tensor:
        return smoothed_logistic(margin, self.config.label_smoothing)

    def describe(self) -> str:
        return self.describe_with(
            "CPO: minus the log-sigmoid of the margin between the chosen and the rejected answer, with beta "
            f"{self.config.beta:g} and no reference model"
        )


class Orpo(PairLoss):
    """The loss `orpo`. It fine-tunes on chosen answers, and makes their odds larger than those of rejected ones."""

    config: OrpoConfig

    def rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        chosen, rejected = pairs.means(inputs.logprobs)
        return _log_odds(chosen), _log_odds(rejected)

    def loss_of_margin(self, margin: Tensor) -> Tensor:
        return -self.config.beta * F.logsigmoid(margin)

    def describe(self) -> str:
        return self.describe_with(
            f"ORPO: {self.config.beta:g} times minus the log-sigmoid of the log odds ratio between the chosen and the "
            "rejected answer"
        )


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(q / (1 - q)) for log q."""
    logprob = logprob.clamp(max=_CLOSEST_TO_CERTAIN)
    return logprob - torch.log(-torch.expm1(logprob))
