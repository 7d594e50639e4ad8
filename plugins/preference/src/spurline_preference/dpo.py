"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

Let y+ be the chosen and y- the rejected answer to a prompt x. The implicit reward of an answer y is
r(y) = beta * (log p(y|x) - log p_ref(y|x)), where log p(y|x) is a sum over the tokens of y. Then

    margin  = r(y+) - r(y-)
    sigmoid   l = -(1 - s) log sigma(margin) - s log sigma(-margin)
    hinge     l = max(0, 1 - margin)
    ipo       l = (margin / beta - 1 / (2 beta))^2

s is `label_smoothing` (conservative DPO, Mitchell 2023, "A note on DPO with noisy preferences"). `hinge` applies the
loss of SLiC (Zhao et al. 2023, arXiv:2305.10425) to the reward of DPO (Liu et al. 2023, arXiv:2309.06657). For IPO
(Azar et al. 2023, arXiv:2310.12036) rewards are means over the tokens of an answer instead of sums, as in TRL. RPO
(Pang et al. 2024, arXiv:2404.19733) adds

    sft_weight * mean over the tokens of y+ of -log p

Every token of a pair gets the loss of its pair. The source gives the tokens of a pair weights that sum to 1, so the
loss of a step is the mean over pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_preference.configs import DpoConfig


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


class Dpo:
    """The loss `dpo`. It compares the log-probabilities of both answers with a reference model."""

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
        """Return the margin, the share of pairs in the right order, and rewards and mean log-probabilities of answers.

        The margin can grow while both answers become less likely. The log-probabilities show this.
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
            "ipo": "IPO: squared difference of 1 / (2 beta) and the mean margin per token between both answers",
        }
        parts = [f"{kinds[config.loss_type]}, with beta {config.beta:g}, relative to the reference model"]
        if config.label_smoothing > 0:
            parts.append(f"{config.label_smoothing:.0%} of the pairs are assumed to be in the wrong order")
        if config.sft_weight > 0:
            parts.append(f"plus {config.sft_weight:g} times the chosen answer's mean negative log-likelihood")
        return "; ".join(parts) + ". Every pair counts the same."

    def _rewards(self, inputs: TokenLossInputs, pairs: PairIndex) -> tuple[Tensor, Tensor]:
        """Return the implicit rewards of the chosen and of the rejected answers, each [pairs]."""
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
