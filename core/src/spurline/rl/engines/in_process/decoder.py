"""Try a decoder on a few random prompts before it is used: is its cache right, and which passes are deterministic?

Place on the way: loaded model -> this -> decoder. Deterministic passes of one fixed shape are several times faster
than a pass per row, and exact wherever a matrix product computes each of its rows alike; no library promises that, so
it is tried.

Write the responses of many rows side by side, a token per row and step.

Place on the way: admitted rows -> one pass over their prompts -> a pass per token, each followed by sampling -> rows
that have ended. Rows come and go between steps. No thread and no waiting here: that is `engine.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spurline.errors import DataError, ModelError, RunFailedError
from spurline.model.generation import model_stop_tokens
from spurline.model.stream_model import vocabulary_size
from spurline.model.token_stream import plan_segments
from spurline.protocols.backend import GenerationModel
from spurline.protocols.rollout_engine import GenerationRequest, Sampling
from spurline.rl.engines.in_process.attention import AttentionPart, KvCache, KvPass, PromptPass, TokenPass, generating
from spurline.rl.engines.in_process.response import Row
from spurline.rl.engines.in_process.sampling import sample, uniform

_ROWS = 32
"""In a deterministic pass. More rows waste more on few requests, fewer gain less on many."""
_SHAPE_PROBES = 6
_TOKENS = 5
_TOLERANCE, _HALF_PRECISION_TOLERANCE = 0.02, 0.5
"""Allowed mean difference of logprobs, in their standard deviations; a wrong cache gives about 1."""


@torch.no_grad()
def probed_decoder(make_decoder: Callable[[int | None], Decoder], *, deterministic: bool) -> Decoder:
    """make_decoder: from rows per pass, an empty decoder. Raises ModelError for a model it cannot decode."""
    decoder = make_decoder(_ROWS if deterministic else None)
    causal = decoder.model.causal
    with generating(causal):
        _check_cache(decoder)
        if deterministic and (
            _has_experts(causal) or not all(_computes_rows_alike(decoder, seed) for seed in range(_SHAPE_PROBES))
        ):
            return make_decoder(1)
    return decoder


def _check_cache(decoder: Decoder) -> None:
    """Tokens written one by one must have the logprobs that reading them as a prompt gives."""
    written = [_row(_random_prompt(decoder, length, seed=length), _TOKENS) for length in range(1, 7)]
    _write(decoder, written)
    read = [_row([*row.prompt, *row.tokens[:count]], 1) for row in written for count in range(len(row.tokens))]
    _write(decoder, read)
    expected = np.array([row.raw_logprobs[0] for row in read])
    difference = np.abs(np.concatenate([row.raw_logprobs for row in written]) - expected).mean()
    with decoder.model.computing():
        half_precision = torch.is_autocast_enabled(decoder.model.causal.device.type)
    allowed = (_HALF_PRECISION_TOLERANCE if half_precision else _TOLERANCE) * expected.std()
    if not difference <= allowed:
        raise ModelError(
            f"{type(decoder.model.causal).__name__} gives other log-probabilities token by token than at once: "
            f"{difference:.2g} on average, allowed {allowed:.2g}. It remembers more of earlier tokens than keys and "
            "values (linear attention, convolutions), so it cannot generate in_process. Choose another "
            "source.engine.name, or a model with plain causal attention."
        )


def _computes_rows_alike(decoder: Decoder, seed: int) -> bool:
    """Whether a request gets the same bits alone and in every place of a full pass."""
    prompt = _random_prompt(decoder, 1 + 3 * seed, seed)
    alone, *full = [_row(prompt, _TOKENS, temperature=1.0, seed=seed) for _ in range(1 + _ROWS)]
    _write(decoder, [alone])
    _write(decoder, full)
    return all((row.tokens, row.raw_logprobs) == (alone.tokens, alone.raw_logprobs) for row in full)


def _write(decoder: Decoder, rows: Sequence[Row]) -> None:
    decoder.advance(rows, 0)
    while decoder.rows:
        decoder.advance((), 0)


def _row(prompt: list[int], tokens: int, *, temperature: float = 0.0, seed: int = 0) -> Row:
    request = GenerationRequest(prompt, Sampling(temperature=temperature), seed, "start-up probe of the engine")
    return Row(request, prompt, None, max_tokens=tokens)


def _random_prompt(decoder: Decoder, length: int, seed: int) -> list[int]:
    size = vocabulary_size(decoder.model.causal)
    return torch.randint(size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _has_experts(causal: PreTrainedModel) -> bool:
    """Tokens of all rows that choose one expert are computed together there, in whatever number they come."""
    return any("experts" in name for name in causal.config.get_text_config().to_dict())


_PROMPT_TOKENS_PER_PASS = 8192
_LOGITS_AT_ONCE = 2**24
"""Numbers; bounds the memory of sampling with large vocabularies."""
_SLOTS_PER_CALL = 32
"""See `plan_segments`."""


class Decoder:
    """rows: those being written, in the order of their slots in the cache."""

    def __init__(
        self,
        model: GenerationModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int,
        max_cache_tokens: int,
        rows_per_pass: int | None = None,
    ):
        """rows_per_pass: shape of every pass over tokens and of all logits, filled up where there are fewer rows, so
        that neighbours cannot change the shape; prompts are read one by one then. None takes all rows as they are."""
        causal = model.causal
        self.model = model
        self.rows: list[Row] = []
        self._run_decoder: Any = causal.get_decoder()
        self._head: Any = causal.get_output_embeddings()
        self._device = causal.device
        self._vocabulary = vocabulary_size(causal)
        eos = tokenizer.eos_token_id
        self._stop_tokens: frozenset[int] = frozenset(
            [*model_stop_tokens(causal), *([eos] if isinstance(eos, int) else [])]
        )
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._rows_per_pass = rows_per_pass
        self._cache = KvCache()
        self._is_outdated = False

    def take(self, waiting: deque[Row]) -> tuple[list[Row], list[Row]]:
        """Remove from the front what there is room for now. Returns it, and what the model refuses to answer."""
        taken: list[Row] = []
        refused: list[Row] = []
        if not waiting:
            return taken, refused
        longest = max((row.most_cached_tokens for row in self.rows), default=0)
        while waiting:
            row = waiting[0]
            row.refused = self._refusal(row)
            if row.refused is not None:
                refused.append(row)
            elif not row.abandoned:
                row.max_tokens = self._longest_response(row)
                longest = max(longest, row.most_cached_tokens)
                count = len(self.rows) + len(taken) + 1
                if count > 1 and (count > self._max_rows or count * longest > self._max_cache_tokens):
                    break
                taken.append(row)
            waiting.popleft()
        return taken, refused

    @torch.no_grad()
    def advance(self, more: Sequence[Row], version: int) -> list[Row]:
        """Write the next token of every row, and the first two of the rows that are new. Returns those that ended."""
        self.drop_abandoned()
        if self._is_outdated:
            # Rows under way are read from their first token, as if they were new.
            more, self.rows, self._is_outdated = [*self.rows, *more], [], False
        if more:
            self.admit(more, version)
        ended = self._remove_ended()
        if self.rows:
            self.step(version)
            ended += self._remove_ended()
        return ended

    def outdate(self) -> None:
        """The weights are others now: use nothing any more that was computed with the old ones."""
        self._is_outdated = True

    def admit(self, more: Sequence[Row], version: int) -> None:
        """Read the prompts of further rows, with what they have written, and write the next token of each."""
        used = len(self.rows)
        order = sorted(more, key=lambda row: (len(row.context), row.context))
        self.rows.extend(order)
        self._cache.reserve(len(self.rows), max(row.most_cached_tokens for row in self.rows), used)
        for rows in _streams(order, 1 if self._rows_per_pass else _PROMPT_TOKENS_PER_PASS):
            self._read_prompts(rows, used, version)
            used += len(rows)

    def step(self, version: int) -> None:
        """Write the next token of every row."""
        size = self._rows_per_pass or len(self.rows)
        for start in range(0, len(self.rows), size):
            rows = self.rows[start : start + size]
            lengths = np.array([row.cached_tokens for row in rows])
            kv_pass = TokenPass(self._cache, start, self._send(lengths), self._parts(lengths))
            filling = [0] * (size - len(rows))
            ids = np.array([*(row.tokens[-1] for row in rows), *filling])
            hidden = self._hidden(ids[:, None], np.array([*lengths, *filling])[:, None], kv_pass)
            self._write(rows, hidden[: len(rows), 0], version)

    def drop_abandoned(self) -> None:
        """Make room where nobody waits for the response any more."""
        self._remove([slot for slot, row in enumerate(self.rows) if row.abandoned])

    def _remove_ended(self) -> list[Row]:
        return self._remove([slot for slot, row in enumerate(self.rows) if row.finish_reason is not None])

    def _remove(self, slots: Sequence[int]) -> list[Row]:
        removed = [self.rows[slot] for slot in slots]
        left = len(self.rows) - len(slots)
        # The last rows move into the gaps before them.
        gaps = [slot for slot in slots if slot < left]
        movers = [slot for slot in range(left, len(self.rows)) if slot not in set(slots)]
        if left == 0:
            self._cache.clear()
        elif gaps:
            self._cache.move(movers, gaps)
            for mover, gap in zip(movers, gaps, strict=True):
                self.rows[gap] = self.rows[mover]
        del self.rows[left:]
        return removed

    def _refusal(self, row: Row) -> DataError | None:
        """Why the model cannot answer this prompt."""
        prompt, limit = row.prompt, self.model.max_tokens
        if limit is not None and len(prompt) >= limit:
            return DataError(
                f"{row.request.name}: the prompt has {len(prompt)} tokens, and the model's context of {limit} holds "
                "prompt and response. Shorten the prompt."
            )
        outside = [token for token in (min(prompt), max(prompt)) if not 0 <= token < self._vocabulary]
        if outside:
            return DataError(
                f"{row.request.name}: the prompt has token {outside[0]}, and the model knows 0 to "
                f"{self._vocabulary - 1}. Is the tokenizer another model's?"
            )
        return None

    def _longest_response(self, row: Row) -> int:
        longest, limit = row.request.sampling.max_new_tokens, self.model.max_tokens
        return longest if limit is None else min(longest, limit - len(row.prompt))

    def _read_prompts(self, rows: Sequence[Row], start: int, version: int) -> None:
        """rows: from short to long, equal ones side by side; what is equal is read once."""
        contexts = [row.context for row in rows]
        is_new = np.array([True, *(context != before for before, context in pairwise(contexts))])
        distinct = [context for context, new in zip(contexts, is_new, strict=True) if new]
        lengths = np.array([len(context) for context in distinct])
        ends = np.cumsum(lengths)
        which = np.cumsum(is_new) - 1
        source = np.minimum(np.arange(lengths[-1]) + (ends - lengths)[which][:, None], ends[-1] - 1)
        plan = plan_segments(lengths, _SLOTS_PER_CALL, lambda tensor: tensor.to(self._device))
        positions = np.concatenate([np.arange(length) for length in lengths])
        kv_pass = PromptPass(self._cache, plan, self._send(source), start)
        hidden = self._hidden(np.concatenate(distinct)[None], positions[None], kv_pass)
        self._write(rows, hidden[0, self._send((ends - 1)[which])], version)

    def _hidden(self, ids: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], kv_pass: KvPass) -> Tensor:
        with self.model.computing():
            return self._run_decoder(
                input_ids=self._send(ids), position_ids=self._send(positions), use_cache=False, kv_pass=kv_pass
            ).last_hidden_state

    def _write(self, rows: Sequence[Row], hidden: Tensor, version: int) -> None:
        """Draw the next token of each row from its last hidden state [rows, H]."""
        size = self._rows_per_pass or max(1, _LOGITS_AT_ONCE // self._vocabulary)
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            states = hidden[start : start + size]
            if self._rows_per_pass:
                states = F.pad(states, (0, 0, 0, size - len(chunk)))
            with self.model.computing():
                logits = self._head(states)[: len(chunk)]
            sampled = sample(
                logits,
                [row.request.sampling for row in chunk],
                [uniform(row.request.seed, len(row.tokens)) for row in chunk],
            )
            drawn = zip(chunk, sampled.tokens, sampled.logprobs, sampled.raw_logprobs, strict=True)
            for row, token, logprob, raw_logprob in drawn:
                if not math.isfinite(logprob):
                    raise RunFailedError(
                        f"{row.request.name}: the model's logits after {len(row.tokens)} tokens of the response are "
                        "not finite. The weights are broken; look at the loss and gradient norm of the last steps."
                    )
                row.add(token, logprob, raw_logprob, version, self._stop_tokens)

    def _parts(self, lengths: np.ndarray[Any, Any]) -> list[AttentionPart]:
        """How attention of rows with these cached lengths is divided."""
        if self._rows_per_pass:
            # One by one, each with exactly its own tokens: masked ones behind them would change the order of sums, and
            # attention kernels compute a row otherwise where it lies otherwise among threads.
            return [AttentionPart(slice(row, row + 1), int(length) + 1, None) for row, length in enumerate(lengths)]
        even = lengths.min() == lengths.max()
        return [AttentionPart(slice(None), int(lengths.max()) + 1, None if even else self._send(lengths + 1))]

    def _send(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device)


def _streams(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Sorted rows to read in one pass: different ones up to so many tokens, or one alone."""
    stream: list[Row] = []
    tokens = 0
    for row in rows:
        length = len(row.context)
        if not stream or row.context != stream[-1].context:
            if stream and tokens + length > max_tokens:
                yield stream
                stream, tokens = [], 0
            tokens += length
        stream.append(row)
    if stream:
        yield stream
