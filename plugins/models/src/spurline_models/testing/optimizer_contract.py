"""Tests that every optimizer and every schedule must pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from spurline.protocols.optimizer import Optimizer, OptimizerConfig
from spurline.protocols.schedule import Schedule
from spurline.protocols.stateful import Stateful
from spurline_models.optimizers.optimization import Optimization
from spurline_models.optimizers.state import OptimizerState

SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (600, 16),
    "model.layers.0.mlp.up_proj.weight": (320, 16),
    "model.layers.0.mlp.up_proj.bias": (320,),
    "model.layers.0.mlp.down_proj.weight": (16, 320),
    "model.norm.weight": (16,),
    "lm_head.weight": (600, 16),
}
"""Parameters of a small model under names that Hugging Face models have."""


class OptimizerContract:
    """Tests for optimizers. Subclass with `make_config(**settings)` and `make_optimizer(config, named_parameters)`.

    Attributes:
        learning_rate: A rate at which thirty steps move float32 weights closer to a target that is about 1 away.
    """

    learning_rate = 1e-2

    def make_config(self, **settings: Any) -> OptimizerConfig:
        """Return your config with these settings of `OptimizerConfig`."""
        raise NotImplementedError("subclass OptimizerContract with make_config(self, **settings)")

    def make_optimizer(self, config: Any, named_parameters: Mapping[str, Parameter]) -> Optimizer:
        """Return your optimizer."""
        raise NotImplementedError("subclass OptimizerContract with make_optimizer(self, config, named_parameters)")

    def test_steps_lead_to_lower_loss_and_move_every_parameter(self) -> None:
        parameters, before = _parameters(), _parameters()
        optimization = self._optimization(parameters)
        first = _set_gradients(parameters)
        for number in range(1, 31):
            last = _set_gradients(parameters)
            rates = optimization.step(number)
        assert last < first
        assert rates == {"lr": self.learning_rate}
        for name, parameter in parameters.items():
            assert bool(torch.isfinite(parameter).all()), name
            assert not torch.equal(parameter, before[name]), f"{name} never moved"

    def test_saved_state_continues_bit_for_bit(self) -> None:
        parameters = _parameters()
        optimization = self._optimization(parameters)
        _train(optimization, parameters, range(1, 4))
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        saved = _through_bytes(optimization.state())
        _train(optimization, parameters, range(4, 8))

        resumed = {name: Parameter(weight.clone()) for name, weight in weights.items()}
        other = self._optimization(resumed)
        # A restore must replace all state of earlier steps.
        _train(other, resumed, range(1, 3))
        for name, weight in weights.items():
            resumed[name].data.copy_(weight)
        other.check(saved)
        other.restore(saved)
        _assert_same_state(other.state(), saved)
        _train(other, resumed, range(4, 8))
        for name, parameter in parameters.items():
            assert torch.equal(resumed[name], parameter), f"{name} differs after loading the saved state"
        _assert_same_state(other.state(), optimization.state())

    def test_the_schedule_decides_how_far_each_step_goes(self) -> None:
        parameters = _parameters()
        optimization = self._optimization(parameters, factor=lambda step: 1.0 if step < 3 else 0.0, weight_decay=0.1)
        _train(optimization, parameters, range(1, 3))
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        _set_gradients(parameters)
        parameters["lm_head.weight"].grad = None
        assert optimization.step(3) == {"lr": 0.0}
        for name, parameter in parameters.items():
            assert torch.equal(parameter, before[name]), f"{name} moved at a learning rate of 0, or without a gradient"
        # The state can still be read after a step in which a parameter had no gradient.
        optimization.check(_through_bytes(optimization.state()))

    def test_groups_have_rates_of_their_own(self) -> None:
        parameters, before = _parameters(), _parameters()
        groups = [{"match": "*down_proj*", "learning_rate_scale": 0.5}, {"match": "re:.", "learning_rate": 0.0}]
        optimization = self._optimization(parameters, groups=groups)
        _set_gradients(parameters)
        rates = optimization.step(1)
        assert rates == {"lr": self.learning_rate, "lr/groups.0": 0.5 * self.learning_rate, "lr/groups.1": 0.0}
        moved = [name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])]
        assert moved == ["model.layers.0.mlp.down_proj.weight"]

    def test_weight_decay_is_for_matrices_unless_a_group_says_otherwise(self) -> None:
        groups = [{"match": "model.norm.weight", "weight_decay": 0.5}, {"match": "lm_head*", "weight_decay": 0.0}]
        parameters, before = _parameters(), _parameters()
        optimization = self._optimization(parameters, groups=groups, weight_decay=0.5)
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimization.step(1)
        shrunk = [name for name, parameter in parameters.items() if bool(parameter.norm() < before[name].norm())]
        assert shrunk == [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "model.norm.weight",
        ]

    def test_sharded_parameters_are_trained_like_whole_ones(self) -> None:
        if self.make_config().needs_whole_parameters is not None:
            pytest.skip(f"needs whole parameters: {self.make_config().needs_whole_parameters}")
        with _one_rank() as mesh:

            def shard(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
                plain = parameters.items()
                return {name: Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])) for name, value in plain}

            whole, sharded = _parameters(), shard(_parameters())
            one, other = self._optimization(whole, weight_decay=0.1), self._optimization(sharded, weight_decay=0.1)
            _train(one, whole, range(1, 4))
            _train(other, sharded, range(1, 4), shard(_parameters(seed=1)))
            for name, parameter in whole.items():
                got = cast(DTensor, sharded[name].detach()).full_tensor()
                torch.testing.assert_close(got, parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)
            assert other.state().shapes == one.state().shapes

    def test_flat_pieces_of_parameters_are_trained_like_whole_ones(self) -> None:
        if not self.make_config().is_elementwise:
            pytest.skip("the config does not set is_elementwise")

        def cut(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
            # The cut lies within a row, not between rows.
            return {
                f"{name}/{index}": Parameter(piece.detach().clone())
                for name, value in parameters.items()
                for index, piece in enumerate(value.detach().flatten().tensor_split([value.numel() // 3 + 1]))
            }

        whole, pieces = _parameters(), cut(_parameters())
        # Do not set weight decay, which depends on the shapes of whole parameters.
        one, other = self._optimization(whole), self._optimization(pieces)
        _train(one, whole, range(1, 4))
        _train(other, pieces, range(1, 4), cut(_parameters(seed=1)))
        for name, parameter in whole.items():
            joined = torch.cat([pieces[f"{name}/{index}"].detach() for index in range(2)]).view(parameter.shape)
            torch.testing.assert_close(joined, parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)

    def test_a_step_in_several_calls_is_one_step_where_the_config_says_so(self) -> None:
        if not self.make_config().steps_apart:
            pytest.skip("the config does not set steps_apart")
        together, apart = _parameters(), _parameters()
        optimization, other = self._optimization(together), self._optimization(apart)
        for number in range(1, 4):
            _set_gradients(together)
            optimization.step(number)
            _set_gradients(apart)
            gradients = {name: parameter.grad for name, parameter in apart.items()}
            other.set_rates(number)
            for name, parameter in apart.items():
                for one in apart.values():
                    one.grad = None
                parameter.grad = gradients[name]
                other.optimizer.step()
        for name, parameter in together.items():
            assert torch.equal(apart[name], parameter), f"{name} depends on which parameters are stepped with it"
        _assert_same_state(other.state(), optimization.state())

    def test_memory_of_the_state_is_what_the_config_says(self) -> None:
        parameters = _parameters()
        optimization = self._optimization(parameters)
        _train(optimization, parameters, range(1, 3))
        tensors = {tensor.data_ptr(): tensor for tensor in optimization.state().tensors.values() if tensor.ndim}
        kept = sum(tensor.nbytes for tensor in tensors.values())
        assert self.make_config().state_bytes(SHAPES, 4) == pytest.approx(kept, rel=0.02)

    def _optimization(
        self, parameters: Mapping[str, Parameter], factor: Callable[[int], float] = lambda step: 1.0, **settings: Any
    ) -> Optimization:
        config = self.make_config(**{"learning_rate": self.learning_rate, **settings})
        return Optimization(config, self.make_optimizer(config, parameters), parameters, factor)


class ScheduleContract:
    """Tests for schedules. Subclass with `make_schedule(**settings)`, which takes settings of `ScheduleConfig`."""

    def make_schedule(self, **settings: Any) -> Schedule:
        """Return your schedule."""
        raise NotImplementedError("subclass ScheduleContract with make_schedule(self, **settings)")

    def test_factors_are_shares_of_the_peak_and_not_all_zero(self) -> None:
        for total in (1, 2, 3, 10, 1000):
            factors = [self.make_schedule().factor(step, total) for step in range(1, total + 1)]
            assert all(math.isfinite(factor) and 0 <= factor <= 1 for factor in factors), total
            assert max(factors) > 0, f"a run of {total} steps would not train at all"

    def test_a_factor_depends_on_step_and_total_alone(self) -> None:
        schedule = self.make_schedule(warmup_ratio=0.1)
        in_order = [schedule.factor(step, 50) for step in range(1, 51)]
        schedule.factor(3, 7)
        assert [schedule.factor(step, 50) for step in range(50, 0, -1)][::-1] == in_order
        assert [self.make_schedule(warmup_ratio=0.1).factor(step, 50) for step in range(1, 51)] == in_order
        assert not isinstance(schedule, Stateful), "a schedule's state would not be saved"

    def test_warm_up_rises_in_equal_steps(self) -> None:
        schedule = self.make_schedule(warmup_steps=5)
        peak = schedule.factor(5, 50)
        assert peak > 0
        assert [schedule.factor(step, 50) for step in range(1, 6)] == pytest.approx([k / 5 * peak for k in range(1, 6)])

    def test_steps_beyond_the_total_have_a_factor(self) -> None:
        for warmup in (0, 3, 30):
            schedule = self.make_schedule(warmup_steps=warmup)
            assert all(0 <= schedule.factor(step, 20) <= 1 for step in (20, 21, 22, 1000))


@contextmanager
def _one_rank() -> Iterator[DeviceMesh]:
    """Open a process group of one rank, so that torch treats parameters as sharded."""
    with TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            distributed.destroy_process_group()


def _parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def _set_gradients(parameters: Mapping[str, Parameter], targets: Mapping[str, Parameter] | None = None) -> float:
    """Set the gradients of a loss, half the squared distance to `targets`, and return the loss."""
    total = 0.0
    targets = _parameters(seed=1) if targets is None else targets
    for name, parameter in parameters.items():
        difference = parameter.detach() - targets[name].detach()
        parameter.grad = difference.clone()
        total += 0.5 * float(difference.double().square().sum())
        assert math.isfinite(total), f"{name} is not finite"
    return total


def _train(
    optimization: Optimization,
    parameters: Mapping[str, Parameter],
    steps: range,
    targets: Mapping[str, Parameter] | None = None,
) -> None:
    for number in steps:
        _set_gradients(parameters, targets)
        optimization.step(number)


def _through_bytes(state: OptimizerState) -> OptimizerState:
    """Serialize the state and read it again, as a checkpoint does."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in state.tensors.items()}
    return OptimizerState.read(load(save(tensors)), json.loads(json.dumps(state.facts())))


def _assert_same_state(one: OptimizerState, other: OptimizerState) -> None:
    assert one.facts() == other.facts()
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert _bits(tensor) == _bits(other.tensors[name]), f"{name} differs"


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
