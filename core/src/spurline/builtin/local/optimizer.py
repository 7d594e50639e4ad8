"""AdamW over the trainable parameters, with its state reachable by parameter name.

Place on the way: gradients -> this -> weights. The learning rate comes from `schedule.py` at each step; clipping
happens before, in the backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from spurline.config.run_config import OptimizerConfig

STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")


def make_optimizer(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices (and embeddings), none on biases, norms and other vectors."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if members
    ]
    # One fused kernel per group, on CPU as on CUDA: several times faster than a kernel per operation and tensor.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.AdamW, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """`NAME/exp_avg`, `NAME/exp_avg_sq` and `NAME/step` of each parameter that has been updated."""
    return {
        f"{name}/{key}": optimizer.state[parameter][key]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in STATE_NAMES
    }


def expected_shape(key: str, parameters: Mapping[str, Parameter]) -> tuple[int, ...] | None:
    """Shape of an entry of `optimizer_tensors`; None for an entry that this model cannot have."""
    name, _, state = key.rpartition("/")
    if name not in parameters or state not in STATE_NAMES:
        return None
    return () if state == "step" else tuple(parameters[name].shape)


def restore_optimizer(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the state by what `optimizer_tensors` gave, bit for bit."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if f"{name}/step" in tensors:
            optimizer.state[parameter] = {
                # A fused kernel wants also its step counters beside the weights.
                key: tensors[f"{name}/{key}"].to(parameter.device, copy=True)
                for key in STATE_NAMES
            }
