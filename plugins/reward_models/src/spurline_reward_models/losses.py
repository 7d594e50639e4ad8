"""Losses of reward models. They read scores, since `model.head` is `score`.

The reward r(y) of an answer is the score of its last token. With c = `centering` and m = `margin`, plus the number in
the pair's row if there is a `margin_column`, the loss of a pair of a chosen answer y+ and a rejected answer y- is

    bradley_terry   -log sigma(r(y+) - r(y-) - m) + c (r(y+) + r(y-))^2

This is the loss of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155), with the margin of Llama 2 (arXiv:2307.09288)
and the centering of Eisenstein et al. 2023 (arXiv:2312.09244). Every token of a pair gets the loss of its pair, and the
source gives the tokens of a pair weights that sum to 1.

Let s be the score of a step's last token and z its label. The loss of a step (Lightman et al. 2023, arXiv:2305.20050)
is

    step_reward   probability   -z log sigma(s) - (1 - z) log sigma(-s)
                  number        (s - z)^2
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.protocols.loss import MetricValues, TokenLossInputs
from spurline_preference.pairs import PairIndex
from spurline_reward_models.configs import BradleyTerryConfig, StepRewardConfig

CALIBRATION = "calibration"
BINS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Lower ends of the bins of confidence in which accuracy is measured."""


class BradleyTerry:
    """The loss `bradley_terry`."""

    def __init__(self, config: BradleyTerryConfig):
        self.config = config
        self.needs = frozenset({"pair_ids", *([] if config.margin_column is None else [config.margin_column])})

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        pairs, *rewards = _rewards(inputs)
        chosen, rejected = (pairs.to_tokens(each) for each in rewards)
        column = self.config.margin_column
        margin = self.config.margin if column is None else self.config.margin + inputs.columns[column]
        loss = -F.logsigmoid(chosen - rejected - margin)
        if self.config.centering:
            loss = loss + self.config.centering * (chosen + rejected).square()
        return loss

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, MetricValues]:
        """Return the metrics of pairs, the mean confidence, and the accuracy by confidence."""
        pairs, chosen, rejected = _rewards(inputs)
        margin = chosen - rejected
        right, confidence = (margin > 0).to(margin.dtype), margin.abs().sigmoid()
        values = {
            "preference/margin": margin,
            "preference/accuracy": right,
            "preference/chosen_reward": chosen,
            "preference/rejected_reward": rejected,
            "reward_model/confidence": confidence,
        }
        by_token = {name: pairs.to_tokens(value) for name, value in values.items()}
        return {**by_token, **_calibration(*(pairs.to_tokens(value) for value in (right, confidence)))}

    def describe(self) -> str:
        margins = [*([f"{self.config.margin:g}"] if self.config.margin else []), *(self.needs - {"pair_ids"})]
        margin = f" by {' plus '.join(margins)}" if margins else ""
        return f"Bradley-Terry: the score of a chosen answer's last token exceeds that of the rejected one{margin}."


class StepReward:
    """The loss `step_reward`."""

    needs: frozenset[str] = frozenset({"step_labels"})

    def __init__(self, config: StepRewardConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        scores, labels = inputs.logprobs, inputs.columns["step_labels"].to(inputs.logprobs.dtype)
        if self.config.kind_of_label == "number":
            return (scores - labels).square()
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, MetricValues]:
        """Return the scores, and for probabilities accuracy, confidence, and accuracy by confidence."""
        scores, labels = inputs.logprobs, inputs.columns["step_labels"].to(inputs.logprobs.dtype)
        found = {"reward_model/score": scores}
        if self.config.kind_of_label == "number":
            return found
        right, confidence = ((scores > 0) == (labels > 0.5)).to(scores.dtype), scores.abs().sigmoid()
        found |= {"reward_model/accuracy": right, "reward_model/confidence": confidence}
        return {**found, **_calibration(right, confidence)}

    def describe(self) -> str:
        return f"The score of each step's last token fits its label, a {self.config.kind_of_label}."


def _rewards(inputs: TokenLossInputs) -> tuple[PairIndex, Tensor, Tensor]:
    """Return the pairs, and the rewards [pairs] of chosen and of rejected answers."""
    index, scores = inputs.segment_index, inputs.logprobs
    numbers = torch.arange(len(index), device=index.device)
    last = numbers.new_zeros(inputs.num_segments).scatter_reduce(0, index, numbers, "amax")
    pairs = PairIndex(inputs)
    return pairs, *pairs.sums(torch.where(numbers == last[index], scores, torch.zeros_like(scores)))


def _calibration(right: Tensor, confidence: Tensor) -> dict[str, MetricValues]:
    """Return the accuracy in each bin of confidence, as values and weights [N]."""
    ends = (*BINS[1:], 1.1)
    return {
        f"reward_model/{CALIBRATION}_{low:g}": (right, ((confidence >= low) & (confidence < high)).to(right.dtype))
        for low, high in zip(BINS, ends, strict=True)
    }
