"""Check at start-up that this model's loss can be computed the way the local backend computes it.

Three shortcuts are compared with the model's own forward pass on a few random tokens: several sequences in one
stream, attention replaced by `segment_attention`, and the output layer applied outside the model, in chunks. A model
with anything in between (a logit softcap, linear attention that ignores segments, a window known only to its mask)
differs, and is refused. Draws from its own generator; leaves weights, gradients and mode alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.errors import ModelError, SpurlineError
from spurline.model.device_profile import DeviceProfile
from spurline.model.segment_attention import ATTENTION_NAME, observed_windows
from spurline.model.stream_model import StreamModel, TokenLogprobs, evaluation_mode, vocabulary_size
from spurline.model.token_stream import plan_segments

_LENGTHS = (4, 6, 6, 11)
_CHUNK_TOKENS = 8
_TOLERANCE = 3e-4
"""Allowed difference of logits in standard deviations of the logits; fp32 kernels differ by some 1e-6 to 1e-5."""
_HALF_PRECISION_TOLERANCE = 0.1
"""Allowed mean difference between half-precision and fp32 logprobs, same unit; mixed-up segments give far more."""
_LOUD_LOGITS = 50.0
"""Standard deviation of logits in the output layer's test: the small logits of fresh weights would hide a softcap."""

_LOGIT_FIELDS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "logits_soft_cap": None}
"""Config fields by which known models change logits after the output layer, and the value that turns them off."""


def check_exactness(model: StreamModel, profile: DeviceProfile, path: str) -> None:
    """Raise ModelError naming what differed, by how much, and what to do."""
    generator = torch.Generator().manual_seed(20_240_229)
    vocabulary = vocabulary_size(model.causal)
    sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in _LENGTHS]
    try:
        with evaluation_mode(model.causal):
            with profile.computing_exactly():
                reference, hidden = _own_forward(model, sequences, profile)
                packed, windows = _packed_hidden(model, sequences, profile)
                _compare_output_layer(model, sequences, hidden, profile, path)
                _compare_packing(model, sequences, packed, reference, profile, path)
            _check_windows(model.causal, windows, path)
            if profile.autocast_dtype is not None:
                _compare_half_precision(model, sequences, reference, profile, path)
    except SpurlineError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) fails on the start-up probe: "
            f"{type(error).__name__}: {error}\nIt needs a decoder that takes position_ids and passes **kwargs to its "
            "attention. Choose a standard decoder-only model."
        ) from error


def _own_forward(
    model: StreamModel, sequences: list[Tensor], profile: DeviceProfile
) -> tuple[list[Tensor], list[Tensor]]:
    """Per sequence: full logits of the model with its own attention, and the decoder's last hidden states."""
    logits, hidden = [], []
    with _own_attention(model.causal), _decoder_output(model) as seen:
        for sequence in sequences:
            output = model.causal(input_ids=sequence.to(profile.device).unsqueeze(0), use_cache=False)
            logits.append(output.logits[0])
            hidden.append(seen.pop())
    return logits, hidden


def _packed_hidden(
    model: StreamModel, sequences: list[Tensor], profile: DeviceProfile
) -> tuple[Tensor, list[int | None]]:
    """Hidden states [T, H] of all sequences as one stream, and the window of each attention call."""
    lengths = np.array(_LENGTHS, dtype=np.int64)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    plan = plan_segments(lengths, profile.slots_per_attention_call, profile.send)
    with observed_windows() as windows:
        hidden = model.hidden(
            profile.send(torch.cat(sequences)).unsqueeze(0), profile.send(positions).unsqueeze(0), plan
        )
    return hidden, windows


def _compare_packing(
    model: StreamModel,
    sequences: list[Tensor],
    packed: Tensor,
    reference: list[Tensor],
    profile: DeviceProfile,
    path: str,
) -> None:
    worst, index = 0.0, 0
    for number, (rows, logits) in enumerate(zip(packed.split(_LENGTHS), reference, strict=True)):
        targets = sequences[number][1:].to(profile.device)
        difference = _logprobs(model, rows[:-1], targets) - _full_logprobs(logits[:-1], targets)
        distance = float(difference.abs().max() / _spread(reference))
        if not distance <= worst:
            worst, index = distance, number
    if not worst <= _TOLERANCE:
        where = "already in the first sequence" if index == 0 else f"most in sequence {index + 1} of {len(_LENGTHS)}"
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) gives other log-probabilities when sequences are "
            f"packed than separately: {worst:.2g} standard deviations of the logits ({where}; allowed {_TOLERANCE:g}). "
            "It mixes tokens across sequences (linear attention, convolutions) or has attention that cannot be "
            "replaced. Choose a model with plain causal attention."
        )


def _compare_output_layer(
    model: StreamModel, sequences: list[Tensor], hidden: list[Tensor], profile: DeviceProfile, path: str
) -> None:
    """Logits of the model itself against the bare output layer, loud enough that every cap on them is heard."""
    states, sequence = hidden[-1], sequences[-1].to(profile.device)
    quiet = model.head(states)
    loudness = _LOUD_LOGITS / float(quiet.std().clamp_min(1e-30))
    with _own_attention(model.causal), _decoder_output(model, loudness):
        own = model.causal(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0]
    targets = sequence.roll(-1)
    difference = _logprobs(model, states * loudness, targets) - _full_logprobs(own, targets)
    distance = float(difference.abs().max() / _LOUD_LOGITS)
    if not distance <= _TOLERANCE:
        config = model.causal.config
        active = {
            name: off
            for name, off in _LOGIT_FIELDS.items()
            if getattr(config, name, off) is not None and getattr(config, name, off) != off
        }
        overrides = ", ".join(f"{name}: {'null' if off is None else off}" for name, off in active.items())
        fix = (
            f"Its config sets {', '.join(active)}. To train without, as some do, set model.config_overrides: "
            f"{{{overrides}}}; that is another model than the one that was pretrained."
            if active
            else "Choose a model whose logits are the plain product with its output embeddings."
        )
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) changes logits after its output layer, which chunked "
            f"logits leave out: logprobs differ by {distance:.2g} standard deviations of the logits "
            f"(allowed {_TOLERANCE:g}). {fix}"
        )


def _check_windows(causal: PreTrainedModel, windows: list[int | None], path: str) -> None:
    """The probe's sequences are shorter than any window, so whether the attention is told of windows is counted."""
    config = causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * len(windows)
    told = sum(window is not None for window in windows)
    other = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if other or len(windows) != len(kinds) or told != kinds.count("sliding_attention"):
        raise ModelError(
            f"model.path: {path} ({type(causal).__name__}) has {len(kinds)} layers ({', '.join(sorted(set(kinds)))}; "
            f"{kinds.count('sliding_attention')} with a window), but {len(windows)} of them use the packed attention, "
            f"{told} with a window. Choose a model whose layers are full or sliding-window attention."
        )


def _compare_half_precision(
    model: StreamModel, sequences: list[Tensor], reference: list[Tensor], profile: DeviceProfile, path: str
) -> None:
    """The half-precision attention kernel is another one; it must agree up to rounding."""
    with profile.computing():
        packed, _ = _packed_hidden(model, sequences, profile)
        differences = [
            _logprobs(model, rows[:-1], tokens[1:].to(profile.device))
            - _full_logprobs(logits[:-1], tokens[1:].to(profile.device))
            for rows, tokens, logits in zip(packed.split(_LENGTHS), sequences, reference, strict=True)
        ]
    distance = float(torch.cat(differences).abs().mean() / _spread(reference))
    if not distance <= _HALF_PRECISION_TOLERANCE:
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) gives other log-probabilities in bf16 than in fp32: "
            f"{distance:.2g} standard deviations of the logits on average (allowed {_HALF_PRECISION_TOLERANCE:g}). "
            "Set backend.precision: fp32."
        )


def _logprobs(model: StreamModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """As training computes them, in small chunks."""
    return TokenLogprobs(model.head, _CHUNK_TOKENS)(hidden, targets)[0]


def _full_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _spread(logits: list[Tensor]) -> Tensor:
    return torch.cat(logits).std().clamp_min(1e-30)


@contextmanager
def _own_attention(causal: PreTrainedModel) -> Iterator[None]:
    """The model's reference attention, which every model has and which implements all it asks for."""
    causal.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def _decoder_output(model: StreamModel, factor: float = 1.0) -> Iterator[list[Tensor]]:
    """Record the decoder's last hidden states [T, H] while the whole model runs; hand them on times `factor`."""
    seen: list[Tensor] = []

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        seen.append(output.last_hidden_state[0])
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    handle = model.decoder.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
