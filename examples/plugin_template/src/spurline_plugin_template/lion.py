"""Define Lion, whose steps have the same size in each weight (Chen et al. 2023, arXiv:2302.06675).

In: gradients, which the backend has clipped. Out: changed weights. The backend saves its state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from spurline_models.optimizers.groups import parameter_groups
from spurline_plugin_template.config import LionConfig


class Lion(torch.optim.Optimizer):
    """Optimizer `lion`."""

    def __init__(self, config: LionConfig, named_parameters: Mapping[str, Parameter]) -> None:
        # Each group has `lr`, which the run changes before every step, and `weight_decay`.
        super().__init__(parameter_groups(config, named_parameters), {"betas": config.betas})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step. The backend passes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                # A layer that was not used in this step has no gradient.
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"], group["betas"])

    def _update(
        self, parameter: Parameter, gradient: torch.Tensor, rate: float, decay: float, betas: tuple[float, float]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        direction = momentum.lerp(gradient, 1 - betas[0]).sign_()
        parameter.mul_(1 - rate * decay).add_(direction, alpha=-rate)
        momentum.lerp_(gradient, 1 - betas[1])
