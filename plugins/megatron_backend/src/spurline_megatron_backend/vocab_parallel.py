"""Compute logprobs and entropy when each rank of a tensor group has the logits of a part of the vocabulary.

Data flow: hidden states at positions with loss, the same on all ranks of the group -> the logits of each rank,
for a chunk of positions at a time -> logprobs and entropy, the same on all ranks. Logits are never gathered. For each
position ranks exchange the largest logit, the sum of exponentials and the target's logit. All functions are
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline_models.streams.token_logprobs import TokenLogprobs


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
