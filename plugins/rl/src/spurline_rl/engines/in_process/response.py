"""One response while it is generated: its tokens so far, and whether it has ended.

Data flow: GenerationRequest -> Response, which collects tokens -> GenerationResult. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.trajectory import FinishReason
from spurline_text.stop_texts import StopTexts


class Written(NamedTuple):
    """The next tokens of a response, with the fields of GenerationResult.

    Attributes:
        finish_reason: None until the response has ended.
        routed_experts: int16 [tokens, layers, top_k], the experts of the tokens computed since the last call. The first
            call includes the tokens of the prompt.
        support: A row for each token, or nothing.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None
    routed_experts: NDArray[np.int16] | None = None
    support: Sequence[NDArray[np.int32]] = ()


class ExpertRecord:
    """The experts chosen for the computed tokens of a context.

    A token may be computed again, after an update or by another engine. The record keeps the experts of the first time,
    since later tokens were sampled with these experts.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int16]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, start: int, experts: NDArray[np.int16]) -> None:
        """Add the experts [tokens, layers, top_k] of consecutive tokens from index `start` on."""
        assert start <= self._length, f"tokens {self._length} to {start - 1} were never computed"
        new = experts[self._length - start :]
        if len(new):
            self._parts.append(new)
            self._length += len(new)

    def since(self, start: int) -> NDArray[np.int16] | None:
        """Return the experts of all tokens from index `start` on; None if no experts are recorded."""
        if not self._parts:
            return None
        # Search from the end, since callers ask for the last tokens after every step.
        found: list[NDArray[np.int16]] = [self._parts[0][:0]]
        begin = self._length
        for part in reversed(self._parts):
            if begin <= start:
                break
            begin -= len(part)
            found.insert(1, part[max(0, start - begin) :])
        return np.concatenate(found)

    def of_context(self, num_tokens: int) -> NDArray[np.int16] | None:
        """Return experts [num_tokens, layers, top_k], -1 for tokens not computed; None if no experts are recorded."""
        found = self.since(0)
        if found is None:
            return None
        whole = np.full((num_tokens, *found.shape[1:]), -1, np.int16)
        whole[: len(found)] = found[:num_tokens]
        return whole


def support_row(ids: NDArray[Any], logprobs: NDArray[Any], width: int) -> NDArray[np.int32]:
    """Return the ids of finite logprobs, which are the tokens that sampling kept, padded with -1: int32 [width].

    `ids` are the `width + 1` likeliest tokens, or the whole vocabulary. If more than `width` were kept, which ties with
    the last of top_k can cause, all entries are -1.
    """
    kept, row = ids[logprobs > -np.inf], np.full(width, -1, np.int32)
    if len(kept) <= width:
        row[: len(kept)] = kept
    return row


@dataclass(eq=False)
class Response:
    """A request in flight.

    Attributes:
        max_tokens: Largest number of tokens of the response. The decoder sets it, since it depends on the model.
        refused: An error if the model cannot answer the request.
        abandoned: Whether the caller has stopped waiting.
    """

    request: GenerationRequest
    prompt: list[int]
    stop_texts: StopTexts | None
    on_tokens: Callable[[Written], None] | None = None
    max_tokens: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    support: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    experts: ExpertRecord = field(default_factory=ExpertRecord)
    finish_reason: FinishReason | None = None
    refused: DataError | None = None
    abandoned: bool = False
    _num_handed_on: int = 0
    _num_experts_handed_on: int = 0

    @property
    def context(self) -> list[int]:
        """Return all tokens so far: the prompt and the response."""
        return self.prompt + self.tokens

    @property
    def cached_tokens(self) -> int:
        """Return the number of tokens that the model has read: all tokens of `context` except the last."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def most_cached_tokens(self) -> int:
        """Return the largest possible `cached_tokens`."""
        return len(self.prompt) + self.max_tokens - 1

    def add(
        self,
        token: int,
        logprob: float,
        version: int,
        stop_tokens: Collection[int],
        support: NDArray[np.int32] | None = None,
    ) -> None:
        """Add the next token, which may end the response."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if support is not None:
            self.support.append(support)
        if (
            token in stop_tokens
            or token in self.request.sampling.stop_token_ids
            or (self.stop_texts is not None and self.stop_texts.completed_by(token))
        ):
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish_reason = "length"

    def tell(self) -> None:
        """Call `on_tokens` with the tokens since the last call."""
        start, self._num_handed_on = self._num_handed_on, len(self.tokens)
        if self.on_tokens is not None and not self.abandoned and start < len(self.tokens):
            experts = self.experts.since(self._num_experts_handed_on)
            self._num_experts_handed_on = len(self.experts)
            tokens, logprobs, versions = self.tokens[start:], self.logprobs[start:], self.versions[start:]
            self.on_tokens(Written(tokens, logprobs, versions, self.finish_reason, experts, self.support[start:]))

    def result(self) -> GenerationResult:
        """Return the result. Raises DataError if the request was refused."""
        if self.refused is not None:
            raise self.refused
        assert self.finish_reason is not None, f"{self.request.name} has not ended"
        return GenerationResult(
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=self.finish_reason,
            support=np.stack(self.support) if self.support else None,
            routed_experts=self.experts.of_context(len(self.prompt) + len(self.tokens)),
        )


def find_refusal(
    name: str, prompt: list[int], context: int | None, vocabulary: int | None, remedy: str = "Shorten the prompt."
) -> DataError | None:
    """Return an error if the context has no room for a response, or if the model lacks a token of the prompt.

    The limits are None if they are unknown. `remedy` is advice for a prompt that is too long.
    """
    if context is not None and len(prompt) >= context:
        problem = f"{len(prompt)} tokens, but the context for prompt and response has {context}. {remedy}"
        return DataError(f"{name}: the prompt has {problem}")
    for token in (min(prompt), max(prompt)):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            known = "no negative tokens" if vocabulary is None else f"only tokens 0 to {vocabulary - 1}"
            problem = f"token {token}, but the model has {known}. Does the tokenizer belong to another model?"
            return DataError(f"{name}: the prompt has {problem}")
    return None


def check_request(request: GenerationRequest) -> None:
    """Raise DataError for a request that no model can answer."""
    asked = request.sampling
    if len(request.prompt_ids) == 0:
        raise DataError(f"{request.name}: the prompt has no tokens. Give at least one token, such as BOS.")
    if not asked.max_new_tokens >= 1:
        problem = f"max_new_tokens is {asked.max_new_tokens}; a response has at least 1 token."
    elif not 0 <= asked.temperature < math.inf:
        problem = f"temperature is {asked.temperature}; give 0 for greedy decoding, or a larger number."
    elif not 0 < asked.top_p <= 1:
        problem = f"top_p is {asked.top_p}; give a number above 0 and at most 1 (all tokens)."
    elif not asked.top_k >= 0:
        problem = f"top_k is {asked.top_k}; give 0 for all tokens, or a count."
    elif "" in asked.stop:
        problem = "stop has an empty text, which every response contains. Remove it."
    else:
        return
    raise DataError(f"{request.name}: sampling.{problem}")
