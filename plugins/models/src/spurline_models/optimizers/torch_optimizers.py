"""The optimizers `adamw`, `adamw_8bit`, `sgd` and `muon`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter

from spurline_models.configs import quiet_bitsandbytes
from spurline_models.optimizers.configs import AdamW8BitConfig, AdamWConfig, MuonConfig, SgdConfig
from spurline_models.optimizers.groups import parameter_groups


def make_adamw(config: AdamWConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.AdamW:
    groups = parameter_groups(config, named_parameters)
    # A fused kernel for each group is several times faster than a kernel for each operation and tensor.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def make_adamw_8bit(config: AdamW8BitConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.Optimizer:
    quiet_bitsandbytes()
    from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(
        parameter_groups(config, named_parameters),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        min_8bit_size=config.smallest,
    )


def make_sgd(config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> torch.optim.SGD:
    groups = parameter_groups(config, named_parameters)
    # torch has no fused SGD kernel for sharded parameters.
    fused = not any(isinstance(parameter, DTensor) for parameter in named_parameters.values())
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices of hidden layers and torch's AdamW for the rest. They share one state."""

    def __init__(self, config: MuonConfig, named_parameters: Mapping[str, Parameter]) -> None:
        everything = named_parameters.items()
        hidden = {name: value for name, value in everything if config.is_hidden_matrix(name, value.shape)}
        rest = {name: value for name, value in everything if name not in hidden}
        self._inner: dict[str, torch.optim.Optimizer] = {}
        if hidden:
            self._inner["muon"] = torch.optim.Muon(
                parameter_groups(config, hidden),
                lr=config.learning_rate,
                momentum=config.momentum,
                adjust_lr_fn=config.adjust_learning_rate,
            )
        if rest:
            self._inner["adamw"] = make_adamw(config, rest)
        groups = [{**group, "algorithm": name} for name, inner in self._inner.items() for group in inner.param_groups]
        super().__init__(groups, {"lr": config.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "a closure is not supported"
        for name, inner in self._inner.items():
            # Set both in each step, since torch's `load_state_dict` replaces the objects.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            _step_sharded(inner) if name == "muon" and _is_sharded(inner) else inner.step()


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _step_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Run a step of torch's Muon on sharded matrices. Directions are gathered for one matrix at a time."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum, share = state["momentum_buffer"], group["momentum"]
            momentum.lerp_(parameter.grad, 1 - share)
            direction = parameter.grad.lerp(momentum, share) if group["nesterov"] else momentum
            change = _orthogonal_change(direction.full_tensor(), group)
            mesh = parameter.device_mesh
            everywhere = DTensor.from_local(change, mesh, [Replicate()] * mesh.ndim, run_check=False)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(everywhere.redistribute(placements=parameter.placements))


def _orthogonal_change(direction: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the change of a matrix that torch's Muon makes for this direction, without weight decay."""
    change = Parameter(torch.zeros_like(direction))
    change.grad = direction
    kept = ("lr", "eps", "ns_coefficients", "ns_steps", "adjust_lr_fn")
    settings = {name: group[name] for name in kept}
    torch.optim.Muon([change], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return change.detach()
