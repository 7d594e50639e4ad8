"""AdamW over the trainable parameters, its state by parameter name, and its learning rate.

The rate is a pure function of the optimizer step: there is nothing to save and nothing to drift on resume. Clipping
happens before, in the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from spurline.config.run_config import CriticConfig, OptimizerConfig, RunConfig, ScheduleConfig

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


def policy_rate(run: RunConfig, total: int) -> Callable[[int], float]:
    """The policy's learning rate by optimizer step, for a run of `total` of them."""
    return lambda step: learning_rate(step, peak=run.optimizer.learning_rate, total=total, schedule=run.schedule)


def critic_rate(critic: CriticConfig) -> Callable[[int], float]:
    """The critic's learning rate by its own optimizer steps; constant after warm-up, so it needs no total."""
    peak, warmup = critic.optimizer.learning_rate, critic.warmup_steps
    return lambda step: peak * min(1.0, step / warmup) if warmup else peak


def learning_rate(step: int, *, peak: float, total: int, schedule: ScheduleConfig) -> float:
    """The rate used in optimizer step `step`, counted from 1, of a run of `total` steps.

    With W warm-up steps, step s <= W uses peak * s / W. After that the shape runs over the remaining steps: the first
    one uses the peak, and step total + 1, which never runs, would use the minimum; so no step is spent at rate 0.
    Steps beyond `total` stay at the minimum.
    """
    assert step >= 1, step
    warmup = warmup_steps(schedule, total)
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    progress = min(1.0, (step - warmup - 1) / max(1, total - warmup))
    shape = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * shape)


def warmup_steps(schedule: ScheduleConfig, total: int) -> int:
    """Optimizer steps of warm-up."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return math.ceil(schedule.warmup_ratio * total)
