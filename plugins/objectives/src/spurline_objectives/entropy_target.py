"""Compute the loss `ppo_entropy_target`: PPO with an entropy bonus that depends on the entropy of the step.

Skywork-OR1 (He et al. 2025, arXiv:2505.22312) adds alpha H to the objective of step k, with

    alpha_k = c   if e_k <= target, else 0

where e_k is the mean entropy of the policy before the update. The paper also raises or lowers c after each step. A loss
has no state between steps, so c is constant here, and a resumed run needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.protocols.loss import LogprobsOfRows, TokenLossInputs
from spurline_models.exact_sums import sum_of
from spurline_objectives.configs import EntropyTargetConfig
from spurline_rl.losses.algorithms import Ppo
from spurline_rl.losses.policy_loss import bounded_exp

_COEFFICIENTS = "entropy_coefficients"


class EntropyTarget(Ppo):
    """A loss that `PreparesBatch`. It estimates e_k by the mean of -log p_old over the step's trained tokens.

    A token's weight in the mean is p_old / p_rollout, since it was drawn from the engine's policy, which may be older
    or less precise. The estimate costs no pass over the logits. It is the same for all micro-batches and ranks of an
    optimizer step.
    """

    prepares: frozenset[str] = frozenset({_COEFFICIENTS})

    def __init__(self, config: EntropyTargetConfig):
        super().__init__(config)
        self._target = config.entropy_target
        self.needs |= self.prepares | {"rollout_logprobs"}

    def prepare(self, batch: TrainingBatch, logprobs: LogprobsOfRows) -> Mapping[str, Tensor]:
        old, trained = batch.tokens["old_logprobs"], batch.tokens["loss_weights"] != 0
        before, drawn_with = old[trained].double(), batch.tokens["rollout_logprobs"][trained].double()
        weights = bounded_exp(before - drawn_with)
        # Sums without rounding do not depend on the packing.
        total = sum_of(weights)
        entropy = -sum_of(weights * before) / total if total else 0.0
        coefficient = self.config.entropy_coefficient if entropy <= self._target else 0.0
        return {_COEFFICIENTS: torch.full_like(old, coefficient)}

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        # The base class would subtract a bonus with a constant coefficient.
        assert isinstance(inputs.entropy, Tensor), "the loss needs entropy and got none"
        constant = self.config.entropy_coefficient - inputs.columns[_COEFFICIENTS]
        return super().token_loss(inputs) + constant * inputs.entropy

    def surrogate_metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {**super().surrogate_metrics(inputs), "policy/entropy_coefficient": inputs.columns[_COEFFICIENTS]}

    def describe(self) -> str:
        return super().describe().removesuffix(".") + f" in steps with entropy of at most {self._target:g} nats."
