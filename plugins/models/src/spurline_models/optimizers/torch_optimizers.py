"""The optimizers `adamw`, with moments of full precision or of 8 bits, and `sgd`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from spurline.errors import ConfigError
from spurline.importing import quiet_bitsandbytes
from spurline_models.optimizers.configs import AdamW8BitConfig, AdamWConfig, SgdConfig
from spurline_models.optimizers.groups import parameter_groups


def make_adamw(config: AdamWConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.AdamW:
    groups = parameter_groups(config, named_parameters)
    # One fused kernel per group is several times faster than a kernel per operation and tensor.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def make_adamw_8bit(config: AdamW8BitConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer. Raises ConfigError if bitsandbytes is missing, or has no kernel for these parameters."""
    quiet_bitsandbytes()
    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError.at(
            "optimizer.name",
            f"is {config.name}, which needs bitsandbytes. Run `pip install spurline-models[optim-8bit]`.",
        ) from error
    double = next((name for name, value in named_parameters.items() if value.dtype == torch.float64), None)
    if double is not None:
        raise ConfigError.at(
            "optimizer.name",
            f"is {config.name}, which has no kernel for float64, and {double} is of that dtype. Use adamw, or "
            "backend.precision: fp32.",
        )
    return AdamW8bit(
        parameter_groups(config, named_parameters),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        min_8bit_size=config.smallest,
    )


def make_sgd(config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.SGD:
    groups = parameter_groups(config, named_parameters)
    # torch has no fused kernel of it for sharded parameters.
    fused = not any(isinstance(parameter, DTensor) for parameter in named_parameters.values())
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)
