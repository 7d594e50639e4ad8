"""Find the place of each rank in tensor, context, expert, data and pipeline groups, and the layers that it holds.

Ranks are numbered as in Megatron-core: along the tensor group first, then along context, data and pipeline. So the
groups that exchange most data are on one machine. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """The index of a rank in each of its groups. The last three are indices in separate groups for experts."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int


@dataclass(frozen=True)
class Grid:
    """The division of `ranks` processes into groups. A pipeline stage holds `virtual_stages` parts of the model."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def data(self) -> int:
        """The number of shares into which the rows of a batch are divided."""
        return self.ranks // self.ranks_of_rows

    @property
    def ranks_of_rows(self) -> int:
        """The number of ranks that compute the same rows together."""
        return self.tensor * self.context * self.pipeline

    @property
    def expert_data(self) -> int:
        """The number of ranks that hold the same part of the same experts."""
        return self.ranks // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def ranks_of_stage(self) -> int:
        return self.ranks // self.pipeline

    @property
    def parallel_sizes(self) -> dict[str, Any]:
        """The sizes under Megatron-core's names."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual_stages if self.virtual_stages > 1 else None,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
        }

    def place(self, rank: int) -> Place:
        """Return the place of the rank with this number, counted from 0."""
        stage, within = divmod(rank, self.ranks_of_stage)
        rest, tensor = divmod(within, self.tensor)
        data, context = divmod(rest, self.context)
        expert_rest, expert_tensor = divmod(within, self.expert_tensor)
        expert_data, expert = divmod(expert_rest, self.expert)
        return Place(tensor, context, data, stage, expert, expert_tensor, expert_data)

    def speaks(self, rank: int) -> bool:
        """Return whether this rank answers for all ranks that compute the same rows.

        The rank that answers is on the last stage, which has the logprobs.
        """
        place = self.place(rank)
        return place.pipeline == self.pipeline - 1 and place.tensor == 0 and place.context == 0

    def rounded_up(self, microbatches: int) -> int:
        """Round up the number of micro-batches of a step. With virtual stages it must be a multiple of `pipeline`."""
        return microbatches if self.virtual_stages == 1 else -(-microbatches // self.pipeline) * self.pipeline

    def count_layers(self, num_layers: int, stage: int) -> int:
        return sum(map(len, self.layers(num_layers, stage)))

    def layers(self, num_layers: int, stage: int) -> tuple[range, ...]:
        """Return the numbers of the layers of each model part of this stage.

        Parts are as equal as possible. The first part also has the embedding, and the last part the output layer, so
        these two parts never have more layers than other parts.
        """
        sizes = part_sizes(num_layers, self.pipeline * self.virtual_stages)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        numbers = range(stage, len(sizes), self.pipeline)
        return tuple(range(starts[number], starts[number] + sizes[number]) for number in numbers)


def part_sizes(num_layers: int, num_parts: int) -> list[int]:
    """Return the number of layers of each part of the model, in order."""
    size, extra = divmod(num_layers, num_parts)
    # Parts in the middle get the remaining layers. Late parts get them first, since they keep fewer activations.
    order = [*range(num_parts - 2, 0, -1), num_parts - 1, 0]
    larger = set(order[:extra])
    return [size + (number in larger) for number in range(num_parts)]
