"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from spurline_models.optimizers.configs import SgdConfig
from spurline_models.optimizers.groups import parameter_groups


def make_sgd(config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.SGD:
    """Make the optimizer `sgd`."""
    groups = parameter_groups(config, named_parameters)
    # torch has no fused kernel of it for sharded parameters.
    fused = not any(isinstance(parameter, DTensor) for parameter in named_parameters.values())
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
