"""Compare the two answers of each pair: a base for losses on pairs, and the metrics that all of them have.

A loss gives each answer a reward r(y), such as beta * (log p(y|x) - log p_ref(y|x)) for DPO. With y+ the chosen and y-
the rejected answer,

    margin = r(y+) - r(y-)
    loss   = f(margin) + sft_weight * mean over the tokens of y+ of -log p

Every token of a pair gets the loss of its pair. The source gives the tokens of a pair weights that sum to 1, so the
loss of a step is the mean over pairs. Metrics have the names of `METRICS`, for which there is one report panel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_preference.configs import PairLossConfig

METRICS: Mapping[str, str] = {
    "preference/margin": "how much the reward of a chosen answer exceeds the reward of the rejected one",
    "preference/accuracy": "share of pairs in the right order, or of answers on the right side",
    "preference/chosen_reward": "reward of chosen or good answers",
    "preference/rejected_reward": "reward of rejected or bad answers",
    "preference/chosen_logprob": "mean log-probability per token of chosen or good answers",
    "preference/rejected_logprob": "mean log-probability per token of rejected or bad answers",
}
"""Names of the metrics of losses on better and worse answers. A loss of your own gets the panel if it uses them."""


class PairIndex:
    """The segments of the chosen and the rejected answer of each pair in a micro-batch, found by column `pair_ids`.

    The number of pairs is computed from the number of segments, so that the CPU need not wait for the device. If an
    answer were missing, the loss of its pair would be NaN, and the update would be refused. No source omits an answer.
    """

    def __init__(self, inputs: TokenLossInputs) -> None:
        self._segment_index = inputs.segment_index
        self._num_segments = inputs.num_segments
        # The signed pair id of each segment. All tokens of a segment have the same id.
        pair_ids = inputs.columns["pair_ids"].long()
        ids = pair_ids.new_zeros(self._num_segments).scatter(0, self._segment_index, pair_ids)
        # Order the segments by pair, the chosen answer first. Segments without loss have id 0 and come last.
        last = torch.iinfo(torch.int64).max
        order = torch.argsort(torch.where(ids == 0, last, 2 * ids.abs() + (ids < 0)))
        self._num_pairs = (self._num_segments + 1) // 2
        padded = torch.cat([order, order[-1:]]) if self._num_segments % 2 else order
        self._chosen, self._rejected = padded.view(self._num_pairs, 2).unbind(1)
        self._is_complete = ids[self._chosen] + ids[self._rejected] == 0
        place = torch.empty_like(order).scatter(0, order, torch.arange(self._num_segments, device=order.device))
        self._pair_of_token = (place // 2)[self._segment_index]

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum token values [N] over each answer. Return the sums [pairs] of chosen and of rejected answers."""
        return self._split_pairs(self._by_segment(values))

    def means(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Average token values [N] over each answer. Return the means [pairs] of chosen and of rejected answers."""
        counts = self._by_segment(torch.ones_like(values))
        return self._split_pairs(self._by_segment(values) / counts.clamp(min=1))

    def to_tokens(self, values: Tensor) -> Tensor:
        """Give each token [N] the value of its pair."""
        return values[self._pair_of_token]

    def _by_segment(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._num_segments).index_add(0, self._segment_index, values)

    def _split_pairs(self, segments: Tensor) -> tuple[Tensor, Tensor]:
        missing = torch.full((), float("nan"), dtype=segments.dtype, device=segments.device)
        chosen, rejected = segments[self._chosen], segments[self._rejected]
        return torch.where(self._is_complete, chosen, missing), torch.where(self._is_complete, rejected, missing)


class PairLoss(ABC):
    """A loss on pairs. A subclass defines the rewards, the loss of a margin, and `describe`."""

    needs: frozenset[str] = frozenset({"pair_ids"})

    def __init__(self, config: PairLossConfig) -> None:
        self.config = config

    @abstractmethod
    def rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        """Return the rewards of the chosen and of the rejected answers, each [pairs]."""

    @abstractmethod
    def loss_of_margin(self, margin: Tensor) -> Tensor:
        """Return the losses [pairs] of these margins."""

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        pairs = PairIndex(inputs)
        chosen, rejected = self.rewards(inputs, pairs)
        loss = self.loss_of_margin(chosen - rejected)
        if self.config.sft_weight > 0:
            likelihood, _ = pairs.means(inputs.logprobs)
            loss = loss - self.config.sft_weight * likelihood
        return pairs.to_tokens(loss)

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Return `METRICS`.

        The margin can grow while both answers become less likely. The log-probabilities show this.
        """
        pairs = PairIndex(inputs)
        chosen, rejected = self.rewards(inputs, pairs)
        values = (chosen - rejected, (chosen > rejected).to(chosen.dtype), chosen, rejected)
        named = zip(METRICS, (*values, *pairs.means(inputs.logprobs)), strict=True)
        return {name: pairs.to_tokens(value) for name, value in named}

    def describe_with(self, what: str, *more: str) -> str:
        """Return a description that begins with `what`, and names the likelihood term if there is one."""
        weight = self.config.sft_weight
        term = [f"plus {weight:g} times the chosen answer's mean negative log-likelihood"] if weight > 0 else []
        return "; ".join([what, *more, *term]) + ". Every pair counts the same."


def smoothed_logistic(margin: Tensor, label_smoothing: float) -> Tensor:
    """Return -(1 - s) log sigma(margin) - s log sigma(-margin), where s is the share of pairs in the wrong order."""
    loss = -F.logsigmoid(margin)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-margin)
