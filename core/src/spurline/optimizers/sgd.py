"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from spurline.optimizers.configs import SgdConfig
from spurline.optimizers.groups import parameter_groups


def make_sgd(config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.SGD:
    """Optimizer `sgd`."""
    groups = parameter_groups(config, named_parameters)
    return torch.optim.SGD(
        groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
