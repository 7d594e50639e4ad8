"""Compute logprobs of tokens from hidden states with the model's own output layer, in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from spurline.errors import ModelError, listing
from spurline.protocols.backend import Role
from spurline.protocols.loss import ENTROPY
from spurline_models.architecture import find_decoder
from spurline_models.losses.distributions import Distribution, ReadsLogits
from spurline_models.streams.token_stream import TokenStream

LOGPROBS = "logprobs"
_READ_AT_ONCE = 1024
"""Largest chunk of a loss that reads logits. It has several tensors of the size of the logits of each model."""


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


@dataclass(frozen=True)
class WholeDistribution:
    """A `Distribution` whose vocabulary is all in this process."""

    logprobs: Tensor

    def total(self, values: Tensor) -> Tensor:
        return values.sum(-1)

    def spread(self, sums: Tensor) -> Tensor:
        return sums.unsqueeze(-1)

    def at(self, ids: Tensor) -> Tensor:
        return self.logprobs.gather(-1, ids)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        ids = self.logprobs.detach().topk(k).indices
        return ids, self.at(ids)


@dataclass(frozen=True)
class ReadStates:
    """Hidden states [N, H] of a model that is not trained, and the output layer that makes its logits from them."""

    layer: TokenLogprobs
    hidden: Tensor


@dataclass(frozen=True)
class LogitReading:
    """A loss that reads distributions, and the other models' hidden states at the positions of one stream."""

    loss: ReadsLogits
    others: Mapping[Role, ReadStates]


class TokenLogprobs:
    """The output layer of a model, applied in chunks of at most `chunk_tokens` positions.

    If there are several chunks, the logits of all but the last are recomputed in the backward pass. If `fused`, Triton
    kernels compute logprobs, so that a logit needs no memory but its own. A loss that reads logits needs them outside
    of the kernels, so no kernel is used for it.
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
        found = _in_chunks(score, (hidden, targets, support), self.chunk_tokens, draws=self._draws)
        return found[LOGPROBS], found.get(ENTROPY)

    def read(
        self, hidden: Tensor, stream: TokenStream, reading: LogitReading, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor]]:
        """Return what a call returns for the stream, and the values [N] that the loss makes from distributions."""
        roles, names = list(reading.others), list(stream.columns)

        def read(hidden: Tensor, targets: Tensor, support: Tensor | None, *rest: Tensor) -> dict[str, Tensor]:
            with torch.no_grad():
                states = zip(reading.others.values(), rest[: len(roles)], strict=True)
                others = [(one.layer, one.layer._logits(part, temperature)) for one, part in states]
            columns = dict(zip(names, rest[len(roles) :], strict=True))
            logits = self._logits(hidden, temperature)
            size = self._num_tokens(logits)
            # Models of one family may differ in the unused tokens at the end of their vocabularies.
            shared = min([size, *(layer._num_tokens(of_other) for layer, of_other in others)])
            own = self._distribution(logits, size)
            values = reading.loss.from_logits(
                own if shared == size else self._distribution(logits, shared),
                {
                    role: self._distribution(self._aligned(of_other, logits), shared)
                    for role, (_, of_other) in zip(roles, others, strict=True)
                },
                {**columns, "input_ids": targets},
            )
            taken = values.keys() & {*names, LOGPROBS, ENTROPY}
            if taken:
                raise ModelError(
                    f"{type(reading.loss).__name__}.from_logits makes {listing(taken)}, which its inputs already have. "
                    "Choose another name."
                )
            of_targets = own.at(targets.unsqueeze(-1)).squeeze(-1)
            if support is not None:
                kept = own.at(support.clamp(min=0)).masked_fill(support < 0, -torch.inf)
                of_targets = of_targets - kept.logsumexp(-1)
            entropy = {ENTROPY: -own.total(own.logprobs.exp() * own.logprobs)} if want_entropy else {}
            return {**values, LOGPROBS: of_targets, **entropy}

        of_others = [states.hidden for states in reading.others.values()]
        tensors = (hidden, stream.targets, stream.support, *of_others, *stream.columns.values())
        found = _in_chunks(read, tensors, min(self.chunk_tokens, _READ_AT_ONCE), draws=self._draws)
        return found.pop(LOGPROBS), found.pop(ENTROPY, None), found

    def at(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return the values [N, K] of these token ids, given this process's columns [N, V]; -inf for the id -1."""
        return values.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)

    def _score(
        self, hidden: Tensor, targets: Tensor, support: Tensor | None, want_entropy: bool, temperature: float
    ) -> dict[str, Tensor]:
        logits, scores = self._head(hidden), dict[str, Tensor]()
        if support is not None:
            # The sum over the vocabulary cancels, so only a few logits get gradients. The target is one of them. It is
            # gathered once, since half precision would round two gradients of it that nearly cancel.
            kept = self.at(logits, support)
            kept = kept.to(torch.promote_types(kept.dtype, torch.float32)) / temperature
            of_target = torch.where(support == targets.unsqueeze(1), kept, 0).sum(-1)
            scores[LOGPROBS] = of_target - kept.logsumexp(-1)
            if not want_entropy:
                return scores
        if self.fused:
            from spurline_models.streams.logprob_kernel import FusedLogprobs

            found: Any = FusedLogprobs.apply(logits, targets, want_entropy, temperature)
        else:
            found = self._logprobs(_tempered(logits, temperature), targets, want_entropy)
        return {LOGPROBS: found[0], **({ENTROPY: found[1]} if want_entropy else {}), **scores}

    def _logits(self, hidden: Tensor, temperature: float) -> Tensor:
        return _tempered(self._head(hidden), temperature)

    def _logprobs(self, logits: Tensor, targets: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        if not want_entropy:
            return -F.cross_entropy(logits, targets, reduction="none"), None
        all_logprobs = F.log_softmax(logits, dim=-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy

    def _num_tokens(self, logits: Tensor) -> int:
        """Return the size of the vocabulary that these logits belong to."""
        return logits.shape[-1]

    def _aligned(self, logits: Tensor, own: Tensor) -> Tensor:
        """Return another model's logits of the tokens that the columns of `own` are for."""
        return logits

    def _distribution(self, logits: Tensor, num_tokens: int) -> Distribution:
        """Return the distribution over the first tokens of the vocabulary."""
        return WholeDistribution(F.log_softmax(logits[:, :num_tokens], dim=-1))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    if logits.dtype in (torch.bfloat16, torch.float16):
        # Half precision is too coarse for a softmax over 1e5 logits.
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _in_chunks(
    function: Callable[..., dict[str, Tensor]], tensors: Sequence[Tensor | None], chunk_tokens: int, *, draws: bool
) -> dict[str, Tensor]:
    """Call the function with chunks of these tensors [N, ...], and join what it returns. The first is not None.

    `draws` says whether the function draws random numbers.
    """
    assert tensors[0] is not None
    count = len(tensors[0])
    num_chunks = math.ceil(count / chunk_tokens)
    if num_chunks <= 1:
        return function(*tensors)
    size = math.ceil(count / num_chunks)
    split = ([None] * num_chunks if tensor is None else tensor.split(size) for tensor in tensors)
    parts: list[dict[str, Tensor]] = []
    for chunk in zip(*split, strict=True):
        # The last chunk is the first in the backward pass, so its logits may stay.
        if torch.is_grad_enabled() and len(parts) < num_chunks - 1:
            made: Any = checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=draws)
            parts.append(made)
        else:
            parts.append(function(*chunk))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
