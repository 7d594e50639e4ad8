"""Generate many responses together. Each step generates one token of every response.

A new response begins with a pass over its prompt. Responses are added and removed between steps. `engine.py` handles
threads and waiting requests.

A second decoder generates each response alone. It serves deterministic engines, and models whose layers keep more state
than keys and values. Before a decoder is used, its cache is tested on a few random prompts.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spurline.errors import ModelError, RunFailedError
from spurline_models.abilities import GenerationModel
from spurline_models.architecture import find_decoder, vocabulary_size
from spurline_models.experts.router_replay import ExpertRouting
from spurline_models.generation import model_stop_tokens
from spurline_models.streams.stream_model import library_attention
from spurline_models.streams.token_logprobs import OutputLogits
from spurline_models.streams.token_stream import plan_segments
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.attention import CACHED_ATTENTION, KvCache, PromptPass, TokenPass, generating
from spurline_rl.engines.in_process.response import Response, find_refusal
from spurline_rl.engines.in_process.sampling import sample, uniform
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling

_PROMPT_TOKENS_PER_PASS = 8192
_LOGITS_AT_ONCE = 2**24
"""Largest number of logits that are computed together. It limits memory with large vocabularies."""
_SLOTS_PER_CALL = 32
"""Number of padding slots that cost as much time as an attention call. See `plan_segments`."""
_PROBED_TOKENS = 5
_TOLERANCE, _HALF_PRECISION_TOLERANCE = 0.02, 0.5
"""Allowed mean difference of logprobs, in standard deviations of logprobs. A wrong cache gives about 1."""
_MODEL_CACHES = ("past_key_values", "cache_params")
"""Names under which models take and return their cache."""


class Decoder:
    """Generates responses.

    Args:
        routing: Routing of the model's experts; None if responses do not record experts.

    Attributes:
        responses: Unfinished responses, in the order of their slots in the cache.
        attention: The transformers name of the attention that the model uses for generation.
    """

    def __init__(
        self,
        model: GenerationModel,
        tokenizer: PreTrainedTokenizerBase,
        config: InProcessEngineConfig,
        routing: ExpertRouting | None = None,
    ):
        causal = model.causal
        self.model = model
        self.responses: list[Response] = []
        self.attention = CACHED_ATTENTION
        self._run_decoder: Any = find_decoder(causal)
        self._logits = OutputLogits(causal)
        self._device = causal.device
        self._vocabulary = vocabulary_size(causal)
        eos = tokenizer.eos_token_id
        self._stop_tokens: frozenset[int] = frozenset(
            [*model_stop_tokens(causal), *([eos] if isinstance(eos, int) else [])]
        )
        self._config = config
        self._routing = routing
        self._cache = KvCache()
        self._is_outdated = False

    def take(self, waiting: deque[Response]) -> tuple[list[Response], list[Response]]:
        """Take responses from the front of `waiting` while they fit. Returns taken and refused responses."""
        taken: list[Response] = []
        refused: list[Response] = []
        longest = max((response.most_cached_tokens for response in self.responses), default=0)
        while waiting:
            response = waiting[0]
            limit = self.model.max_tokens
            response.refused = find_refusal(response.request.name, response.prompt, limit, self._vocabulary)
            if response.refused is not None:
                refused.append(response)
            elif not response.abandoned:
                asked = response.request.sampling.max_new_tokens
                response.max_tokens = asked if limit is None else min(asked, limit - len(response.prompt))
                longest = max(longest, response.most_cached_tokens)
                count, config = len(self.responses) + len(taken) + 1, self._config
                if count > 1 and (count > config.max_batch or count * longest > config.max_cache_tokens):
                    break
                taken.append(response)
            waiting.popleft()
        return taken, refused

    @torch.no_grad()
    def advance(self, more: Sequence[Response], version: int) -> list[Response]:
        """Generate a token of every response, and one more of those just admitted. Returns the responses that ended."""
        self.drop_abandoned()
        if self._is_outdated:
            # Read unfinished responses again from their first token.
            more, self.responses, self._is_outdated = [*self.responses, *more], [], False
        if more:
            self.admit(more, version)
        ended = self._remove_ended()
        if self.responses:
            self.step(version)
            ended += self._remove_ended()
        return ended

    def outdate(self) -> None:
        """Mark all keys and values as outdated, since the weights have changed. The next step computes them again."""
        self._is_outdated = True

    def free_cache(self) -> None:
        """Free the keys and values. The next step computes them again for unfinished responses."""
        self._cache.clear()
        self.outdate()

    def admit(self, more: Sequence[Response], version: int) -> None:
        """Read the contexts of new responses, and generate the next token of each."""
        used = len(self.responses)
        order = sorted(more, key=lambda response: (len(response.context), response.context))
        self.responses.extend(order)
        self._cache.reserve(len(self.responses), max(response.most_cached_tokens for response in self.responses), used)
        for responses in _cut_into_streams(order):
            self._read_prompts(responses, used, version)
            used += len(responses)

    def step(self, version: int) -> None:
        """Generate the next token of every response."""
        lengths = np.array([response.cached_tokens for response in self.responses])
        last = np.array([response.tokens[-1] for response in self.responses])
        kv_pass = TokenPass(self._cache, self._send(lengths), (lengths + 1).tolist())
        hidden, experts = self._hidden(last[:, None], lengths[:, None], kv_pass)
        if experts is not None:
            for response, length, chosen in zip(self.responses, lengths.tolist(), experts, strict=True):
                response.experts.add(length, chosen[None])
        self._write(self.responses, hidden[:, 0], version)

    def drop_abandoned(self) -> None:
        """Remove responses whose caller has stopped waiting."""
        self._remove([slot for slot, response in enumerate(self.responses) if response.abandoned])

    def _remove_ended(self) -> list[Response]:
        return self._remove([slot for slot, one in enumerate(self.responses) if one.finish_reason is not None])

    def _remove(self, slots: Sequence[int]) -> list[Response]:
        removed = [self.responses[slot] for slot in slots]
        left = len(self.responses) - len(slots)
        # The last responses move into the gaps.
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
        self, ids: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], kv_pass: PromptPass | TokenPass
    ) -> tuple[Tensor, NDArray[np.int16] | None]:
        """Return the last hidden states [rows, tokens, H], and recorded experts [rows * tokens, layers, top_k]."""
        output, experts = self._run(
            input_ids=self._send(ids), position_ids=self._send(positions), use_cache=False, kv_pass=kv_pass
        )
        return output.last_hidden_state, experts

    def _run(self, **inputs: Any) -> tuple[Any, NDArray[np.int16] | None]:
        noting = nullcontext() if self._routing is None else self._routing.noting()
        with self.model.computing(), noting as noted:
            output = self._run_decoder(**inputs)
        return output, None if self._routing is None or noted is None else self._routing.as_array(noted)

    def _write(self, responses: Sequence[Response], hidden: Tensor, version: int) -> None:
        """Draw the next token of each response from its last hidden state [rows, H]."""
        size = max(1, _LOGITS_AT_ONCE // self._vocabulary)
        for start in range(0, len(responses), size):
            chunk = responses[start : start + size]
            with self.model.computing():
                logits = self._logits(hidden[start : start + size])
            sampled = sample(
                logits,
                [response.request.sampling for response in chunk],
                [uniform(response.request.seed, len(response.tokens)) for response in chunk],
            )
            drawn = zip(chunk, sampled.tokens, sampled.logprobs, sampled.supports, strict=True)
            for response, token, logprob, support in drawn:
                if not math.isfinite(logprob):
                    raise RunFailedError(
                        f"{response.request.name}: the model's logits after {len(response.tokens)} tokens of the "
                        "response are not finite. The weights are broken; look at the loss and gradient norm of "
                        "the last steps."
                    )
                ends = () if response.request.sampling.ignore_eos else self._stop_tokens
                response.add(token, logprob, version, ends, support)

    def _send(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device)


def _cut_into_streams(responses: Sequence[Response]) -> Iterator[list[Response]]:
    """Cut sorted responses into passes. A context that is longer than the limit of a pass gets its own pass."""
    stream: list[Response] = []
    tokens = 0
    for response in responses:
        length = len(response.context)
        if not stream or response.context != stream[-1].context:
            if stream and tokens + length > _PROMPT_TOKENS_PER_PASS:
                yield stream
                stream, tokens = [], 0
            tokens += length
        stream.append(response)
    if stream:
        yield stream


class OwnCacheDecoder(Decoder):
    """Generates each response in its own passes, with a cache that transformers makes.

    Responses therefore never depend on each other. This decoder also supports linear attention, state spaces,
    convolutions, and attention that `KvCache` does not support (softcaps, sinks).
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.attention = library_attention(self.model.causal)
        # The keys are the `id`s of responses.
        self._caches: dict[int, dict[str, Any]] = {}

    def step(self, version: int) -> None:
        for response in self.responses:
            last = self._read(response, response.tokens[-1:], self._caches[id(response)], response.cached_tokens)
            self._write([response], last, version)

    def free_cache(self) -> None:
        self._caches.clear()
        super().free_cache()

    def _read_prompts(self, responses: Sequence[Response], start: int, version: int) -> None:
        read: list[int] = []
        state: Tensor | None = None
        first = responses[0]
        for response in responses:
            context = response.context
            if state is None or context != read:
                read, first = context, response
                self._caches[id(response)] = {}
                state = self._read(response, context, self._caches[id(response)], 0)
            else:
                # Attempts at the same prompt copy the cache of the first attempt.
                self._caches[id(response)] = copy.deepcopy(self._caches[id(first)])
                response.experts = copy.deepcopy(first.experts)
            self._write([response], state, version)

    def _remove(self, slots: Sequence[int]) -> list[Response]:
        removed = super()._remove(slots)
        for response in removed:
            self._caches.pop(id(response), None)
        return removed

    def _read(self, response: Response, tokens: Sequence[int], cache: dict[str, Any], before: int) -> Tensor:
        """Read `tokens` after the `before` tokens in `cache`, and add them to it. Returns the last hidden state."""
        output, experts = self._run(input_ids=self._send(np.array(tokens))[None], use_cache=True, **cache)
        cache.update({name: output[name] for name in _MODEL_CACHES if output.get(name) is not None})
        if experts is not None:
            response.experts.add(before, experts)
        return output.last_hidden_state[:, -1]


@torch.no_grad()
def probed_decoder(make: Callable[[type[Decoder]], Decoder], *, deterministic: bool) -> Decoder:
    """Return a decoder that has been tested with the model.

    Args:
        make: Makes a decoder of the given class, without responses.
        deterministic: Whether responses must not depend on other responses.

    Raises:
        ModelError: If no decoder is exact with this model.
    """
    decoder = make(Decoder)
    if decoder.model.reads_streams and not deterministic:
        with suppress(ModelError):
            _check_cache(decoder)
            return decoder
    decoder = make(OwnCacheDecoder)
    _check_cache(decoder)
    return decoder


def _check_cache(decoder: Decoder) -> None:
    """Raise ModelError if logprobs with the cache differ from those of a single pass over all earlier tokens."""
    causal = decoder.model.causal
    size, random = vocabulary_size(causal), torch.Generator().manual_seed(0)
    prompts = [torch.randint(size, (length,), generator=random).tolist() for length in range(1, 7)]
    written = [_probe(prompt, _PROBED_TOKENS) for prompt in prompts]
    with generating(causal, decoder.attention):
        _write(decoder, written)
        read = [
            _probe([*response.prompt, *response.tokens[:count]], 1)
            for response in written
            for count in range(len(response.tokens))
        ]
        _write(decoder, read)
    expected = np.array([response.logprobs[0] for response in read])
    difference = np.abs(np.concatenate([response.logprobs for response in written]) - expected).mean()
    with decoder.model.computing():
        half_precision = torch.is_autocast_enabled(causal.device.type)
    allowed = (_HALF_PRECISION_TOLERANCE if half_precision else _TOLERANCE) * expected.std()
    if not difference <= allowed:
        raise ModelError(
            f"{type(causal).__name__} gives different log-probabilities with and without a cache: they differ by "
            f"{difference:.2g} on average, and {allowed:.2g} is allowed. Its cache is incomplete, so it cannot "
            "generate in_process. Choose another source.engine.name, or another model."
        )


def _write(decoder: Decoder, responses: Sequence[Response]) -> None:
    decoder.advance(responses, 0)
    while decoder.responses:
        decoder.advance((), 0)


def _probe(prompt: list[int], tokens: int) -> Response:
    request = GenerationRequest(prompt, Sampling(temperature=0.0), 0, "start-up probe of the engine")
    return Response(request, prompt, None, max_tokens=tokens)
