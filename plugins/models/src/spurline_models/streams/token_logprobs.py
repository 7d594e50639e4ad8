"""Compute logprobs of tokens from hidden states with the model's own output layer, in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from spurline_models.architecture import find_decoder


class OutputLogits(nn.Module):
    """A module that makes logits [N, vocabulary] from hidden states [N, H], as the model itself does.

    It runs the model's own forward function with a fake decoder, so scales and softcaps of logits are included. It
    shares all modules with the model.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        super().__init__()
        self._given: list[Tensor] = []
        # This is a shallow copy. `copy.copy` does something else for sharded modules.
        self._around = object.__new__(type(causal))
        self._around.__dict__.update(vars(causal))
        self._around._modules = causal._modules | _given_states(causal, find_decoder(causal), self._given)

    def forward(self, hidden: Tensor) -> Tensor:
        around: Any = self._around
        # The fake decoder returns these states. It cannot rely on `inputs_embeds`, which some models do not pass on.
        self._given.append(hidden.unsqueeze(0))
        try:
            # Calling the module would run the hooks of the whole model.
            output = type(around).forward(around, inputs_embeds=self._given[-1], use_cache=False)
        finally:
            self._given.pop()
        return output.logits.squeeze(0)


def _given_states(module: nn.Module, decoder: nn.Module, given: list[Tensor]) -> dict[str, nn.Module]:
    """Return {name: replacement} for the child module that is, or contains, the decoder."""
    holders = ((name, child) for name, child in module.named_children() if any(m is decoder for m in child.modules()))
    return {name: _GivenStates(child, decoder, given) for name, child in holders}


class _GivenStates(nn.Module):
    """A replacement for a decoder, or for a module that contains it. Its output is the last of the `given` states.

    It takes all other attributes from the replaced module.
    """

    def __init__(self, inner: nn.Module, decoder: nn.Module, given: list[Tensor]) -> None:
        super().__init__()
        # Do not register submodules, so that `TokenLogprobs` does not find the decoder's dropout.
        self.__dict__.update(_given_states(inner, decoder, given), _inner=inner, _given=given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _States(last_hidden_state=self.__dict__["_given"][-1])


class _States(BaseModelOutputWithPast):
    """An output that has only hidden states. Any other part, such as logits of routers, is None."""

    def __getattr__(self, name: str) -> None:
        return None


class TokenLogprobs:
    """The output layer of a model, applied in chunks of at most `chunk_tokens` positions.

    If there are several chunks, the logits of all but the last are recomputed in the backward pass. If `fused`, Triton
    kernels compute logprobs, so that a logit needs no memory but its own.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], chunk_tokens: int, fused: bool = False) -> None:
        self._head = head
        self.chunk_tokens = chunk_tokens
        self.fused = fused
        # Recomputation restores the random generator only for a head with dropout, since this waits for the device.
        modules = head.modules() if isinstance(head, nn.Module) else ()
        self._draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)

    def __call__(
        self,
        hidden: Tensor,
        targets: Tensor,
        want_entropy: bool = False,
        temperature: float = 1.0,
        support: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logprobs of targets [N] after hidden states [N, H], and entropies [N] if asked for.

        The distribution is softmax(logits / temperature). With `support`, token ids [N, K] padded with -1, logprobs are
        those of the distribution that is renormalised over each row's ids. Entropies are always of all tokens.
        """
        score = partial(self._score, want_entropy=want_entropy, temperature=temperature)
        num_chunks = math.ceil(len(targets) / self.chunk_tokens)
        if num_chunks <= 1:
            return score(hidden, targets, support)
        size = math.ceil(len(targets) / num_chunks)
        supports = [None] * num_chunks if support is None else support.split(size)
        parts: list[Any] = []
        for chunk in zip(hidden.split(size), targets.split(size), supports, strict=True):
            # The last chunk is the first in the backward pass, so its logits may stay.
            if torch.is_grad_enabled() and len(parts) < num_chunks - 1:
                parts.append(checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=self._draws))
            else:
                parts.append(score(*chunk))
        entropies = [entropy for _, entropy in parts if entropy is not None]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(entropies) if entropies else None

    def at(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return the values [N, K] of these token ids, given this process's columns [N, V]; -inf for the id -1."""
        return values.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)

    def _score(
        self, hidden: Tensor, targets: Tensor, support: Tensor | None, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._head(hidden)
        if support is not None:
            # The sum over the vocabulary cancels, so only a few logits get gradients.
            chosen = self.at(logits, torch.cat([targets.unsqueeze(1), support], dim=1))
            chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32)) / temperature
            restricted = chosen[:, 0] - chosen[:, 1:].logsumexp(-1)
            return restricted, self._all_tokens(logits, targets, True, temperature)[1] if want_entropy else None
        return self._all_tokens(logits, targets, want_entropy, temperature)

    def _all_tokens(
        self, logits: Tensor, targets: Tensor, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        if self.fused:
            from spurline_models.streams.logprob_kernel import FusedLogprobs

            return cast(Any, FusedLogprobs.apply(logits, targets, want_entropy, temperature))
        if logits.dtype in (torch.bfloat16, torch.float16):
            # Half precision is too coarse for a softmax over 1e5 logits.
            logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        return self._logprobs(logits, targets, want_entropy)

    def _logprobs(self, logits: Tensor, targets: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        if not want_entropy:
            return -F.cross_entropy(logits, targets, reduction="none"), None
        all_logprobs = F.log_softmax(logits, dim=-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy
