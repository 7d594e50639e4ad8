"""A model on its ranks with its optimizer: sums of gradients, the norm, clipping and the step.

Megatron-core keeps the gradients of a model in flat buffers. When it sums a buffer, each data-parallel rank gets one
range of the result (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054). A rank keeps fp32 values and optimizer
state only for its own ranges, and the run's optimizer updates these ranges. Then all ranks gather the new weights.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor
from torch.nn import Parameter

from spurline_megatron_backend.parts import HeldParameter
from spurline_megatron_backend.stages import StagedModel
from spurline_models.optimizers.groups import check_groups
from spurline_models.optimizers.optimization import OptimizationRecipe, set_rates
from spurline_models.optimizers.state import PEAK, group_values
from spurline_models.placement.offloading import DeviceMemory, DeviceTensors, tensors_in
from spurline_models.weights import PinnedWeights
from spurline_ranks.pieces import Shape
from spurline_ranks.worker import StepTotals, clip_factor


@dataclass(frozen=True)
class Shard:
    """The range `span` of a flattened parameter that this rank optimizes.

    Attributes:
        main: The fp32 values that the optimizer updates.
        weights: The same values in the model's dtype. If the model is fp32, they share the memory of `main`.
        gradient: The gradients. At the end of a backward pass they are summed over all ranks.
    """

    held: HeldParameter
    span: tuple[int, int]
    main: Parameter
    weights: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Owned:
    """The range `span` of a flattened parameter that this rank alone optimizes.

    Attributes:
        values: The fp32 values, in the optimizer's own memory.
        state: The optimizer state of the range, by key, in the optimizer's own mapping. It is empty before step 1.
    """

    held: HeldParameter
    span: tuple[int, int]
    values: Tensor
    state: MutableMapping[str, Any]


class TrainedModel:
    """A model on its ranks with the optimizer of all its parameters. The constructor is a collective.

    Args:
        shapes: The shapes of all tensors of the whole model, by name.
        tensor_rank: The number of this rank in its tensor group.
        exact: The fp32 values of the parameters, in the order of `StagedModel.parameters`.
        pinned: The digest of all weights, and of the untrained models.
    """

    def __init__(
        self,
        model: StagedModel,
        recipe: OptimizationRecipe,
        shapes: Mapping[str, Shape],
        tensor_rank: int,
        exact: Sequence[Tensor],
        pinned: PinnedWeights,
        memory: DeviceMemory,
    ) -> None:
        self.model = model
        self._memory = memory
        self.recipe = recipe
        self.shapes = shapes
        self.pinned = pinned
        self._tensor_rank = tensor_rank
        check_groups(recipe.config, shapes, recipe.key)
        for held, parameter in model.parameters():
            # Gradients of experts must be summed over the ranks with the same experts. Without this, Megatron does so
            # only if `expert` is above 1. But ranks of a tensor group may have the same experts and different tokens.
            cast(Any, parameter).allreduce = not held.is_expert
        # With overlap, each bucket of gradients is summed as soon as the last backward pass has filled it.
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True
        )
        self._wrapped = [DistributedDataParallel(model.config, settings, part) for part in model.parts]
        model.runs = self._wrapped
        # The schedules need one function, or a list if there are several parts.
        waits = [wrapped.no_sync for wrapped in self._wrapped]
        model.config.no_sync_func = cast(Any, waits if len(waits) > 1 else waits[0])
        model.config.finalize_model_grads_func = _sum_gradients
        known = {
            id(parameter): (entry, values) for (entry, parameter), values in zip(model.parameters(), exact, strict=True)
        }
        self.shards = [shard for wrapped in self._wrapped for shard in _shards(wrapped, known)]
        self.optimizer = _optimizer(recipe, shapes, model.parameters(), self.shards)
        self.made = group_values(self.optimizer)
        """The settings of the optimizer's groups when the optimizer was new."""
        self.updates = 0
        self._shown_while_given: bool | None = None
        """Whether engines had the device when `show_exact` wrote the fp32 values. None if it must write them again."""

    def owned(self) -> list[Owned]:
        """Return the ranges that this rank optimizes.

        While engines have the device, these are copies on the host, which must not be changed.
        """
        owned: list[Owned] = []
        for shard in self.shards:
            state = self.optimizer.state[shard.main]
            if self._memory.is_given:
                state = {key: self._memory.read(it) if isinstance(it, Tensor) else it for key, it in state.items()}
            owned.append(Owned(shard.held, shard.span, self._memory.read(shard.main.detach()), state))
        return owned

    def tensors(self) -> DeviceTensors:
        """Return the tensors that are on the device between two updates."""
        self._shown_while_given = None
        buffers = [buffer for wrapped in self._wrapped for buffer in _buffers(wrapped)]
        weights = [*self.model.tensors(), *(buffer.param_data for buffer in buffers)]
        state = [*(shard.main for shard in self.shards), *tensors_in(self.optimizer.state)]
        return DeviceTensors(weights, state, [buffer.grad_data for buffer in buffers])

    def begin(self) -> None:
        """Set the gradients to 0 before a step."""
        self._shown_while_given = None
        for wrapped in self._wrapped:
            wrapped.zero_grad_buffer()

    def totals(self, loss: float) -> StepTotals:
        """Combine the gradient norm and the loss of all ranks. See `StepTotals.of`. This is a collective."""
        counted = [shard.gradient for shard in self.shards if shard.held.counts_on(self._tensor_rank)]
        # This sums in float64 without a copy of the gradients in float64.
        norms = torch._foreach_norm(counted, dtype=torch.float64) if counted else []  # pyright: ignore
        device = self.model.parameters()[0][1].device
        own = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        return StepTotals.of(own, loss)

    def step(self, grad_norm: float) -> dict[str, float]:
        """Clip gradients and update the weights; return the learning rates as metrics. This is a collective."""
        factor = clip_factor(grad_norm, self.recipe.config.max_grad_norm)
        for shard in self.shards:
            if factor is not None:
                shard.gradient.mul_(factor)
            shard.main.grad = shard.gradient
        rates = set_rates(self.recipe.config, self.optimizer, self.recipe.factor(self.updates + 1))
        self.optimizer.step()
        for shard in self.shards:
            shard.main.grad = None
        self.fill_from_owned()
        self.updates += 1
        return rates

    def fill_from_owned(self) -> None:
        """Copy the optimized values into the weights, and gather these on data-parallel ranks. This is a collective."""
        self._shown_while_given = None
        with torch.no_grad():
            for shard in self.shards:
                if shard.weights.data_ptr() != shard.main.data_ptr():
                    shard.weights.copy_(shard.main)
            for wrapped in self._wrapped:
                wrapped.start_param_sync(force_sync=True)

    def exact(self) -> list[tuple[HeldParameter, Tensor]]:
        """Return every parameter in fp32. Values are valid from `show_exact` until the next step or load begins."""
        return [
            (held, value.detach() if value.dtype == torch.float32 else cast(Any, value).main_grad)
            for held, value in self.model.parameters()
        ]

    def show_exact(self) -> None:
        """Write the fp32 values of all parameters to the tensors that `exact` returns. This is a collective.

        If the model is not fp32, these tensors are the gradients, whose memory is free between steps.
        """
        # When engines give the device back, the copies of gradients on the host are freed, with these values.
        if self._shown_while_given == self._memory.is_given or self.model.config.params_dtype == torch.float32:
            return
        read = self._memory.read
        with torch.no_grad():
            for shard in self.shards:
                read(shard.gradient).copy_(read(shard.main))
            for wrapped in self._wrapped:
                for buffer in _buffers(wrapped):
                    group = buffer.data_parallel_group
                    for bucket in buffer.buckets:
                        shown = read(bucket.grad_data)
                        # Ranks can exchange only on the device. While engines use the device, one bucket still fits.
                        gathered = shown.to(bucket.grad_data.device)
                        own = gathered.chunk(group.size())[group.rank()]
                        dist.all_gather_into_tensor(gathered, own, group=group)
                        if gathered is not shown:
                            shown.copy_(gathered)
        self._shown_while_given = self._memory.is_given


def _sum_gradients(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
    """Sum gradients over all ranks. Do not divide by the number of tokens, since losses are already normalized."""
    finalize_model_grads(model, None, **options)


def _buffers(wrapped: DistributedDataParallel) -> list[Any]:
    """Return the buffers of dense parameters, then the buffers of experts. Their data-parallel groups differ."""
    owner: Any = wrapped
    return [*owner.buffers, *owner.expert_parallel_buffers]


def _shards(wrapped: DistributedDataParallel, known: Mapping[int, tuple[HeldParameter, Tensor]]) -> list[Shard]:
    """Return the ranges that this rank optimizes in this part of the model.

    `known` has the `HeldParameter` and the fp32 values of each parameter, by the id of the parameter.
    """
    shards: list[Shard] = []
    for buffer in _buffers(wrapped):
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            share: int = bucket.grad_data.numel() // size
            low, high = rank * share, (rank + 1) * share
            parameters: Sequence[Parameter] = bucket.params_list
            for parameter in parameters:
                start, end, _ = buffer.param_index_map[parameter]
                first, last = max(start - bucket.offset, low), min(end - bucket.offset, high)
                if first >= last:
                    continue
                assert bucket.param_data is not None
                held, exact = known[id(parameter)]
                begin = first + bucket.offset - start
                span = (begin, begin + last - first)
                weights = bucket.param_data[first:last]
                # The optimizer updates fp32 weights in place.
                main = weights if weights.dtype == torch.float32 else exact.view(-1)[slice(*span)].to(weights.device)
                shards.append(Shard(held, span, Parameter(main), weights, bucket.grad_data[first:last]))
    return shards


def _optimizer(
    recipe: OptimizationRecipe,
    shapes: Mapping[str, Shape],
    parameters: Sequence[tuple[HeldParameter, Parameter]],
    shards: Sequence[Shard],
) -> Any:
    """Make the run's optimizer for these shards. All ranks have the same groups, but some groups may be empty."""
    device = parameters[0][1].device
    # Settings depend only on names and numbers of dimensions. Below, shards replace these empty parameters.
    named = {name: Parameter(torch.empty((0,) * len(shape), device=device)) for name, shape in shapes.items()}
    optimizer = recipe.make_optimizer(named)
    names = {id(parameter): name for name, parameter in named.items()}
    group_of = {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        group["params"] = []
        group[PEAK] = group["lr"]
    for shard in shards:
        # A part of an embedding that is only padding is not optimized.
        if shard.held.parts:
            group_of[shard.held.parts[0].name]["params"].append(shard.main)
    return optimizer
