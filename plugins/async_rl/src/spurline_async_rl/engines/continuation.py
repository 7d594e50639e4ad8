"""A response that several engines may write in turn, each going on where the last one ended.

Place on the way: request -> what is left of it to ask -> tokens of one engine -> the whole result. No engine and no
waiting here: that is `pool.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from spurline.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline.rl.engines.in_process.response import StopTexts
from spurline.rl.policy import derive_seed
from spurline.rl.trajectory import FinishReason
from spurline_async_rl.engines.member import Progress


class Continuation:
    """The response to one request, so far."""

    def __init__(self, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._so_far = Progress()

    @property
    def has_tokens(self) -> bool:
        return bool(self._so_far.token_ids)

    def rest(self) -> GenerationRequest:
        """What to ask the next engine. As long as no token has come it is the request itself."""
        request, tokens = self._request, self._so_far.token_ids
        if not tokens:
            return request
        left = request.sampling.max_new_tokens - len(tokens)
        assert left > 0, f"{request.name} has ended"
        return replace(
            request,
            prompt_ids=[*request.prompt_ids, *tokens],
            sampling=replace(request.sampling, max_new_tokens=left),
            # An engine counts random numbers from the first token it writes; with the same seed it would draw with
            # those of the beginning once more.
            seed=derive_seed(request.seed, "continuation", len(tokens), 0),
        )

    def add(self, progress: Progress, reason: FinishReason | None) -> GenerationResult | None:
        """Take over what an engine wrote. reason: None when it did not end the response.

        Returns the response when it has ended with this.
        """
        was_continued = self.has_tokens
        missing = len(progress.token_ids) - len(progress.raw_logprobs)
        self._so_far.token_ids += progress.token_ids
        self._so_far.logprobs += progress.logprobs
        # Not every engine can tell both kinds.
        self._so_far.raw_logprobs += [*progress.raw_logprobs, *[float("nan")] * missing]
        self._so_far.versions += progress.versions
        if reason is None and self._ends_with_stop_token():
            reason = "stop"
        if reason is None or was_continued:
            # The engine that wrote the last part knew nothing of the text before it.
            reason = self._cut_behind_stop_text() or reason
        if reason is None and len(self._so_far.token_ids) >= self._request.sampling.max_new_tokens:
            reason = "length"
        return None if reason is None else self.result(reason)

    def result(self, reason: FinishReason) -> GenerationResult:
        """All that came, as one response."""
        so_far = self._so_far
        return GenerationResult(
            token_ids=np.array(so_far.token_ids, np.int32),
            logprobs=np.array(so_far.logprobs, np.float32),
            raw_logprobs=None if np.isnan(so_far.raw_logprobs).any() else np.array(so_far.raw_logprobs, np.float32),
            versions=np.array(so_far.versions, np.int32),
            finish_reason=reason,
        )

    def _ends_with_stop_token(self) -> bool:
        """Whether an engine died between the last token and saying that it was the last."""
        ends = [*self._request.sampling.stop_token_ids, self._tokenizer.eos_token_id]
        return self.has_tokens and self._so_far.token_ids[-1] in ends

    def _cut_behind_stop_text(self) -> FinishReason | None:
        texts = self._request.sampling.stop
        if not texts:
            return None
        stop = StopTexts(self._tokenizer, texts)
        so_far = self._so_far
        end = next((number for number, token in enumerate(so_far.token_ids, 1) if stop.completed_by(token)), None)
        if end is None:
            return None
        for column in (so_far.token_ids, so_far.logprobs, so_far.raw_logprobs, so_far.versions):
            del column[end:]
        return "stop"
