"""A response that several engines may write in turn, each going on where the last one ended.

Place on the way: request -> the rest to ask for -> tokens of one engine -> the whole result. The pool continues the
responses of a dead engine, and a vLLM server those that a pause has cut off.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline_async_rl.engines.progress import Progress
from spurline_rl.policy import derive_seed
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.trajectory import FinishReason
from spurline_text.stop_texts import StopTexts


class Response:
    """The response to one request so far; its tokens are added to `progress`.

    With `finds_stop_texts` all stop texts are found here, and engines do not look for them. Without it only those that
    several engines have written are found here.
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
        self._ends = (*request.sampling.stop_token_ids, tokenizer.eos_token_id)
        self._finds_stop_texts = finds_stop_texts
        self._stop_texts = StopTexts(tokenizer, request.sampling.stop) if request.sampling.stop else None
        self._num_searched = 0
        self._has_stop_text = finds_stop_texts and self._cut_behind_stop_text()

    @property
    def has_tokens(self) -> bool:
        return len(self._so_far) > 0

    @property
    def ended(self) -> FinishReason | None:
        """The reason why nothing is left to ask for, which an engine that died may not have told."""
        so_far = self._so_far
        if self._has_stop_text or (self.has_tokens and so_far.last_token in self._ends):
            return "stop"
        return "length" if len(so_far) >= self._request.sampling.max_new_tokens else None

    def rest(self) -> GenerationRequest:
        """Return the request for the next engine: the request itself while no token has come."""
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
            # An engine counts random numbers from its first token, and would use those of the beginning again.
            seed=derive_seed(request.seed, "continuation", num_tokens, 0),
        )

    def add(self, part: Progress, reason: FinishReason | None) -> FinishReason | None:
        """Add the tokens of an engine, and return why the response has ended, if it has.

        `reason` is None if the engine did not end the response.
        """
        was_continued = self.has_tokens
        self._so_far.extend(part)
        # Each engine counts from the beginning of its prompt, which includes the tokens of the others.
        if (experts := part.experts.since(0)) is not None:
            self.note_experts(0, experts)
        # The engine that wrote the last part knew nothing of the text before it.
        if self._finds_stop_texts or was_continued or reason is None:
            self._has_stop_text = self._cut_behind_stop_text()
        return "stop" if self._has_stop_text else reason or self.ended

    def note_experts(self, start: int, experts: NDArray[np.int16]) -> None:
        """Add the experts of consecutive tokens of prompt and response, the first of which has index `start`."""
        self._so_far.experts.add(start, experts)

    def result(self, reason: FinishReason) -> GenerationResult:
        so_far = self._so_far
        num_tokens = len(self._request.prompt_ids) + len(so_far)
        return GenerationResult(
            token_ids=so_far.token_ids,
            logprobs=so_far.logprobs,
            raw_logprobs=so_far.raw_logprobs,
            versions=so_far.versions,
            finish_reason=reason,
            routed_experts=so_far.experts.of_context(num_tokens),
        )

    def _cut_behind_stop_text(self) -> bool:
        """Return whether there is a stop text, and drop the tokens behind it."""
        if self._stop_texts is None:
            return False
        for token in self._so_far.tokens_from(self._num_searched):
            self._num_searched += 1
            if self._stop_texts.completed_by(token):
                self._so_far.cut(self._num_searched)
                return True
        return False
