"""One response while vLLM writes it: what to ask for, and what of the answer belongs to it.

Place on the way: GenerationRequest and Progress -> what vLLM is asked -> its tokens -> Progress. No vllm, no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline.protocols.rollout_engine import GenerationRequest
from spurline.rl.engines.in_process.response import StopTexts, check_request
from spurline.rl.trajectory import FinishReason
from spurline_async_rl.engines.member import Progress


@dataclass(frozen=True)
class Delta:
    """Some more tokens of a response, in order. finish_reason: set with the last ones."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None = None


class Response:
    """prompt, sampling, seed: of what is left to generate, the tokens in `progress` being part of the prompt.
    ended: why nothing is left, if so.

    Stop texts are found here, not by vLLM, so that a response ends at the very token at which core's engine ends it.
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
        """vocabulary: number of tokens of the model, where it is known. Raises DataError for a request that the model
        cannot answer."""
        check_request(request)
        prompt: list[int] = np.asarray(request.prompt_ids, np.int64).tolist()
        _check_prompt(request.name, prompt, max_model_len, vocabulary)
        self._progress = progress
        asked = request.sampling
        self._stop_texts = StopTexts(tokenizer, asked.stop) if asked.stop else None
        self._has_stop_text = any(self._completes_stop_text(token) for token in progress.token_ids)
        written = len(progress.token_ids)
        eos = tokenizer.eos_token_id
        self.prompt = [*prompt, *progress.token_ids]
        self.sampling = replace(
            asked,
            max_new_tokens=min(asked.max_new_tokens, max_model_len - len(prompt)) - written,
            stop_token_ids=(*asked.stop_token_ids, *([eos] if isinstance(eos, int) else [])),
            stop=(),
        )
        self.seed = _seed(request.seed, written)
        self.ended: FinishReason | None = self._reason_so_far()
        self._is_raw = asked.temperature == 0 or (asked.temperature == 1 and asked.top_p == 1 and asked.top_k == 0)

    def add(self, delta: Delta, version: int) -> FinishReason | None:
        """Take the tokens that belong to the response. Returns why it ended, if it has."""
        progress = self._progress
        for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
            progress.token_ids.append(token)
            progress.logprobs.append(logprob)
            progress.versions.append(version)
            if self._is_raw:
                progress.raw_logprobs.append(logprob)
            if self._completes_stop_text(token):
                return "stop"
        return delta.finish_reason

    def _reason_so_far(self) -> FinishReason | None:
        written = self._progress.token_ids
        if self._has_stop_text or (written and written[-1] in self.sampling.stop_token_ids):
            return "stop"
        return "length" if self.sampling.max_new_tokens <= 0 else None

    def _completes_stop_text(self, token: int) -> bool:
        return self._stop_texts is not None and self._stop_texts.completed_by(token)


def _check_prompt(name: str, prompt: list[int], max_model_len: int, vocabulary: int | None) -> None:
    if len(prompt) >= max_model_len:
        raise DataError(
            f"{name}: the prompt has {len(prompt)} tokens, and the engine's context of {max_model_len} holds prompt "
            "and response. Shorten the prompt, or raise max_model_len and kv_cache_gb where the model allows it."
        )
    outside = [token for token in (min(prompt), max(prompt)) if token < 0 or (vocabulary and token >= vocabulary)]
    if outside:
        raise DataError(
            f"{name}: the prompt has token {outside[0]}, and the model knows 0 to {(vocabulary or 0) - 1}. Is the "
            "tokenizer another model's?"
        )


def _seed(seed: int, written: int) -> int:
    """vLLM counts its random numbers from the first token it writes, so what goes on needs others."""
    if written == 0:
        return seed & 0x7FFF_FFFF_FFFF_FFFF
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, written)) >> 1
