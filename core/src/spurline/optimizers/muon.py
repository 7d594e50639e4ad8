"""Muon for matrices of hidden layers and AdamW for the rest, as one optimizer outwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter

from spurline.optimizers.adamw import make_adamw
from spurline.optimizers.configs import MuonConfig
from spurline.optimizers.groups import parameter_groups


class Muon(torch.optim.Optimizer):
    """Optimizer `muon`: torch's Muon and torch's AdamW over the same state and parameter groups."""

    def __init__(self, config: MuonConfig, named_parameters: Mapping[str, Parameter]) -> None:
        hidden = {
            name: parameter
            for name, parameter in named_parameters.items()
            if config.is_hidden_matrix(name, parameter.shape)
        }
        rest = {name: parameter for name, parameter in named_parameters.items() if name not in hidden}
        self._inner: dict[str, torch.optim.Optimizer] = {}
        if hidden:
            self._inner["muon"] = torch.optim.Muon(
                parameter_groups(config, hidden),
                lr=config.learning_rate,
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.orthogonalization_steps,
                adjust_lr_fn=config.adjust_learning_rate,
            )
        if rest:
            self._inner["adamw"] = make_adamw(config, rest)
        groups = [{**group, "algorithm": name} for name, inner in self._inner.items() for group in inner.param_groups]
        super().__init__(groups, {"lr": config.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of each part; a closure is not supported."""
        assert closure is None
        for name, inner in self._inner.items():
            # Given anew each time: `load_state_dict` of torch replaces both objects.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            inner.step()
