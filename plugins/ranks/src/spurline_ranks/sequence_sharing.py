"""Share sequences that are too long for one rank among several ranks.

Data flow: `TokenStream` -> this rank's part -> model -> logprobs of the part -> logprobs of the stream, on every
rank of the group. Each rank runs the model on consecutive tokens. In attention, each rank computes some heads of all
tokens. The ranks exchange tensors before attention, to divide them by heads, and after it, to divide them by tokens
again (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.errors import ModelError
from spurline_models.architecture import decoder_layers, vocabulary_size
from spurline_models.device_profile import DeviceProfile
from spurline_models.experts.routers import find_routers
from spurline_models.probe import distance, probe_sequences, probe_stream, rounded_layers
from spurline_models.streams.stream_model import evaluation_mode
from spurline_models.streams.token_stream import TokenStream, plan_segments


class SequenceSharing:
    """The group of ranks that share the sequences of this rank.

    If the group is None, this rank shares no sequences: streams are only padded, and ranks exchange nothing.
    """

    def __init__(self, group: ProcessGroup | None, profile: DeviceProfile) -> None:
        self._group = group
        self._profile = profile
        self._size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)

    def part_of(self, stream: TokenStream, *, multiple: int = 1, at_least: int = 0) -> tuple[TokenStream, slice]:
        """Pad a stream with one-token segments in front, and return this rank's part of it.

        Args:
            stream: The whole stream. Attention still covers all of it.
            multiple: Every rank gets the same number of tokens, a multiple of this.
            at_least: The padded stream has at least this number of tokens.

        Returns:
            This rank's part, and a slice of the stream's positions with loss: the positions that lie in this part.
        """
        total = self.padded_length(max(stream.num_tokens, at_least), multiple)
        padding = total - stream.num_tokens
        if self._size == 1 and padding == 0:
            return stream, slice(0, stream.num_loss_tokens)
        length = total // self._size
        start, stop = self._rank * length, (self._rank + 1) * length
        # Positions with loss are sorted, so the positions in a part are a slice.
        source = stream.host_source + padding
        mine = slice(*np.searchsorted(source, [start, stop]).tolist())
        lengths = np.concatenate([np.ones(padding, np.int64), stream.plan.lengths])
        plan = plan_segments(lengths, self._profile.slots_per_attention_call, self._profile.send)
        experts = stream.routed_experts
        part = replace(
            stream,
            # Padding has token id 0, and position 0 since each token is its own segment.
            input_ids=F.pad(stream.input_ids, (padding, 0))[:, start:stop],
            position_ids=F.pad(stream.position_ids, (padding, 0))[:, start:stop],
            plan=replace(plan, exchange=self if self._size > 1 else None),
            source=stream.source[mine] + (padding - start),
            host_source=source[mine] - start,
            targets=stream.targets[mine],
            columns={name: values[mine] for name, values in stream.columns.items()},
            # With -1, the router chooses the experts.
            routed_experts=None if experts is None else F.pad(experts, (0, 0, 0, 0, padding, 0), value=-1)[start:stop],
            support=None if stream.support is None else stream.support[mine],
            num_fill=min(max(0, padding + stream.num_fill - start), length),
        )
        return part, mine

    def padded_length(self, num_tokens: int, multiple: int = 1) -> int:
        """Return the length of a padded stream: all ranks get the same length, a multiple of `multiple`."""
        unit = self._size * multiple
        return math.ceil(num_tokens / unit) * unit

    def joined(self, values: Tensor, mine: slice, stream: TokenStream) -> Tensor:
        """Join the values of all ranks to one vector for all positions with loss. Gradients flow through it."""
        if self._size == 1:
            return values
        joined = _Join.apply(values, mine, len(stream.targets), self._group)
        assert isinstance(joined, Tensor)
        return joined

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Heads of keys and values are repeated until each rank can get the same number of heads.
        times = math.lcm(key.shape[1], self._size) // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def _to_heads(self, values: Tensor) -> Tensor:
        by_rank = values.unflatten(1, (self._size, -1)).transpose(0, 1)
        return self._exchanged(by_rank).flatten(0, 1)

    def to_tokens(self, output: Tensor) -> Tensor:
        by_rank = output.unflatten(0, (self._size, -1))
        return self._exchanged(by_rank).transpose(0, 1).flatten(1, 2)

    def own_heads(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self._size, -1))[self._rank]

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        exchanged = _Exchange.apply(by_rank, self._group)
        # Offloading of activations moves only plain tensors, not subclasses.
        assert type(exchanged) is Tensor
        return exchanged


class _Exchange(torch.autograd.Function):
    """Sends entry r of [ranks, ...] to rank r (all-to-all). The exchange is its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None


class _Join(torch.autograd.Function):
    """Joins the ranks' parts of a vector. All ranks compute the same loss, so a part's gradient needs no exchange."""

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


_PROBE_LENGTHS = (2, 5, 9)


def check_sharing(model: Any, profile: DeviceProfile, path: str, *, half_precision: bool) -> None:
    """Check that logprobs do not change when ranks share a stream. All ranks must call this together.

    Args:
        model: A `StreamModel` with an attribute `sharing`: the ranks that it computes with. If it is None, the model
            computes alone.
        profile: The device and dtype of the model.
        path: The model's path, for errors.
        half_precision: Whether the model computes in bf16.

    Raises:
        ModelError: If logprobs change, because the model mixes tokens outside of attention.
    """
    stream = probe_stream(probe_sequences(vocabulary_size(model.causal), _PROBE_LENGTHS), profile)
    sharing = model.sharing
    with evaluation_mode(model.causal), profile.computing():
        shared = model.loss_inputs(stream, ()).logprobs
        model.sharing = None
        try:
            alone = model.loss_inputs(stream, ()).logprobs
            with rounded_layers(decoder_layers(model.causal)):
                rounded = model.loss_inputs(stream, ()).logprobs if half_precision else None
        finally:
            model.sharing = sharing
    difference, allowed = distance(shared, alone, alone.std(), rounded, jumps=bool(find_routers(model.causal)))
    # This form of the comparison also refuses NaN.
    if not difference <= allowed:
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) gives other log-probabilities when ranks share a "
            f"sequence: {difference:.2g} standard deviations (allowed {allowed:.2g}). It mixes tokens outside of "
            "attention (linear attention, convolutions). Set backend.context: 1, or choose another model."
        )
