"""Compute logprobs and entropy when each rank of a tensor group has the logits of a part of the vocabulary.

Data flow: hidden states at positions with loss, the same on all ranks of the group -> the logits of each rank,
for a chunk of positions at a time -> logprobs and entropy, the same on all ranks. Logits are never gathered. For each
position ranks exchange the largest logit, the sum of exponentials and the target's logit. A loss that reads logits
exchanges its own sums over the vocabulary, too. All functions are collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline_models.losses.distributions import Distribution
from spurline_models.streams.token_logprobs import TokenLogprobs

_IMPOSSIBLE = -1e4
"""A logit whose probability is 0. It is finite, so that the probability times the logprob is 0."""


class VocabularyLogprobs(TokenLogprobs):
    """The output layer of a divided model, applied in chunks of at most `chunk_tokens` positions.

    All ranks of the group pass the same arguments, and compute the same loss, which counts once. They recompute chunks
    in the same order, so that their exchanges match.

    Args:
        logits: A function from hidden states [N, H] to this rank's logits [N, V]. Column 0 on rank r is token r * V.
        group: The ranks that divide the vocabulary.
        vocabulary: The number of tokens. Further columns are padding.
        chunk_tokens: The number of positions in a chunk.
    """

    def __init__(
        self, logits: Callable[[Tensor], Tensor], group: ProcessGroup, vocabulary: int, chunk_tokens: int
    ) -> None:
        super().__init__(logits, chunk_tokens)
        self._group = group
        self._rank = dist.get_rank(group)
        self._vocabulary = vocabulary

    def at(self, values: Tensor, ids: Tensor) -> Tensor:
        local = ids - self._rank * values.shape[1]
        is_own = (local >= 0) & (local < values.shape[1])
        own = values.gather(1, local.clamp(0, values.shape[1] - 1)).masked_fill(~is_own, 0.0)
        # Every rank computes the same loss, so the backward pass does not sum over ranks.
        return reduce_from_tensor_model_parallel_region(own, self._group).masked_fill(ids < 0, -torch.inf)

    def _logprobs(self, logits: Tensor, targets: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        first = self._rank * logits.shape[1]
        if first + logits.shape[1] > self._vocabulary:
            is_padding = torch.arange(logits.shape[1], device=logits.device) >= self._vocabulary - first
            logits = logits.masked_fill(is_padding, -torch.inf)
        scores = _Scores.apply(logits, targets - first, want_entropy, self._group)
        assert isinstance(scores, Tensor)
        return scores[0], scores[1] if want_entropy else None

    def _num_tokens(self, logits: Tensor) -> int:
        return self._vocabulary

    def _aligned(self, logits: Tensor, own: Tensor) -> Tensor:
        if logits.shape == own.shape:
            return logits
        # The vocabularies differ in size, so the ranks divide them at other tokens.
        first, size = self._rank * own.shape[1], own.shape[1]
        part = _gathered(logits, self._group)[:, first : first + size]
        return F.pad(part, (0, size - part.shape[1]))

    def _distribution(self, logits: Tensor, num_tokens: int) -> Distribution:
        first = self._rank * logits.shape[1]
        return DividedDistribution(logits, first, num_tokens, self._group)


class DividedDistribution:
    """A `Distribution` whose vocabulary is divided among the ranks of a group.

    Args:
        logits: This rank's logits [n, V], of the tokens from `first` on.
        num_tokens: The number of tokens of the whole vocabulary. Further columns are left out.
    """

    def __init__(self, logits: Tensor, first: int, num_tokens: int, group: ProcessGroup) -> None:
        self._first, self._group = first, group
        self._is_padding = num_tokens <= first
        if self._is_padding:
            # A rank of padding alone keeps one token with probability 0, so that it takes part in all exchanges.
            logits = logits[:, :1] * 0 + _IMPOSSIBLE
        logprobs = _LogSoftmax.apply(logits[:, : max(1, num_tokens - first)], group)
        assert isinstance(logprobs, Tensor)
        self.logprobs = logprobs

    def total(self, values: Tensor) -> Tensor:
        return self._sum(values.sum(-1) * (0.0 if self._is_padding else 1.0))

    def spread(self, sums: Tensor) -> Tensor:
        return copy_to_tensor_model_parallel_region(sums, self._group).unsqueeze(-1)

    def at(self, ids: Tensor) -> Tensor:
        columns = ids - self._first
        is_own = (columns >= 0) & (columns < self.logprobs.shape[1])
        own = self.logprobs.gather(-1, columns.clamp(0, self.logprobs.shape[1] - 1))
        return self._sum(own.masked_fill(~is_own, 0.0))

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        own = self.logprobs.detach()
        values, columns = own.topk(min(k, own.shape[1]))
        # Ranks may have fewer tokens than k, but all send equally many.
        missing = k - values.shape[1]
        sent = F.pad(values, (0, missing), value=-torch.inf), F.pad(columns + self._first, (0, missing))
        values, ids = (_gathered(part, self._group) for part in sent)
        ids = ids.gather(-1, values.topk(k).indices)
        return ids, self.at(ids)

    def _sum(self, part: Tensor) -> Tensor:
        # Every rank computes the same loss, so the backward pass does not sum over ranks.
        return reduce_from_tensor_model_parallel_region(part, self._group)


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the columns of all ranks, in the order of the ranks. All parts have the same shape."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=1)


class _LogSoftmax(torch.autograd.Function):
    """Normalises each rank's logits [n, V] over the vocabulary of all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ProcessGroup) -> Tensor:
        greatest = logits.amax(1, keepdim=True)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - greatest
        total = shifted.exp().sum(1, keepdim=True)
        dist.all_reduce(total, group=group)
        logprobs = shifted.sub_(total.log())
        ctx.group = group
        ctx.save_for_backward(logprobs)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logprobs,) = ctx.saved_tensors
        total = grads[0].sum(1, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return grads[0] - logprobs.exp() * total, None


class _Scores(torch.autograd.Function):
    """Turns each rank's logits [N, V] into logprobs, and entropies if wanted. All ranks get equal results [1 or 2, N].

    Targets are int64 [N], counted from this rank's first column. All ranks get the same gradient of the result.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, want_entropy: bool, group: ProcessGroup) -> Tensor:
        greatest = logits.amax(1)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - greatest.unsqueeze(1)
        is_own = (targets >= 0) & (targets < logits.shape[1])
        column = targets.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        of_target = shifted.gather(1, column).squeeze(1).masked_fill(~is_own, 0.0)
        exponentials = shifted.exp_()
        sums = [exponentials.sum(1), of_target]
        if want_entropy:
            # The product with logits would be NaN for padding, whose logits are -inf.
            sums.append(torch.special.entr(exponentials).sum(1))
        reduced = torch.stack(sums)
        dist.all_reduce(reduced, group=group)
        total, of_target, *rest = reduced
        scores = [of_target - total.log()]
        if want_entropy:
            scores.append(total.log() + rest[0] / total)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), column, is_own, *scores[1:])
        return torch.stack(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, is_own, *entropies = ctx.saved_tensors
        of_logprob, *of_entropy = grads[0]
        gradient = probabilities * -of_logprob.unsqueeze(1)
        for entropy, of_this in zip(entropies, of_entropy, strict=True):
            # The derivative of the entropy with respect to a logit is -p * (log p + entropy).
            change = torch.special.entr(probabilities).addcmul_(probabilities, entropy.unsqueeze(1), value=-1)
            gradient.addcmul_(change, of_this.unsqueeze(1))
        return gradient.scatter_add_(1, column, (of_logprob * is_own).unsqueeze(1)), None, None, None
