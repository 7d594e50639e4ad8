"""The contracts of optimizers and schedules catch the mistakes they were written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from spurline.errors import CheckpointWriteError, PluginError
from spurline_models.optimizers.configs import ConstantConfig, SgdConfig
from spurline_models.optimizers.groups import parameter_groups
from spurline_models.testing import OptimizerContract, ScheduleContract


class Descent(torch.optim.Optimizer):
    """Plain descent with momentum, right in all that the mutants below are wrong in."""

    def __init__(self, config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> None:
        super().__init__(self.groups(config, named_parameters), {})

    def groups(self, config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> Any:
        return parameter_groups(config, named_parameters)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    buffer = self.remembered(parameter)
                    buffer.mul_(0.5).add_(parameter.grad)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(self.rate(group) * buffer)

    def remembered(self, parameter: Parameter) -> torch.Tensor:
        return self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))

    def rate(self, group: Mapping[str, Any]) -> float:
        return group["lr"]


class Deaf(Descent):
    """Keeps the learning rate it was made with."""

    def rate(self, group: Mapping[str, Any]) -> float:
        return group["initial_lr"]


class Secretive(Descent):
    """Keeps its state where nobody looks."""

    def remembered(self, parameter: Parameter) -> torch.Tensor:
        hidden = self.__dict__.setdefault("hidden", {})
        return hidden.setdefault(id(parameter), torch.zeros_like(parameter))


class Listing(Descent):
    """Keeps a list of tensors."""

    def remembered(self, parameter: Parameter) -> torch.Tensor:
        return self.state[parameter].setdefault("buffers", [torch.zeros_like(parameter)])[0]


class Flat(Descent):
    """Has one group, whatever the config says."""

    def groups(self, config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> Any:
        return [{"params": list(named_parameters.values()), "lr": config.learning_rate, "weight_decay": 0.5}]


class Boasting(SgdConfig):
    """Says that it keeps nothing."""

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        return 0


def suite(kind: type[Descent], config: type[SgdConfig] = SgdConfig) -> OptimizerContract:
    class Suite(OptimizerContract):
        def make_config(self, **settings: Any) -> SgdConfig:
            return config(momentum=0.5, **settings)

        def make_optimizer(self, config: SgdConfig, named_parameters: Mapping[str, Parameter]) -> Descent:
            return kind(config, named_parameters)

    return Suite()


def all_tests(suite: object) -> list[Callable[[], None]]:
    return [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]


def test_an_optimizer_without_these_mistakes_passes() -> None:
    for test in all_tests(suite(Descent)):
        test()


@pytest.mark.parametrize(
    ("made", "caught_by", "error", "message"),
    [
        (suite(Deaf), "test_the_schedule_decides_how_far_each_step_goes", AssertionError, "moved at a learning rate"),
        (suite(Secretive), "test_saved_state_continues_bit_for_bit", AssertionError, "went another way after loading"),
        (suite(Listing), "test_saved_state_continues_bit_for_bit", CheckpointWriteError, "keeps `buffers` of .* list"),
        (suite(Flat), "test_groups_have_rates_of_their_own", PluginError, "and the config says"),
        (suite(Flat), "test_weight_decay_is_for_matrices_unless_a_group_says_otherwise", AssertionError, "bias"),
        (suite(Descent, Boasting), "test_memory_of_the_state_is_what_the_config_says", AssertionError, "0 == 119104"),
    ],
)  # fmt: skip
def test_the_optimizer_contract_catches(
    made: OptimizerContract, caught_by: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(made, caught_by)()


class Remembering:
    """Counts its calls instead of looking at the step."""

    def __init__(self, config: ConstantConfig) -> None:
        self._calls = 0

    def factor(self, step: int, total: int) -> float:
        self._calls += 1
        return max(0.0, 1 - self._calls / 100)


class Overshooting(Remembering):
    def factor(self, step: int, total: int) -> float:
        return 1 - step / total


@pytest.mark.parametrize(
    ("kind", "caught_by"),
    [
        (Remembering, "test_a_factor_depends_on_step_and_total_alone"),
        (Remembering, "test_warm_up_rises_in_equal_steps"),
        (Overshooting, "test_steps_beyond_the_total_have_a_factor"),
        (Overshooting, "test_factors_are_shares_of_the_peak_and_not_all_zero"),
    ],
)
def test_the_schedule_contract_catches(kind: type[Remembering], caught_by: str) -> None:
    class Suite(ScheduleContract):
        def make_schedule(self, **settings: Any) -> Remembering:
            return kind(ConstantConfig(**settings))

    with pytest.raises(AssertionError):
        getattr(Suite(), caught_by)()
