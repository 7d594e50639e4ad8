"""Hidden states to the log-probabilities of the tokens that carry loss, and to nothing else.

Place on the way: decoder -> this -> loss. The output layer runs only where there is loss, a chunk of positions at a
time; with several chunks their logits are recomputed in the backward pass, so at no time do logits of all tokens exist.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class TokenLogprobs:
    """The output layer of a model, applied in chunks of at most `chunk_tokens` positions."""

    def __init__(self, head: nn.Module, chunk_tokens: int):
        self._head = head
        self._chunk_tokens = chunk_tokens
        # Recomputing draws the same dropout only if the generator is rewound, which waits for the device; most heads
        # draw nothing.
        self._draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in head.modules())

    def __call__(
        self, hidden: Tensor, targets: Tensor, want_entropy: bool = False, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Logprob of each target [N] after each hidden state [N, H], and the entropy [N] there when asked for.

        Both are of softmax(logits / temperature).
        """
        num_chunks = math.ceil(len(targets) / self._chunk_tokens)
        if num_chunks <= 1:
            return self._score(hidden, targets, want_entropy, temperature)
        size = math.ceil(len(targets) / num_chunks)
        parts = [
            self._score_chunk(hidden_chunk, target_chunk, want_entropy, temperature)
            for hidden_chunk, target_chunk in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        entropies = [entropy for _, entropy in parts if entropy is not None]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(entropies) if entropies else None

    def _score_chunk(
        self, hidden: Tensor, targets: Tensor, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return self._score(hidden, targets, want_entropy, temperature)
        result = checkpoint(
            self._score, hidden, targets, want_entropy, temperature, use_reentrant=False, preserve_rng_state=self._draws
        )
        assert isinstance(result, tuple)
        return result

    def _score(
        self, hidden: Tensor, targets: Tensor, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._head(hidden)
        if logits.dtype in (torch.bfloat16, torch.float16):
            # Half-precision logits are exact enough, a softmax over 1e5 of them is not.
            logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        if not want_entropy:
            return -F.cross_entropy(logits, targets, reduction="none"), None
        all_logprobs = F.log_softmax(logits, dim=-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy
