"""Generate many responses at once, one token of each per step.

New responses get one pass over their prompts. Then each pass gives a token of every response. Responses are added and
removed between steps. Threads and waiting are in `engine.py`.

A decoder is tested on a few random prompts before it is used: its cache must be right, and passes of one fixed shape
must be deterministic. Such passes are several times faster than a pass per response. They are exact only if matrix
products compute all rows in the same way, which no library promises.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, ModelError, RunFailedError
from spurline.protocols.backend import GenerationModel
from spurline_models.architecture import find_decoder, has_experts, vocabulary_size
from spurline_models.experts.router_replay import ExpertRouting
from spurline_models.generation import model_stop_tokens
from spurline_models.streams.token_logprobs import OutputLogits
from spurline_models.streams.token_stream import plan_segments
from spurline_rl.engines.in_process.attention import (
    CACHED_ATTENTION,
    KvCache,
    KvPass,
    PromptPass,
    TokenPass,
    generating,
)
from spurline_rl.engines.in_process.response import Response
from spurline_rl.engines.in_process.sampling import sample, uniform
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling

_PROMPT_TOKENS_PER_PASS = 8192
_LOGITS_AT_ONCE = 2**24
"""Largest number of logits in a call, which bounds the memory of sampling with large vocabularies."""
_SLOTS_PER_CALL = 32
"""See `plan_segments`."""
_ROWS = 32
"""Rows of a deterministic pass. A larger number is slower for few requests, and a smaller one for many."""
_SHAPE_PROBES = 6
_TOKENS = 5
_TOLERANCE, _HALF_PRECISION_TOLERANCE = 0.02, 0.5
"""Allowed mean difference of logprobs, in standard deviations of logprobs; a wrong cache gives about 1."""


class Decoder:
    """Generates responses.

    Args:
        rows_per_pass: Fixed number of rows of every pass over tokens and of logits, so that a response does not depend
            on its neighbours. Prompts are then read one by one. With None, a pass has a row for each response.
        routing: Experts of the model, if responses record the experts of their tokens.

    Attributes:
        responses: Unfinished responses, in the order of their slots in the cache.
    """

    def __init__(
        self,
        model: GenerationModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_responses: int,
        max_cache_tokens: int,
        rows_per_pass: int | None = None,
        routing: ExpertRouting | None = None,
    ):
        causal = model.causal
        self.model = model
        self.responses: list[Response] = []
        self._run_decoder: Any = find_decoder(causal)
        self._logits = OutputLogits(causal)
        self._device = causal.device
        self._vocabulary = vocabulary_size(causal)
        eos = tokenizer.eos_token_id
        self._stop_tokens: frozenset[int] = frozenset(
            [*model_stop_tokens(causal), *([eos] if isinstance(eos, int) else [])]
        )
        self._max_responses = max_responses
        self._max_cache_tokens = max_cache_tokens
        self._rows_per_pass = rows_per_pass
        self._routing = routing
        self._cache = KvCache()
        self._is_outdated = False

    @property
    def attention(self) -> str:
        """Return the transformers name of the attention that the model uses for generation."""
        return CACHED_ATTENTION

    def take(self, waiting: deque[Response]) -> tuple[list[Response], list[Response]]:
        """Take responses from the front of `waiting` while they fit. Returns these, and those that are refused."""
        taken: list[Response] = []
        refused: list[Response] = []
        longest = max((response.most_cached_tokens for response in self.responses), default=0)
        while waiting:
            response = waiting[0]
            response.refused = self._find_refusal(response)
            if response.refused is not None:
                refused.append(response)
            elif not response.abandoned:
                asked, limit = response.request.sampling.max_new_tokens, self.model.max_tokens
                response.max_tokens = asked if limit is None else min(asked, limit - len(response.prompt))
                longest = max(longest, response.most_cached_tokens)
                count = len(self.responses) + len(taken) + 1
                if count > 1 and (count > self._max_responses or count * longest > self._max_cache_tokens):
                    break
                taken.append(response)
            waiting.popleft()
        return taken, refused

    @torch.no_grad()
    def advance(self, more: Sequence[Response], version: int) -> list[Response]:
        """Generate a token of every response, and two of every new one. Returns the responses that ended."""
        self.drop_abandoned()
        if self._is_outdated:
            # Unfinished responses are read again from their first token.
            more, self.responses, self._is_outdated = [*self.responses, *more], [], False
        if more:
            self.admit(more, version)
        ended = self._remove_ended()
        if self.responses:
            self.step(version)
            ended += self._remove_ended()
        return ended

    def outdate(self) -> None:
        """Mark all keys and values as outdated, since the weights have changed. They are computed again."""
        self._is_outdated = True

    def free_cache(self) -> None:
        """Free the keys and values. Those of unfinished responses are computed again."""
        self._cache.clear()
        self.outdate()

    def admit(self, more: Sequence[Response], version: int) -> None:
        """Read the prompts and earlier tokens of new responses, and generate the next token of each."""
        used = len(self.responses)
        order = sorted(more, key=lambda response: (len(response.context), response.context))
        self.responses.extend(order)
        self._cache.reserve(len(self.responses), max(response.most_cached_tokens for response in self.responses), used)
        for responses in _cut_into_streams(order, 1 if self._rows_per_pass else _PROMPT_TOKENS_PER_PASS):
            self._read_prompts(responses, used, version)
            used += len(responses)

    def step(self, version: int) -> None:
        """Generate the next token of every response."""
        size = self._rows_per_pass or len(self.responses)
        for start in range(0, len(self.responses), size):
            responses = self.responses[start : start + size]
            lengths = np.array([response.cached_tokens for response in responses])
            widths = (lengths + 1).tolist()
            one_by_one = self._rows_per_pass is not None
            kv_pass = TokenPass(self._cache, start, self._send(lengths), widths, one_by_one)
            filling = [0] * (size - len(responses))
            ids = np.array([*(response.tokens[-1] for response in responses), *filling])
            hidden, experts = self._hidden(ids[:, None], np.array([*lengths, *filling])[:, None], kv_pass)
            if experts is not None:
                for response, length, chosen in zip(responses, lengths.tolist(), experts, strict=False):
                    response.experts.add(length, chosen[None])
            self._write(responses, hidden[: len(responses), 0], version)

    def drop_abandoned(self) -> None:
        """Remove the responses that nobody waits for."""
        self._remove([slot for slot, response in enumerate(self.responses) if response.abandoned])

    def _remove_ended(self) -> list[Response]:
        return self._remove([slot for slot, one in enumerate(self.responses) if one.finish_reason is not None])

    def _remove(self, slots: Sequence[int]) -> list[Response]:
        removed = [self.responses[slot] for slot in slots]
        left = len(self.responses) - len(slots)
        # The last responses move into the gaps before them.
        gaps = [slot for slot in slots if slot < left]
        movers = [slot for slot in range(left, len(self.responses)) if slot not in set(slots)]
        if left == 0:
            self._cache.clear()
        elif gaps:
            self._cache.move(movers, gaps)
            for mover, gap in zip(movers, gaps, strict=True):
                self.responses[gap] = self.responses[mover]
        del self.responses[left:]
        return removed

    def _find_refusal(self, response: Response) -> DataError | None:
        prompt, limit = response.prompt, self.model.max_tokens
        if limit is not None and len(prompt) >= limit:
            return DataError(
                f"{response.request.name}: the prompt has {len(prompt)} tokens, and the model's context of {limit} "
                "must hold prompt and response. Shorten the prompt."
            )
        outside = [token for token in (min(prompt), max(prompt)) if not 0 <= token < self._vocabulary]
        if outside:
            return DataError(
                f"{response.request.name}: the prompt has token {outside[0]}, and the model knows 0 to "
                f"{self._vocabulary - 1}. Is the tokenizer another model's?"
            )
        return None

    def _read_prompts(self, responses: Sequence[Response], start: int, version: int) -> None:
        """Read the contexts of the responses, from short to long. Equal contexts are read once."""
        contexts = [response.context for response in responses]
        is_new = np.array([True, *(context != before for before, context in pairwise(contexts))])
        distinct = [context for context, new in zip(contexts, is_new, strict=True) if new]
        lengths = np.array([len(context) for context in distinct])
        ends = np.cumsum(lengths)
        which = np.cumsum(is_new) - 1
        source = np.minimum(np.arange(lengths[-1]) + (ends - lengths)[which][:, None], ends[-1] - 1)
        plan = plan_segments(lengths, _SLOTS_PER_CALL, lambda tensor: tensor.to(self._device))
        positions = np.concatenate([np.arange(length) for length in lengths])
        kv_pass = PromptPass(self._cache, plan, self._send(source), start)
        hidden, experts = self._hidden(np.concatenate(distinct)[None], positions[None], kv_pass)
        if experts is not None:
            for response, number in zip(responses, which.tolist(), strict=True):
                response.experts.add(0, experts[ends[number] - lengths[number] : ends[number]])
        self._write(responses, hidden[0, self._send((ends - 1)[which])], version)

    def _hidden(
        self, ids: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], kv_pass: KvPass
    ) -> tuple[Tensor, NDArray[np.int16] | None]:
        """Return last hidden states [rows, tokens, H] and, if noted, experts [rows * tokens, layers, top_k]."""
        noting = nullcontext() if self._routing is None else self._routing.noting()
        with self.model.computing(), noting as noted:
            hidden = self._run_decoder(
                input_ids=self._send(ids), position_ids=self._send(positions), use_cache=False, kv_pass=kv_pass
            ).last_hidden_state
        return hidden, None if self._routing is None or noted is None else self._routing.as_array(noted)

    def _write(self, responses: Sequence[Response], hidden: Tensor, version: int) -> None:
        """Draw the next token of each response from its last hidden state [rows, H]."""
        size = self._rows_per_pass or max(1, _LOGITS_AT_ONCE // self._vocabulary)
        for start in range(0, len(responses), size):
            chunk = responses[start : start + size]
            states = hidden[start : start + size]
            if self._rows_per_pass:
                states = F.pad(states, (0, 0, 0, size - len(chunk)))
            with self.model.computing():
                logits = self._logits(states)[: len(chunk)]
            sampled = sample(
                logits,
                [response.request.sampling for response in chunk],
                [uniform(response.request.seed, len(response.tokens)) for response in chunk],
            )
            drawn = zip(chunk, sampled.tokens, sampled.logprobs, sampled.raw_logprobs, strict=True)
            for response, token, logprob, raw_logprob in drawn:
                if not math.isfinite(logprob):
                    raise RunFailedError(
                        f"{response.request.name}: the model's logits after {len(response.tokens)} tokens of the "
                        "response are not finite. The weights are broken; look at the loss and gradient norm of "
                        "the last steps."
                    )
                response.add(token, logprob, raw_logprob, version, self._stop_tokens)

    def _send(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device)


def _cut_into_streams(responses: Sequence[Response], max_tokens: int) -> Iterator[list[Response]]:
    """Cut sorted responses into passes of different contexts, of up to `max_tokens` tokens or a single context."""
    stream: list[Response] = []
    tokens = 0
    for response in responses:
        length = len(response.context)
        if not stream or response.context != stream[-1].context:
            if stream and tokens + length > max_tokens:
                yield stream
                stream, tokens = [], 0
            tokens += length
        stream.append(response)
    if stream:
        yield stream


@torch.no_grad()
def probed_decoder(
    make_decoder: Callable[[int | None], Decoder], make_slow: Callable[[], Decoder], *, deterministic: bool
) -> Decoder:
    """Return a decoder that has been tested with the model.

    Args:
        make_decoder: Makes an empty decoder, with the rows per pass as its argument (see `Decoder`).
        make_slow: Makes a decoder for models that do not work with the other one.

    Raises:
        ModelError: For a model that neither can decode.
    """
    decoder = make_decoder(_ROWS if deterministic else None)
    causal = decoder.model.causal
    if not (decoder.model.reads_streams and _is_decoded_by(decoder)):
        slow = make_slow()
        with generating(causal, slow.attention):
            _check_cache(slow)
        return slow
    with generating(causal, decoder.attention):
        # An expert computes the tokens of all responses together, so the shape of its pass varies.
        if deterministic and (
            has_experts(causal.config.get_text_config())
            or not all(_computes_rows_alike(decoder, seed) for seed in range(_SHAPE_PROBES))
        ):
            return make_decoder(1)
    return decoder


def _is_decoded_by(decoder: Decoder) -> bool:
    try:
        with generating(decoder.model.causal, decoder.attention):
            _check_cache(decoder)
    except ModelError:
        return False
    return True


def _check_cache(decoder: Decoder) -> None:
    """Raise ModelError unless tokens generated one by one have the same logprobs as when they are read as a prompt."""
    written = [_probe(_random_prompt(decoder, length, seed=length), _TOKENS) for length in range(1, 7)]
    _write(decoder, written)
    read = [
        _probe([*response.prompt, *response.tokens[:count]], 1)
        for response in written
        for count in range(len(response.tokens))
    ]
    _write(decoder, read)
    expected = np.array([response.raw_logprobs[0] for response in read])
    difference = np.abs(np.concatenate([response.raw_logprobs for response in written]) - expected).mean()
    with decoder.model.computing():
        half_precision = torch.is_autocast_enabled(decoder.model.causal.device.type)
    allowed = (_HALF_PRECISION_TOLERANCE if half_precision else _TOLERANCE) * expected.std()
    if not difference <= allowed:
        raise ModelError(
            f"{type(decoder.model.causal).__name__} gives other log-probabilities token by token than at once: "
            f"{difference:.2g} on average, allowed {allowed:.2g}. Its cache does not hold all that it remembers of "
            "earlier tokens, so it cannot generate in_process. Choose another source.engine.name, or another model."
        )


def _computes_rows_alike(decoder: Decoder, seed: int) -> bool:
    """Return whether a request gets bitwise the same result alone and in every row of a full pass."""
    prompt = _random_prompt(decoder, 1 + 3 * seed, seed)
    alone, *full = [_probe(prompt, _TOKENS, temperature=1.0, seed=seed) for _ in range(1 + _ROWS)]
    _write(decoder, [alone])
    _write(decoder, full)
    return all((response.tokens, response.raw_logprobs) == (alone.tokens, alone.raw_logprobs) for response in full)


def _write(decoder: Decoder, responses: Sequence[Response]) -> None:
    decoder.advance(responses, 0)
    while decoder.responses:
        decoder.advance((), 0)


def _probe(prompt: list[int], tokens: int, *, temperature: float = 0.0, seed: int = 0) -> Response:
    request = GenerationRequest(prompt, Sampling(temperature=temperature), seed, "start-up probe of the engine")
    return Response(request, prompt, None, max_tokens=tokens)


def _random_prompt(decoder: Decoder, length: int, seed: int) -> list[int]:
    size = vocabulary_size(decoder.model.causal)
    return torch.randint(size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
