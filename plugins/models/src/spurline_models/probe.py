"""Check at start-up that training computes what the model itself computes, and refuse the model otherwise.

A few random sequences are computed twice. One pass computes as training does: several sequences in one stream, replaced
attention, chunked logits and fused kernels. The other is the model's own forward pass. A model that mixes tokens of a
stream outside of attention reads padded rows instead. If results differ even then, the model is refused. The probe
changes no weights, gradients, modes or generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from spurline.errors import ModelError, SpurlineError
from spurline_models.architecture import decoder_layers, vocabulary_size
from spurline_models.device_profile import DeviceProfile
from spurline_models.experts.router_replay import ExpertRouting
from spurline_models.experts.routers import find_routers, why_not_replayed
from spurline_models.kernels import kernels_of, own_code
from spurline_models.streams.segment_attention import observed_windows
from spurline_models.streams.stream_model import StreamModel, evaluation_mode, excited, other_attention
from spurline_models.streams.token_logprobs import OutputLogits, TokenLogprobs
from spurline_models.streams.token_stream import TokenStream, plan_segments

_OWN_ATTENTION = "eager"
"""The reference attention. Every model has it, with all features."""
_LENGTHS = (4, 6, 6, 11)
CHUNK_TOKENS = 8
"""Positions in a chunk of logits. The probe's sequences fill several chunks."""
TOLERANCE = 3e-4
"""Allowed difference of logprobs, in standard deviations of the logits. fp32 kernels differ by 1e-6 to 1e-5."""
_SMOOTH_TOLERANCE, _HALF_PRECISION_TOLERANCE, _LARGEST_TOLERANCE = 0.03, 0.1, 1.0
"""Bounds of the allowed difference in half precision, the first for models without routers. Right models of 2 layers
reach 0.02, and 0.07 with routers. If attention sees other segments, it is 0.6 or more (1.3 from 16 layers on)."""
_ROUNDINGS = 2.0
"""Allowed multiple of what `rounded_layers` changes. Right models of 16 or 64 layers reach 1.0, or 1.7 with routers.
MLPs that add 0.3 of the previous token differ 2.6 to 15 times as much as allowed, or 0.5 to 10 times with routers."""
_LOUD_LOGITS = 50.0
"""Standard deviation of logits in the test of the output layer. A softcap hardly changes small logits."""

_COUNTS_IN_ROW = ("attn_temperature_tuning",)
"""Config fields that make a model depend on positions in a row. Such models always read rows, since the short
sequences of the probe would not show this."""
_FULL_ATTENTION = ("full_attention", "attention", "hybrid")
_LIMITED_ATTENTION = ("sliding_attention", "chunked_attention")
"""Kinds of layers in which a token sees only some of the earlier tokens."""
_PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError)


def probe_sequences(vocabulary: int, lengths: Sequence[int] = _LENGTHS) -> list[Tensor]:
    """Return int64 sequences of random tokens with these lengths, the same in every process."""
    generator = torch.Generator().manual_seed(20_240_229)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def probe_stream(sequences: Sequence[Tensor], profile: DeviceProfile) -> TokenStream:
    """Return one stream of sequences, from short to long, with loss on all tokens except the first of each."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.cat([*sequences])
    positions = torch.cat([torch.arange(length) for length in lengths])
    targets = torch.nonzero(positions).flatten()
    send = profile.send
    return TokenStream(
        input_ids=send(tokens).unsqueeze(0),
        position_ids=send(positions).unsqueeze(0),
        plan=plan_segments(np.array(lengths, np.int64), profile.slots_per_attention_call, send),
        source=send(targets - 1),
        host_source=targets.numpy() - 1,
        targets=send(tokens[targets]),
        weights=send(torch.ones(len(targets))),
        segment_index=send(torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))[targets]),
        columns={},
        batch_index=targets,
    )


@contextmanager
def rounded_layers(layers: Iterable[nn.Module]) -> Iterator[None]:
    """While the context is open, move each value that a layer returns to a neighbour in bf16, at random up or down.

    Results then change about as much as by the rounding of other kernels in half precision. This grows with the number
    of layers, and in some models each layer enlarges the difference.
    """
    generator = torch.Generator().manual_seed(0)

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        signs = torch.randint(2, hidden.shape, generator=generator).mul_(2).sub_(1)
        # The factor needs fp32: next to 1, bf16 has no values that are this close.
        hidden.mul_(1 + signs.to(hidden.device) * 2**-8)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(hook))
        yield


def distance(
    found: Tensor, expected: Tensor, unit: Tensor, rounded: Tensor | None, *, jumps: bool, window: int = 4
) -> tuple[float, float]:
    """Return the difference of logprobs in a unit, such as their standard deviation, and the allowed difference.

    In full precision, it is the largest difference. In half precision, `rounded` are the expected logprobs with
    `rounded_layers`. Then it is the largest mean over `window` tokens in a row, since those after a border differ most.
    `jumps` says that rounding may change a single token much: a router chooses another expert.
    """
    parts = [(other - expected).abs() / unit.clamp_min(1e-30) for other in (found, rounded) if other is not None]
    if rounded is None:
        return float(parts[0].max()), TOLERANCE
    worst, rounding = (float(part.unfold(0, window, 1).mean(-1).max()) for part in parts)
    least = _HALF_PRECISION_TOLERANCE if jumps else _SMOOTH_TOLERANCE
    return worst, min(max(least, _ROUNDINGS * rounding), _LARGEST_TOLERANCE)


def check_exactness(model: StreamModel, profile: DeviceProfile, path: str, *, in_half_precision: bool = False) -> None:
    """Choose how the model reads streams, and check that it then computes what its own forward pass computes.

    `in_half_precision` says that the model's own forward pass computes in bf16. `path` is used in errors.

    Raises:
        ModelError: If results differ. The error names the difference and what to do.
    """
    try:
        with evaluation_mode(model.causal):
            probe = _Probe(model, profile, in_half_precision)
            probe.choose_reading()
            found = probe.first_difference()
    except SpurlineError:
        raise
    except _PROBE_ERRORS as error:
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) fails in the start-up probe: "
            f"{type(error).__name__}: {error}\nTraining needs a decoder that takes position_ids and passes **kwargs to "
            "its attention. Choose a standard decoder-only model. If weights are held in bf16, set "
            "backend.lora.base_dtype: fp32 or backend.weights: fp32."
        ) from error
    if found is not None:
        raise ModelError(f"model.path: {path} ({type(model.causal).__name__}) {found}")


def choose_reading(model: StreamModel, profile: DeviceProfile, *, in_half_precision: bool = False) -> None:
    """Choose how the model reads streams, without refusing any model."""
    with evaluation_mode(model.causal):
        _Probe(model, profile, in_half_precision).choose_reading()


def check_routers(model: StreamModel, profile: DeviceProfile, path: str, *, replays: bool, balances: bool) -> None:
    """Raise ModelError if the run replays or balances routers, and the routers of this model do not allow it.

    Each router runs on a few tokens. `why_not_replayed` describes the conditions of replay.
    """
    if not (replays or balances):
        return
    routing = model.routing
    # Sequences of equal length are read in one pass, in the order of the stream.
    stream = probe_stream(probe_sequences(vocabulary_size(model.causal), (6, 6, 6)), profile)
    name = f"model.path: {path} ({type(model.causal).__name__})"
    with evaluation_mode(model.causal), profile.computing():

        def hidden(experts: Tensor | None = None) -> Tensor:
            return model.hidden(stream.input_ids, stream.position_ids, stream.plan, experts)

        if replays:
            found = _first_not_replayed(routing, hidden)
            if found is not None:
                raise ModelError(f"{name} {found}, so source.router_replay must be false for this model.")
        if balances:
            with model.balancing(stream) as balance:
                hidden()
            if balance.unknown:
                raise ModelError(
                    f"{name} has a router of class {balance.unknown}, which chooses experts neither by its logits nor "
                    "by their softmax or sigmoid, so its balance loss is not known. Remove model.router_aux_loss."
                )


def _first_not_replayed(routing: ExpertRouting, hidden: Callable[..., Tensor]) -> str | None:
    """Return why recorded experts do not reach all routers, or None if they do."""
    reasons: list[str | None] = []

    def try_out(router: nn.Module, args: Any, kwargs: Any) -> None:
        reason = why_not_replayed(router, args, kwargs)
        reasons.append(reason and f"has a {type(router).__name__}, which {reason}")

    with ExitStack() as hooks:
        for router in routing.routers.values():
            hooks.enter_context(router.register_forward_pre_hook(try_out, with_kwargs=True))
        hidden()
    if len(reasons) < len(routing.routers):
        return f"has {len(routing.routers)} routers, and uses {len(reasons)} of them"
    if any(reasons):
        return next(filter(None, reasons))
    with routing.noting() as noted:
        hidden()
    if noted.keys() != routing.routers.keys() or len({experts.shape[1] for experts in noted.values()}) > 1:
        return "has routers that choose different numbers of experts for a token"
    others = torch.from_numpy(routing.as_array(noted))
    others = torch.where(others >= 0, (others + 1) % routing.num_experts, others).to(next(iter(noted.values())).device)
    with routing.noting() as replayed:
        hidden(others)
    lost = [layer for layer, experts in replayed.items() if not torch.equal(experts, others[:, layer].long())]
    if lost:
        kind = type(routing.routers[lost[0]]).__name__
        return f"does not pass recorded experts on to the {kind} of layer {lost[0]}, which chooses its own"
    return None


class _Probe:
    """Comparisons on a few random sequences. Each comparison returns a description of the problem, or None."""

    def __init__(self, model: StreamModel, profile: DeviceProfile, in_half_precision: bool) -> None:
        self._model = model
        self._profile = profile
        self._in_half_precision = in_half_precision
        self._sequences = probe_sequences(vocabulary_size(model.causal))
        self._targets = torch.cat([sequence[1:] for sequence in self._sequences]).to(profile.device)
        with self._computing_exactly(), own_code(model.causal):
            self._logits, self._states = self._own_forward()
        self._expected, self._unit = self._own_logprobs(self._logits), torch.cat(self._logits).std()

    @contextmanager
    def _computing_exactly(self) -> Iterator[None]:
        # The rounding of fp8 would make small differences large.
        with self._profile.computing_exactly(), own_code(self._model.causal, ("fp8",)):
            yield

    def choose_reading(self) -> None:
        """Let the model read streams if this gives the same results as each sequence alone, or else padded rows."""
        config = self._model.causal.config.get_text_config()
        if not any(getattr(config, name, False) for name in _COUNTS_IN_ROW):
            # Some models raise an error if their kernels cannot keep segments apart.
            with suppress(SpurlineError, *_PROBE_ERRORS), self._computing_exactly():
                self._model.read_as("stream")
                packed, windows = self._packed_hidden()
                if not (self._compare_packing(packed) or self._check_windows(windows)):
                    return
        self._model.read_as("rows")

    def first_difference(self) -> str | None:
        with self._computing_exactly():
            packed, windows = self._packed_hidden()
            found = self._compare_output_layer(self._states[-1]) or self._compare_packing(packed)
        found = found or self._check_windows(windows)
        if found is None and self._profile.autocast_dtype is not None:
            found = self._compare_half_precision()
        return found

    def _own_forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Compute each sequence with the model's own attention. Return logits and last hidden states."""
        logits, hidden = [], []
        with other_attention(self._model.causal, _OWN_ATTENTION), _decoder_output(self._model) as seen:
            for sequence in self._sequences:
                output = self._model.causal(input_ids=sequence.to(self._profile.device).unsqueeze(0), use_cache=False)
                hidden.append(seen.pop())
                logits.append(self._logits_of(hidden[-1]) if self._model.reads_tokens else output.logits[0])
        return logits, hidden

    def _logits_of(self, hidden: Tensor) -> Tensor:
        """Return products of hidden states and the embedding. The single output of a score head hides differences."""
        embedding: Any = self._model.causal.get_input_embeddings()
        return hidden @ embedding.weight.to(hidden.dtype).T

    def _packed_hidden(self) -> tuple[Tensor, list[int | None]]:
        """Return hidden states [T, H] of all sequences as one stream, and the window of each attention call."""
        stream = probe_stream(self._sequences, self._profile)
        with observed_windows() as windows:
            return self._model.hidden(stream.input_ids, stream.position_ids, stream.plan), windows

    def _own_logprobs(self, logits: Sequence[Tensor]) -> Tensor:
        return _logprobs(torch.cat([own[:-1] for own in logits]), self._targets)

    @cached_property
    def _rounded(self) -> Tensor:
        """The model's own logprobs with `rounded_layers`."""
        causal = self._model.causal
        with self._computing_exactly(), own_code(causal), rounded_layers(decoder_layers(causal)):
            return self._own_logprobs(self._own_forward()[0])

    def _scored(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the logprobs that training computes from hidden states."""
        if self._model.reads_tokens:
            return _logprobs(self._logits_of(hidden), targets)
        fused = self._model.score.fused
        return TokenLogprobs(OutputLogits(self._model.causal), CHUNK_TOKENS, fused)(hidden, targets)[0]

    def _scored_packed(self, packed: Tensor) -> Tensor:
        return self._scored(torch.cat([hidden[:-1] for hidden in packed.split(_LENGTHS)]), self._targets)

    def _compare_packing(self, packed: Tensor) -> str | None:
        found = self._scored_packed(packed)
        rounded, jumps = self._rounded if self._in_half_precision else None, bool(find_routers(self._model.causal))
        worst, allowed = distance(found, self._expected, self._unit, rounded, jumps=jumps)
        if worst <= allowed:
            return None
        parts = (found - self._expected).abs().split([length - 1 for length in _LENGTHS])
        # A NaN counts as the largest.
        index = int(np.argmax([float(part.max()) for part in parts]))
        if kernels_of(self._model.causal):
            return (
                f"gives other log-probabilities with fused kernels than by its own code: {worst:.2g} standard "
                f"deviations of the logits (allowed {allowed:.2g}). Set backend.kernels: none."
            )
        where = "already in the first sequence" if index == 0 else f"most in sequence {index + 1} of {len(_LENGTHS)}"
        return (
            f"gives other log-probabilities in a batch than for each sequence alone: {worst:.2g} standard deviations "
            f"of the logits ({where}; allowed {allowed:.2g}), both packed and with a row for each sequence. "
            "It probably looks at later tokens. Choose a model with causal attention."
        )

    def _compare_output_layer(self, states: Tensor) -> str | None:
        """Compare the model's own logits for the last sequence with the logits that training computes from `states`.

        The states are multiplied by a large number, since a softcap only changes large logits.
        """
        causal, sequence = self._model.causal, self._sequences[-1].to(self._profile.device)
        if self._model.reads_tokens:
            return self._compare_score(states, sequence)
        loudness = _LOUD_LOGITS / float(self._model.head(states).std().clamp_min(1e-30))
        with own_code(causal), other_attention(causal, _OWN_ATTENTION), _decoder_output(self._model, loudness):
            own = causal(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0]
        targets = sequence.roll(-1)
        difference = self._scored(states * loudness, targets) - _logprobs(own, targets)
        largest = float(difference.abs().max() / _LOUD_LOGITS)
        allowed = _HALF_PRECISION_TOLERANCE if self._in_half_precision else TOLERANCE
        if largest <= allowed:
            return None
        return (
            "has an output layer that, by itself, gives other logits than the model's forward pass: logprobs differ by "
            f"{largest:.2g} standard deviations of the logits (allowed {allowed:g}). Choose a model whose "
            "logits depend on hidden states alone. If you use a GPU, try backend.kernels: none."
        )

    def _compare_score(self, states: Tensor, sequence: Tensor) -> str | None:
        """Compare the model's own score of a sequence with the score of its last token that is not padding."""
        causal = self._model.causal
        with own_code(causal), other_attention(causal, _OWN_ATTENTION), excited(self._model.head):
            own = causal(input_ids=sequence.unsqueeze(0), use_cache=False).logits.flatten()
            scores = self._model.head(states)
        padding = causal.config.get_text_config().pad_token_id
        last = int(torch.nonzero(sequence != padding)[-1]) if padding is not None else -1
        if float((own - scores[last]).abs().max() / scores.std()) <= TOLERANCE:
            return None
        return "gives other scores by its own forward pass than by its score head. Choose another architecture."

    def _check_windows(self, windows: list[int | None]) -> str | None:
        """Check that attention gets its windows as an argument. Sequences are too short to show a window's effect."""
        if self._model.reading == "rows":
            return None
        config = self._model.causal.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kind = "sliding_attention" if self._has_window(config) else "full_attention"
            kinds = [kind] * len(windows)
        limited = [kind in _LIMITED_ATTENTION for kind in kinds if kind in _FULL_ATTENTION + _LIMITED_ATTENTION]
        told = sum(window is not None for window in windows)
        if len(windows) == len(limited) and told == sum(limited):
            return None
        return (
            f"has {len(kinds)} layers ({', '.join(sorted(set(kinds)))}; {sum(limited)} with a window), but "
            f"{len(windows)} of them use the packed attention, {told} with a window. Choose a model whose attention "
            "is full or has sliding windows."
        )

    def _has_window(self, config: PretrainedConfig) -> bool:
        """Return whether the config's `sliding_window` limits attention. In some models the field has no effect.

        It has an effect if a module has this attribute, or if a window of one token changes results.
        """
        window = getattr(config, "sliding_window", None)
        if not window or any(getattr(module, "sliding_window", None) for module in self._model.causal.modules()):
            return bool(window)
        config.sliding_window = 1
        try:
            with self._computing_exactly(), own_code(self._model.causal):
                logits, _ = self._own_forward()
        finally:
            config.sliding_window = window
        return not all(torch.equal(one, other) for one, other in zip(logits, self._logits, strict=True))

    def _compare_half_precision(self) -> str | None:
        """Compare training in half precision, which uses another attention kernel, with the model's own results."""
        with self._profile.computing():
            found = self._scored_packed(self._packed_hidden()[0])
        mean, allowed = distance(found, self._expected, self._unit, self._rounded, jumps=True, window=len(found))
        if mean <= allowed:
            return None
        return (
            f"gives other log-probabilities in bf16 than in fp32: {mean:.2g} standard deviations of the logits on "
            f"average (allowed {allowed:.2g}). Set backend.precision: fp32."
        )


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@contextmanager
def _decoder_output(model: StreamModel, factor: float = 1.0) -> Iterator[list[Tensor]]:
    """Record the decoder's last hidden states [T, H] while the whole model runs, and multiply them by `factor`."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        seen.append(output.last_hidden_state[0])
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    with model.decoder.register_forward_hook(hook):
        yield seen
