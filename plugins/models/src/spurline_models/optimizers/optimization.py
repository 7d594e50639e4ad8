"""Combine the optimizer of a model with a schedule of learning rates, and save the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.nn import Parameter

from spurline.config.run_config import CriticConfig, RunConfig
from spurline.errors import PluginError
from spurline.plugins.registry import Registry
from spurline.protocols.optimizer import Optimizer, OptimizerConfig
from spurline.protocols.schedule import Schedule
from spurline_models.optimizers.groups import check_groups, group_rate
from spurline_models.optimizers.state import PEAK, OptimizerState, check_state, group_values, put_state, take_state


class Optimization:
    """An optimizer with its config and a schedule.

    Args:
        config: Settings of the optimizer.
        optimizer: A new optimizer.
        parameters: The optimizer's parameters by name.
        factor: A function that maps the number of an optimizer step, from 1, to a share of the peak learning rate.
        key: Key path of the optimizer's settings in the config file.
        reproducible: Whether steps must not depend on how ranks divide parameters. Fused kernels of the CPU do, since
            they round the last values of a tensor otherwise than the values before.

    Raises:
        ConfigError: If a group of the config fits no parameter.
        PluginError: If the optimizer leaves parameters out.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        optimizer: Optimizer,
        parameters: Mapping[str, Parameter],
        factor: Callable[[int], float],
        key: str = "optimizer",
        *,
        reproducible: bool = False,
    ) -> None:
        check_groups(config, parameters, key)
        self.max_grad_norm = config.max_grad_norm
        self.optimizer = optimizer
        self._config = config
        self._parameters = parameters
        self._factor = factor
        _check_complete(optimizer, config, parameters)
        for group in optimizer.param_groups:
            if reproducible and group.get("fused") and all(value.device.type == "cpu" for value in group["params"]):
                group.update(fused=False, foreach=True)
        self._made = group_values(self.optimizer)
        for group in self.optimizer.param_groups:
            group[PEAK] = group["lr"]

    def step(self, number: int) -> dict[str, float]:
        """Run optimizer step `number`, counted from 1, with the gradients of the parameters.

        Returns:
            The learning rates: `lr`, and `lr/groups.N` of each group in the config.
        """
        rates = self.set_rates(number)
        self.optimizer.step()
        return rates

    def set_rates(self, number: int) -> dict[str, float]:
        """Set and return the learning rates of step `number`, before the caller steps the optimizer."""
        return set_rates(self._config, self.optimizer, self._factor(number))

    def state(self) -> OptimizerState:
        """Return the state for a checkpoint. Raises CheckpointWriteError if the state cannot be saved."""
        return take_state(self._config.name, self.optimizer, self._parameters, self._made)

    def check(self, saved: OptimizerState) -> None:
        """Raise CheckpointError if `restore` cannot use this state. The optimizer is not changed."""
        check_state(saved, self._config.name, self._parameters, self._made)

    def restore(self, saved: OptimizerState) -> None:
        """Continue from this state, bit for bit."""
        put_state(saved, self.optimizer, self._parameters, self._made)


@dataclass(frozen=True)
class OptimizationRecipe:
    """A function that makes the `Optimization` of a model, given the model's parameters by name."""

    config: OptimizerConfig
    registry: Registry
    factor: Callable[[int], float]
    key: str = "optimizer"

    def __call__(self, parameters: Mapping[str, Parameter], *, reproducible: bool = False) -> Optimization:
        optimizer = self.make_optimizer(parameters)
        return Optimization(self.config, optimizer, parameters, self.factor, self.key, reproducible=reproducible)

    def make_optimizer(self, parameters: Mapping[str, Parameter]) -> Optimizer:
        return self.registry.create("optimizer", self.config, named_parameters=parameters)


def policy_optimization(run: RunConfig, registry: Registry, total: int) -> OptimizationRecipe:
    """Return the recipe for the policy in a run of `total` optimizer steps."""
    schedule: Schedule = registry.create("schedule", run.schedule)
    return OptimizationRecipe(run.optimizer, registry, lambda step: schedule.factor(step, total))


def critic_optimization(critic: CriticConfig, registry: Registry) -> OptimizationRecipe:
    """Return the recipe for the critic. Its learning rate is constant after a warm-up, counted in critic steps."""
    warmup = max(1, critic.warmup_steps)
    return OptimizationRecipe(critic.optimizer, registry, lambda step: min(1.0, step / warmup), "critic.optimizer")


def set_rates(config: OptimizerConfig, optimizer: Optimizer, factor: float) -> dict[str, float]:
    """Set the learning rate of every parameter group to `factor` times its peak, and return the rates by name."""
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * factor
    rates = {"lr": config.learning_rate * factor}
    for position, group in enumerate(config.groups):
        rates[f"lr/groups.{position}"] = group_rate(config, group) * factor
    return rates


def _check_complete(optimizer: Optimizer, config: OptimizerConfig, parameters: Mapping[str, Parameter]) -> None:
    """Raise PluginError unless the optimizer has all parameters. Missing parameters would silently stay untrained."""
    own = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    left_out = [name for name, parameter in parameters.items() if id(parameter) not in own]
    if left_out or len(own) != len(parameters):
        raise PluginError(
            f"optimizer '{config.name}' must be a torch optimizer of the {len(parameters)} named parameters it was "
            f"given. Left out: {', '.join(left_out[:3]) or 'none'}."
        )
