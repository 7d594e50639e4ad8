"""KTO: Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

Each answer y is good or bad. With the implicit reward of DPO, r(y) = beta * (log p(y|x) - log p_ref(y|x)),

    kl     = max(0, mean over mismatched answers y' of log p(y'|x) - log p_ref(y'|x))
    good   l = desirable_weight   * (1 - sigma(r(y) - beta * kl))
    bad    l = undesirable_weight * (1 - sigma(beta * kl - r(y)))

kl estimates how far the policy is from the reference model, with answers y' to other prompts. It is a reference point
and gets no gradient. The mean is over all mismatched answers of an optimizer step, whatever the micro-batches and ranks
are: `prepare` computes it as a column. Mismatched answers have label 0 in the batch, in rows of their own, and are not
trained.

Every token of an answer gets the loss of its answer. The source gives the tokens of an answer weights that sum to 1, so
the loss of a step is the mean over answers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError
from spurline.protocols.loss import LogprobsOfRows, MetricValues, TokenLossInputs
from spurline_models.exact_sums import sum_of
from spurline_preference.configs import KtoConfig


class Kto:
    """The loss `kto`. A good answer should be likelier than the reference point, and a bad one less likely."""

    needs: frozenset[str] = frozenset({"labels", "reference_logprobs", "kl"})
    prepares: frozenset[str] = frozenset({"kl"})

    def __init__(self, config: KtoConfig) -> None:
        self.config = config

    def prepare(self, batch: TrainingBatch, logprobs: LogprobsOfRows) -> Mapping[str, Tensor]:
        is_mismatched = ((batch.tokens["labels"] == 0) & (batch.tokens["segment_ids"] > 0)).any(1)
        count = int(batch.segments["length"].counts()[is_mismatched.numpy()].sum())
        if count == 0:
            raise DataError(
                "loss: kto needs answers with label 0, which are answers to other prompts, but the batch has none. Set "
                "source: labels, or let your own source add such rows."
            )
        ratio = logprobs("policy", is_mismatched) - batch.tokens["reference_logprobs"]
        weights = batch.tokens["loss_weights"]
        has_loss = is_mismatched[:, None] & (weights != 0)
        # The sum is exact, so it does not depend on the packing.
        kl = sum_of(ratio[has_loss]) / count
        return {
            "kl": torch.full_like(weights, max(kl, 0.0)),
            "loss_weights": torch.where(is_mismatched[:, None], 0.0, weights),
        }

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        sign = inputs.columns["labels"].to(inputs.logprobs.dtype)
        config = self.config
        weight = torch.where(sign > 0, config.desirable_weight, config.undesirable_weight)
        # 1 - sigma(z) = sigma(-z).
        return weight * torch.sigmoid(-sign * self._advance(inputs))

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, MetricValues]:
        """Return the metrics of `spurline_preference.pairs.METRICS`, and the divergence `preference/kl` in nats.

        The margin of an answer is the distance of its reward from the reference point, positive on the right side.
        """
        sign = inputs.columns["labels"].to(inputs.logprobs.dtype)
        is_good, is_bad = (sign > 0).to(sign.dtype), (sign < 0).to(sign.dtype)
        margin, reward = sign * self._advance(inputs), self._reward(inputs)
        ones = torch.ones_like(inputs.logprobs)
        logprob = _by_answer(inputs.logprobs, inputs) / _by_answer(ones, inputs)
        return {
            "preference/margin": margin,
            "preference/accuracy": (margin > 0).to(margin.dtype),
            "preference/chosen_reward": (reward, is_good),
            "preference/rejected_reward": (reward, is_bad),
            "preference/chosen_logprob": (logprob, is_good),
            "preference/rejected_logprob": (logprob, is_bad),
            "preference/kl": inputs.columns["kl"],
        }

    def describe(self) -> str:
        config = self.config
        return (
            f"KTO: {config.desirable_weight:g} times one minus the sigmoid of how far the reward of a good answer "
            f"exceeds the reference point, and {config.undesirable_weight:g} times that of how far the reward of a bad "
            f"answer is below it, with beta {config.beta:g}, relative to the reference model. Every answer counts the "
            "same."
        )

    def _reward(self, inputs: TokenLossInputs) -> Tensor:
        """Return the implicit reward of the answer of each token [N]."""
        return self.config.beta * _by_answer(inputs.logprobs - inputs.columns["reference_logprobs"], inputs)

    def _advance(self, inputs: TokenLossInputs) -> Tensor:
        """Return how far the reward of each token's answer [N] exceeds the reference point."""
        return self._reward(inputs) - self.config.beta * inputs.columns["kl"]


def _by_answer(values: Tensor, inputs: TokenLossInputs) -> Tensor:
    """Give each token [N] the sum of the values of its answer."""
    sums = values.new_zeros(inputs.num_segments).index_add(0, inputs.segment_index, values)
    return sums[inputs.segment_index]
