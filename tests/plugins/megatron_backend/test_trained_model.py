"""What a rank optimizes of a model's parameters is its part of Megatron's buffers, however these are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer, shard_buffer
from torch.nn import Parameter

from spurline_megatron_backend.parts import HeldParameter
from spurline_megatron_backend.trained_model import Shard, _shards

SCALE = 10_000
"""Value i of parameter n is n * SCALE + i, which fp32 has exactly."""


@dataclass(frozen=True)
class FakeGroup:
    """What a buffer asks of its data-parallel group."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


@dataclass(frozen=True)
class Rank:
    """One data-parallel rank. parameters: in the order of the module; each has its values as gradients too."""

    parameters: list[Parameter]
    buffers: list[Any]
    shards: list[Shard]
    number_of: dict[int, int]
    """Of a parameter, by the id of what is held of it."""


@dataclass(frozen=True)
class Cut:
    """sizes: of parameters. shared: which are embeddings that two stages have. experts: which lie in a buffer of their
    own, with `expert_ranks` ranks that have the same ones."""

    sizes: list[int]
    shared: list[bool]
    experts: list[bool]
    ranks: int
    expert_ranks: int
    bucket_size: int | None
    dtype: torch.dtype


@st.composite
def cuts(draw: st.DrawFn, most_ranks: int) -> Cut:
    sizes = draw(st.lists(st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 1024])), min_size=1, max_size=6))
    flags = st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))
    ranks = draw(st.sampled_from([number for number in (1, 2, 3, 5, 8, 150) if number <= most_ranks]))
    return Cut(
        sizes,
        draw(flags),
        draw(flags),
        ranks,
        draw(st.sampled_from([size for size in (1, 2, 3, 5, 8) if ranks % size == 0])),
        draw(st.one_of(st.none(), st.integers(1, 700))),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


def rank_of(cut: Cut, number: int) -> Rank:
    exact = [torch.arange(size, dtype=torch.float32) + place * SCALE for place, size in enumerate(cut.sizes)]
    parameters = [Parameter(values.to(cut.dtype)) for values in exact]
    for parameter, shared in zip(parameters, cut.shared, strict=True):
        cast(Any, parameter).shared_embedding = shared
    dense = [parameter for parameter, expert in zip(parameters, cut.experts, strict=True) if not expert]
    experts = [parameter for parameter, expert in zip(parameters, cut.experts, strict=True) if expert]
    wrapped = SimpleNamespace(
        buffers=_buffers(cut, dense, FakeGroup(number, cut.ranks)),
        expert_parallel_buffers=_buffers(cut, experts, FakeGroup(number % cut.expert_ranks, cut.expert_ranks)),
    )
    for parameter, values in zip(parameters, exact, strict=True):
        cast(Any, parameter).main_grad.copy_(values)
    held = [HeldParameter((size,), (), is_divided=False, is_expert=False, is_copy=False) for size in cut.sizes]
    entries = zip(parameters, held, exact, strict=True)
    known = {id(parameter): (entry, values) for parameter, entry, values in entries}
    shards = _shards(cast(Any, wrapped), known)
    number_of = {id(entry): place for place, entry in enumerate(held)}
    return Rank(parameters, [*wrapped.buffers, *wrapped.expert_parallel_buffers], shards, number_of)


def _buffers(cut: Cut, parameters: Sequence[Parameter], group: FakeGroup) -> list[Any]:
    """What Megatron-core makes of these parameters, which it moves there. Padding is -1, of gradients too."""
    if not parameters:
        return []
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    groups = SimpleNamespace(tp=None, dp_cp=None)
    names = dict.fromkeys(parameters, "")
    indices = list(range(len(parameters)))
    buffers = "megatron.core.distributed.param_and_grad_buffer"
    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch(f"{buffers}.log_on_each_pipeline_stage"),
    ):
        buffer: Any = _ParamAndGradBuffer(
            settings,
            cut.dtype,
            torch.float32,
            list(parameters),
            cast(Any, group),
            cast(Any, cut.bucket_size),
            names,
            1.0,
            indices,
            False,
            cast(Any, groups),
        )
    buffer.grad_data.fill_(-1)
    return [buffer]


@given(cuts(most_ranks=150), st.data())
def test_a_rank_optimizes_what_a_reduce_scatter_leaves_on_it(cut: Cut, data: st.DataObject) -> None:
    rank = rank_of(cut, data.draw(st.integers(0, cut.ranks - 1)))
    left: list[int] = []
    for buffer in rank.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            left += shard_buffer(bucket.grad_data, group.size())[group.rank()].int().tolist()
    mine: list[int] = []
    for shard in rank.shards:
        first = rank.number_of[id(shard.held)] * SCALE + shard.span[0]
        values = list(range(first, first + shard.span[1] - shard.span[0]))
        assert shard.gradient.int().tolist() == values
        assert shard.main.dtype == torch.float32
        assert shard.main.int().tolist() == values
        mine += values
    assert sorted(mine) == sorted(value for value in left if value >= 0)


@given(cuts(most_ranks=8))
def test_what_all_ranks_write_is_the_whole_of_every_parameter_once_it_is_gathered(cut: Cut) -> None:
    ranks = [rank_of(cut, number) for number in range(cut.ranks)]
    written = [torch.zeros(size, dtype=torch.int64) for size in cut.sizes]
    for number, rank in enumerate(ranks):
        for shard in rank.shards:
            place = rank.number_of[id(shard.held)]
            with torch.no_grad():
                shard.main.add_(1)
                if cut.dtype == torch.float32:
                    assert shard.main.data_ptr() == shard.weights.data_ptr()
                else:
                    shard.weights.copy_(shard.main)
            # The groups of experts are several, each of which writes all of them.
            if not cut.experts[place] or number < cut.expert_ranks:
                written[place][slice(*shard.span)] += 1
    assert all((times == 1).all() for times in written)
    _gather(ranks)
    for rank in ranks:
        for place, parameter in enumerate(rank.parameters):
            wanted = torch.arange(cut.sizes[place], dtype=torch.float32) + place * SCALE + 1
            assert torch.equal(parameter.detach(), wanted.to(cut.dtype))


def _gather(ranks: list[Rank]) -> None:
    """As Megatron-core gathers buckets: each rank gives its part of all of them."""
    for number, rank in enumerate(ranks):
        for buffer_number, buffer in enumerate(rank.buffers):
            size = buffer.data_parallel_group.size()
            group_start = number - buffer.data_parallel_group.rank()
            for bucket_number, bucket in enumerate(buffer.buckets):
                for member in range(size):
                    theirs = ranks[group_start + member].buffers[buffer_number].buckets[bucket_number]
                    part = shard_buffer(theirs.param_data, size)[member]
                    shard_buffer(bucket.param_data, size)[member].copy_(part.clone())
