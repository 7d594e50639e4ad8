"""Share each sequence among ranks, for sequences too long for one (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509).

Place on the way: `TokenStream` -> this rank's part of it -> model -> logprobs of the part -> logprobs of the stream, on
every rank of the group. Each rank runs the model on consecutive tokens; only in attention does it compute some heads of
all tokens, for which tokens and heads change places twice. Whole segments come out, so a loss needs to know nothing of
it. Every function that exchanges something is a collective of the group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from spurline.errors import ConfigError
from spurline.model.device_profile import DeviceProfile
from spurline.model.token_stream import TokenStream, plan_segments


class SequenceSharing:
    """The ranks that share each of their sequences, of which this is one."""

    def __init__(self, group: ProcessGroup, profile: DeviceProfile) -> None:
        self._group = group
        self._profile = profile
        self._size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def part_of(self, stream: TokenStream) -> tuple[TokenStream, slice]:
        """This rank's tokens of a stream, and which of the stream's positions with loss are predicted from them.

        Tokens are consecutive, and their attention is that of the whole stream. Segments of one token are put in front
        of it until all ranks have equally many tokens.
        """
        padding = -stream.num_tokens % self._size
        length = (stream.num_tokens + padding) // self._size
        start, stop = self._rank * length, (self._rank + 1) * length
        source = stream.source + padding
        # Positions with loss rise, so those of a part are consecutive. The only wait for the device is this one.
        borders = torch.searchsorted(source, source.new_tensor([start, stop]))
        first, end, *starts = torch.cat([borders, stream.plan.cu_seqlens]).tolist()
        lengths = np.concatenate([np.ones(padding, np.int64), np.diff(starts)])
        plan = plan_segments(lengths, self._profile.slots_per_attention_call, self._profile.send)
        mine = slice(first, end)
        part = replace(
            stream,
            input_ids=_in_front(stream.input_ids, padding)[:, start:stop],
            position_ids=_in_front(stream.position_ids, padding)[:, start:stop],
            plan=replace(plan, exchange=self),
            source=source[mine] - start,
            targets=stream.targets[mine],
        )
        return part, mine

    def joined(self, values: Tensor, mine: slice, stream: TokenStream) -> Tensor:
        """Values at this rank's positions with loss -> those at all of the stream's; differentiable."""
        joined = _Join.apply(values, mine, len(stream.targets), self._group)
        assert isinstance(joined, Tensor)
        return joined

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionExchange`."""
        # Every rank needs keys and values for its queries: shared ones are repeated until they divide evenly.
        times = math.lcm(key.shape[1], self._size) // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def _to_heads(self, values: Tensor) -> Tensor:
        by_rank = values.unflatten(1, (self._size, -1)).transpose(0, 1)
        return self._exchanged(by_rank).flatten(0, 1)

    def to_tokens(self, output: Tensor) -> Tensor:
        """See `AttentionExchange`."""
        by_rank = output.unflatten(0, (self._size, -1))
        return self._exchanged(by_rank).transpose(0, 1).flatten(1, 2)

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        exchanged = _Exchange.apply(by_rank, self._group)
        assert isinstance(exchanged, Tensor)
        return exchanged


def _in_front(values: Tensor, padding: int) -> Tensor:
    """[1, T] -> [1, padding + T] with zeros in front: each a token of its own segment, at position 0."""
    return torch.nn.functional.pad(values, (padding, 0))


class _Exchange(torch.autograd.Function):
    """[ranks, ...]: what goes to each rank -> what came from each; its own inverse, so the gradient goes back so."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sent = grads[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received, None


class _Join(torch.autograd.Function):
    """Each rank's part of a vector -> the whole on every rank.

    All ranks compute the same loss from the whole, which counts once: each takes the gradient of its own part.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, mine: slice, size: int, group: ProcessGroup) -> Tensor:
        ctx.mine = mine
        whole = part.new_zeros(size)
        whole[mine] = part
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.mine], None, None, None


def check_heads(config: PretrainedConfig, context: int) -> None:
    """Raise ConfigError where so many ranks cannot share the attention heads of this model equally."""
    heads: int = config.get_text_config().num_attention_heads
    if heads % context:
        possible = [number for number in range(1, heads + 1) if heads % number == 0]
        raise ConfigError.at(
            "backend.context",
            f"is {context}, and the model's {heads} attention heads cannot be divided among so many ranks. Set it to "
            f"one of {', '.join(map(str, possible))}.",
        )
