"""Collect the tokens of a response, which several engines may generate in turn.

`Progress` has the tokens from one engine. `Response` joins the tokens of all engines in the result. The pool continues
a response after its engine has died. The member of a vLLM server continues responses that a pause has interrupted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline_rl.engines.in_process.response import ExpertRecord, check_request, find_refusal
from spurline_rl.policy import derive_seed
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.trajectory import FinishReason
from spurline_text.stop_texts import StopTexts

TokenIds = Sequence[int] | NDArray[np.int32]
Logprobs = Sequence[float] | NDArray[np.float32]

_SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF
"""vLLM takes seeds below 2**63."""


@dataclass(frozen=True)
class Delta:
    """The next tokens of a response. The last delta has a `finish_reason`.

    `support`, int32, has the rows of `GenerationResult.support` one after another, or nothing.
    `experts`, int16 [tokens, layers, top_k], has the chosen experts of consecutive tokens of prompt and response.
    `experts_start` is the index of the first of these tokens. `experts` is None unless vLLM was asked for experts.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason | None = None
    experts: NDArray[np.int16] | None = None
    experts_start: int = 0
    support: TokenIds = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes are ten times as fast to pickle as small arrays.
        tokens = np.asarray(self.token_ids, np.int32).tobytes()
        logprobs = np.asarray(self.logprobs, np.float32).tobytes()
        return _delta, (tokens, logprobs, self.finish_reason, self.experts, self.experts_start, self.support)


def _delta(token_ids: bytes, logprobs: bytes, *rest: Any) -> Delta:
    return Delta(np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32), *rest)


class Progress:
    """The tokens of one response so far.

    The member adds tokens while it generates, so they are kept if the member dies. `token_ids`, `logprobs` and
    `versions` are columns of `GenerationResult`, as copies. `support` has the rows of that column one after another.
    `experts` begin at the first token of the prompt.
    """

    def __init__(self) -> None:
        self.experts = ExpertRecord()
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._versions = array("i")
        self._support = array("i")

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return np.array(self._token_ids, np.int32)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return np.array(self._logprobs, np.float32)

    @property
    def versions(self) -> NDArray[np.int32]:
        return np.array(self._versions, np.int32)

    @property
    def support(self) -> NDArray[np.int32]:
        return np.array(self._support, np.int32)

    @property
    def last_token(self) -> int | None:
        return self._token_ids[-1] if self._token_ids else None

    def tokens_from(self, start: int) -> Sequence[int]:
        return self._token_ids[start:]

    def add(self, token_ids: TokenIds, logprobs: Logprobs, version: int, support: TokenIds = ()) -> None:
        """Add the next tokens, all of one version. `support` has their rows one after another, or is empty."""
        count = len(token_ids)
        assert count == len(logprobs), f"{count} tokens with {len(logprobs)} logprobs"
        _append(self._token_ids, token_ids)
        _append(self._logprobs, logprobs)
        _append(self._support, support)
        self._versions.extend(array("i", (version,)) * count)

    def extend(self, other: Progress) -> None:
        """Add all tokens of `other`, which is the next part of the response. Its experts are not added."""
        self._token_ids.extend(other._token_ids)
        self._logprobs.extend(other._logprobs)
        self._versions.extend(other._versions)
        self._support.extend(other._support)

    def count_of(self, version: int) -> int:
        """Return the number of tokens of this version."""
        return self._versions.count(version)

    def cut_beyond(self, version: int, num_tokens: int) -> None:
        """Keep at most `num_tokens` tokens of this version: drop the next token of it, and all tokens after that."""
        own = [index for index, each in enumerate(self._versions) if each == version]
        if len(own) > num_tokens:
            self.cut(own[num_tokens])

    def cut_after(self, version: int) -> None:
        """Drop the tokens of newer versions."""
        self.cut(sum(1 for own in self._versions if own <= version))
        # The next engine reports the experts of all tokens before its own.
        self.experts = ExpertRecord()

    def cut(self, length: int) -> None:
        """Drop the tokens beyond this length."""
        del self._support[length * (len(self._support) // max(1, len(self))) :]
        for column in (self._token_ids, self._logprobs, self._versions):
            del column[length:]


class Response:
    """The response to one request. Its tokens are added to `progress`.

    If `finds_stop_texts`, this class finds all stop texts. Otherwise engines find them, and this class finds only
    stop texts that begin in the tokens of one engine and end in the tokens of another one.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress | None = None,
        *,
        finds_stop_texts: bool = False,
    ) -> None:
        self._request = request
        self._so_far = Progress() if progress is None else progress
        own_end = () if request.sampling.ignore_eos else (tokenizer.eos_token_id,)
        self._ends = (*request.sampling.stop_token_ids, *own_end)
        self._finds_stop_texts = finds_stop_texts
        self._stop_texts = StopTexts(tokenizer, request.sampling.stop) if request.sampling.stop else None
        self._num_searched = 0
        self._engines: list[str] = []
        self._has_stop_text = finds_stop_texts and self._cut_behind_stop_text()

    @property
    def has_tokens(self) -> bool:
        return len(self._so_far) > 0

    @property
    def ended(self) -> FinishReason | None:
        """Return the finish reason if the response is complete. An engine may have died before it sent the reason."""
        so_far = self._so_far
        if self._has_stop_text or (self.has_tokens and so_far.last_token in self._ends):
            return "stop"
        return "length" if len(so_far) >= self._request.sampling.max_new_tokens else None

    def rest(self) -> GenerationRequest:
        """Return the request for the tokens that are missing."""
        request, num_tokens = self._request, len(self._so_far)
        if self._finds_stop_texts:
            request = replace(request, sampling=replace(request.sampling, stop=()))
        if not num_tokens:
            return request
        assert self.ended is None, f"{request.name} has ended"
        return replace(
            request,
            prompt_ids=[*request.prompt_ids, *self._so_far.tokens_from(0)],
            sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - num_tokens),
            # With the old seed, the engine would repeat the random numbers of the first tokens.
            seed=derive_seed(request.seed, "continuation", num_tokens, 0),
        )

    def add(self, part: Progress, reason: FinishReason | None, engine: str = "") -> FinishReason | None:
        """Add the tokens of an engine, and return the finish reason if the response is complete.

        `reason` is the engine's own finish reason, if any, and `engine` is its name.
        """
        was_continued = self.has_tokens
        if engine and len(part):
            self._engines.append(engine)
        self._so_far.extend(part)
        # The engine's prompt included all earlier tokens, so these experts begin at the first token of the prompt.
        if (experts := part.experts.since(0)) is not None:
            self._so_far.experts.add(0, experts)
        # An engine does not know the text before its own tokens, so it may miss a stop text that begins there.
        if self._finds_stop_texts or was_continued or reason is None:
            self._has_stop_text = self._cut_behind_stop_text()
        return "stop" if self._has_stop_text else reason or self.ended

    def result(self, reason: FinishReason) -> GenerationResult:
        so_far = self._so_far
        num_tokens = len(self._request.prompt_ids) + len(so_far)
        width = self._request.sampling.support_width
        return GenerationResult(
            token_ids=so_far.token_ids,
            logprobs=so_far.logprobs,
            versions=so_far.versions,
            finish_reason=reason,
            support=so_far.support.reshape(-1, width) if width else None,
            routed_experts=so_far.experts.of_context(num_tokens),
            engines=tuple(self._engines),
        )

    def _cut_behind_stop_text(self) -> bool:
        if self._stop_texts is None:
            return False
        for token in self._so_far.tokens_from(self._num_searched):
            self._num_searched += 1
            if self._stop_texts.completed_by(token):
                self._so_far.cut(self._num_searched)
                return True
        return False


class VllmResponse(Response):
    """A response of vLLM.

    This class finds stop texts, not vLLM, so a response ends at the same token as with engine `in_process`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_model_len: int,
        vocabulary: int | None = None,
    ):
        """Check the prompt. Raises DataError if it is too long, or has tokens outside the vocabulary."""
        check_request(request)
        prompt: list[int] = np.asarray(request.prompt_ids, np.int64).tolist()
        remedy = "Shorten the prompt, or raise max_model_len and kv_cache_gb where the model allows it."
        refusal = find_refusal(request.name, prompt, max_model_len, vocabulary, remedy)
        if refusal is not None:
            raise refusal
        asked = request.sampling
        eos = None if asked.ignore_eos else tokenizer.eos_token_id
        sampling = replace(
            asked,
            max_new_tokens=min(asked.max_new_tokens, max_model_len - len(prompt)),
            stop_token_ids=(*asked.stop_token_ids, *([eos] if isinstance(eos, int) else [])),
        )
        known = replace(request, prompt_ids=prompt, sampling=sampling, seed=request.seed & _SEED_BITS)
        super().__init__(known, tokenizer, progress, finds_stop_texts=True)

    def add_delta(self, delta: Delta, version: int) -> FinishReason | None:
        """Add the next tokens, and return the finish reason if the response is complete."""
        part = Progress()
        part.add(delta.token_ids, delta.logprobs, version, delta.support)
        if delta.experts is not None:
            self._so_far.experts.add(delta.experts_start, delta.experts)
        return self.add(part, delta.finish_reason)


def _append(column: array[Any], values: Sequence[Any] | NDArray[Any]) -> None:
    if isinstance(values, np.ndarray):
        # Type codes mean the same in `array` and numpy.
        column.frombytes(values.astype(column.typecode, copy=False).tobytes())
    else:
        column.extend(values)
