"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

    s = (p(y) / p_old(y))^(1 / |y|) = exp(mean over the sequence of log p - log p_old)
    l = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)       for each token of the sequence

All tokens of a sequence share one ratio, so the clip leaves out sequences, not tokens. A sequence is a segment: the
loss tokens of one turn, or of all turns that were merged into one row, without tokens that a correction rejected. The
paper weighs sequences alike: `reduction: sequence_mean`. With one advantage per sequence, this is also the gradient of
the paper's GSPO-token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import GspoConfig
from spurline_rl.losses.policy_loss import PolicyLoss, bounded_exp, clip_fractions


class Gspo(PolicyLoss[GspoConfig]):
    """The smaller objective of the sequence's ratio and its clipped ratio."""

    def __init__(self, config: GspoConfig):
        super().__init__(config)
        self._low, self._high = 1 - config.clip_low, 1 + config.clip_high

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        ratio, advantages = _sequence_ratio(inputs), inputs.columns["advantages"]
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(self._low, self._high))

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        ratio = _sequence_ratio(inputs)
        return {
            **clip_fractions(ratio, inputs.columns["advantages"], self._low, self._high),
            "policy/sequence_ratio": ratio,
            "policy/sequence_ratio/max": ratio,
            "policy/sequence_ratio/min": ratio,
        }

    def describe_surrogate(self) -> str:
        return (
            "GSPO: minus advantage times the sequence's mean probability ratio to the policy before the update, "
            f"clipped to {self._low:g}..{self._high:g}"
        )


def _sequence_ratio(inputs: TokenLossInputs) -> Tensor:
    """Return for each token the geometric mean of the ratios in its segment, [N]."""
    log_ratio = inputs.logprobs - inputs.columns["old_logprobs"]
    sums = log_ratio.new_zeros(inputs.num_segments).index_add(0, inputs.segment_index, log_ratio)
    counts = torch.bincount(inputs.segment_index, minlength=inputs.num_segments).clamp(min=1)
    return bounded_exp(sums / counts)[inputs.segment_index]
