"""Ranks that share token streams, compared by tests with one rank that computes the whole."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spurline_models.device_profile import device_profile
from spurline_models.streams.segment_attention import Scores, attend_segments
from spurline_models.streams.token_stream import TokenStream, plan_segments
from spurline_ranks.group import Place
from spurline_ranks.sequence_sharing import SequenceSharing

PROFILE = device_profile("cpu", "fp64")
HEAD_SIZE = 8


def stream_of(lengths: list[int], loss: list[bool]) -> TokenStream:
    """Segments of these lengths, which must not decrease; token i of the stream has the id i.

    loss: for each token that has one before it in its segment, whether it counts.
    """
    positions = torch.cat([torch.arange(length) for length in lengths])
    predicted = torch.nonzero(positions).flatten()
    targets = predicted[torch.tensor(loss[: len(predicted)], dtype=torch.bool)]
    tokens = torch.arange(sum(lengths))
    owners = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    return TokenStream(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        plan=plan_segments(np.array(lengths, np.int64), PROFILE.slots_per_attention_call, PROFILE.send),
        source=targets - 1,
        host_source=targets.numpy() - 1,
        targets=tokens[targets],
        weights=torch.ones(len(targets), dtype=torch.float64),
        segment_index=owners[targets],
        columns={},
        batch_index=targets,
    )


def computed(stream: TokenStream, part: TokenStream, heads: int, key_heads: int) -> tuple[list[Tensor], Tensor]:
    """Embeddings of queries, keys and values by token id, and what attention of the part makes of them where there is
    loss, [N of the part]."""
    generator = torch.Generator().manual_seed(heads * 8 + key_heads)
    tables = [
        torch.randn(stream.num_tokens, number, HEAD_SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for number in (heads, key_heads, key_heads)
    ]
    query, key, value = (table[part.input_ids[0]] for table in tables)
    output = attend_segments(query, key, value, part.plan, Scores())
    values = (output.flatten(1).sin().cumsum(1) / 7).sum(1)
    return tables, values[part.source]


class GroupsOfNeighbours:
    """sizes: of the groups of neighbouring ranks that this rank is in; each divides the world."""

    def __init__(self, place: Place, *sizes: int) -> None:
        self._groups: dict[int, Any] = {1: None}
        for size in sizes:
            for start in range(0, place.world, size):
                group = dist.new_group(list(range(start, start + size)))
                if start <= place.rank < start + size:
                    self._groups[size] = group


class SharingRank(GroupsOfNeighbours):
    def parts(self, size: int, lengths: list[int], loss: list[bool], multiple: int, at_least: int) -> dict[str, Any]:
        """Return the part of a stream that this rank computes."""
        stream = stream_of(lengths, loss)
        part, mine = self._sharing(size).part_of(stream, multiple=multiple, at_least=at_least)
        return {
            "tokens": part.input_ids[0].numpy(),
            "positions": part.position_ids[0].numpy(),
            "starts": part.plan.cu_seqlens.numpy(),
            "source": part.source.numpy(),
            "targets": part.targets.numpy(),
            "mine": mine,
            "unchanged": part is stream,
            "exchanges": part.plan.exchange is not None,
        }

    def attends(
        self, size: int, lengths: list[int], loss: list[bool], heads: int, key_heads: int, multiple: int
    ) -> list[np.ndarray]:
        """Return the values of the whole stream where there is loss, and the gradients of a loss, summed over ranks."""
        stream = stream_of(lengths, loss)
        sharing = self._sharing(size)
        part, mine = sharing.part_of(stream, multiple=multiple)
        tables, values = computed(stream, part, heads, key_heads)
        joined = sharing.joined(values, mine, stream)
        gradients = torch.autograd.grad((joined**2).sum(), tables)
        for gradient in gradients:
            if size > 1:
                dist.all_reduce(gradient, group=self._groups[size])
        return [joined.detach().numpy(), *(gradient.numpy() for gradient in gradients)]

    @functools.cache  # noqa: B019 - lives as long as its process
    def _sharing(self, size: int) -> SequenceSharing:
        return SequenceSharing(self._groups[size], PROFILE)
