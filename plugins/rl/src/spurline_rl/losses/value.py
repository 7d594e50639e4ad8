"""The loss of a critic: squared error of its values, clipped around the earlier ones (PPO, arXiv:1707.06347).

With v the value, v_old the one before the update and R the return:

    l = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

For `Backend.update(..., role="critic")`, where `inputs.logprobs` are the critic's values: at the position before a
token, the model predicts the return from that token on. `gae` reads `values` and writes `returns`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_rl.losses.configs import ValueLossConfig


class ValueLoss:
    """Half the squared error. A value that has moved by `clip` gets no gradient to move further."""

    needs: frozenset[str] = frozenset({"values", "returns"})

    def __init__(self, config: ValueLossConfig):
        self.config = config

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        values, target = inputs.logprobs, inputs.columns["returns"]
        error = (values - target).square()
        if self.config.clip is not None:
            error = torch.maximum(error, (self._clip_values(inputs) - target).square())
        return error / 2

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        found = {"value/predicted": inputs.logprobs, "value/return": inputs.columns["returns"]}
        if self.config.clip is not None:
            moved = self._clip_values(inputs) != inputs.logprobs
            found["value/clip_fraction"] = moved.to(inputs.logprobs.dtype)
        return found

    def describe(self) -> str:
        clip = f", clipped to {self.config.clip:g} around its value before the update" if self.config.clip else ""
        return f"Critic: half the squared difference of its value and the return{clip}."

    def _clip_values(self, inputs: TokenLossInputs) -> Tensor:
        assert self.config.clip is not None
        old = inputs.columns["values"]
        return torch.clamp(inputs.logprobs, old - self.config.clip, old + self.config.clip)
