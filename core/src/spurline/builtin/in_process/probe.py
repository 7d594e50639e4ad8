"""Try a decoder on a few random prompts before it is used: is its cache right, and which passes are deterministic?

Place on the way: loaded model -> this -> decoder. Deterministic passes of one fixed shape are several times faster
than a pass per row, and exact wherever a matrix product computes each of its rows alike; no library promises that, so
it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from spurline.builtin.in_process.cached_attention import generating
from spurline.builtin.in_process.decoder import Decoder
from spurline.builtin.in_process.row import Row
from spurline.builtin.local.stream_model import vocabulary_size
from spurline.errors import ModelError
from spurline.protocols.rollout_engine import GenerationRequest, Sampling

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
