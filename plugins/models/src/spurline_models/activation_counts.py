"""Count what a model's backward pass keeps of each token, without weights and without computing anything.

The model reads a few tokens as fake tensors, and what autograd saves meanwhile is counted: twice, with more tokens the
second time, so that what does not grow with them, such as the copies of weights that autocast rounds, falls out. Of
layers of one kind two are read, the others count as the second does. So it holds for any architecture, with adapters
and frozen parts, except those whose shapes depend on values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from spurline_models.architecture import LOADING_ERRORS, decoder_layers, find_decoder

_TOKENS = (64, 192)
_COUNTED_ATTENTION = "spurline_counted"


@dataclass(frozen=True)
class TokenActivations:
    """Bytes that are kept of one token until its backward pass.

    layers: of each layer of the decoder. outside: of the rest, up to the last hidden states. layer_input: of what a
    layer reads.
    """

    layers: tuple[int, ...]
    outside: int
    layer_input: int

    @property
    def recomputed(self) -> int:
        """Of the largest layer, while it is recomputed."""
        return max(self.layers, default=0)

    def kept(self, *, checkpointing: bool, offloading: bool = False) -> int:
        """On the device between forward and backward. checkpointing: whether of layers only inputs are kept.
        offloading: whether those of all but two layers are on the host meanwhile.
        """
        layers = [self.layer_input] * len(self.layers) if checkpointing else sorted(self.layers)
        return self.outside + sum(layers[-2:] if offloading else layers)

    def offloaded(self, *, checkpointing: bool) -> int:
        """On the host meanwhile."""
        return self.kept(checkpointing=checkpointing) - self.kept(checkpointing=checkpointing, offloading=True)


def count_activations(causal: PreTrainedModel, *, autocast: bool) -> TokenActivations | None:
    """causal: on the device `meta`, as it is trained; it computes in the dtype of its weights, or with autocast in
    bf16. None where shapes depend on values. Its attention is replaced.
    """
    try:
        with _told_by_results(), FakeTensorMode(allow_non_fake_inputs=True), _CountedExperts():
            # Buffers that are made with values, such as rotary frequencies, become fake as well.
            _make_fake(causal)
            causal.set_attn_implementation(_COUNTED_ATTENTION)
            causal.train()
            few, many = (_count(causal, tokens, autocast) for tokens in _TOKENS)
    except (*LOADING_ERRORS, NotImplementedError):
        return None
    more = _TOKENS[1] - _TOKENS[0]
    layers = tuple((large - small) // more for small, large in zip(few.layers, many.layers, strict=True))
    return TokenActivations(layers, (many.outside - few.outside) // more, (many.layer_input - few.layer_input) // more)


@contextmanager
def _told_by_results() -> Iterator[None]:
    """A context in which torch does not print the traceback of what fails: it is answered with None."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _make_fake(causal: PreTrainedModel) -> None:
    """All but the layers that are not read: making tensors fake takes most of the time."""
    layers = decoder_layers(causal)
    passed = [
        layer for layer, (number, read) in zip(layers, enumerate(_stands_for(layers)), strict=True) if read != number
    ]
    left = {id(module) for layer in passed for module in layer.modules()}
    for module in causal.modules():
        if id(module) not in left:
            module.to_empty(device="cpu", recurse=False)


def _stands_for(layers: list[nn.Module]) -> list[int]:
    """By layer, which one is read in its place: itself, if it is one of the first two of its kind."""
    of_kind: dict[Hashable, list[int]] = {}
    found: list[int] = []
    for number, layer in enumerate(layers):
        known = of_kind.setdefault(_kind(layer), [])
        if len(known) < 2:
            known.append(number)
        found.append(known[-1])
    return found


def _count(causal: PreTrainedModel, tokens: int, autocast: bool) -> TokenActivations:
    """Of so many tokens together."""
    layers = decoder_layers(causal)
    parameters = {value.untyped_storage()._cdata for value in causal.parameters()}
    # Tensors are held, so that no storage takes the place of another one.
    kept: dict[int, Tensor] = {}
    counts, inside = [0] * (len(layers) + 1), [len(layers)]
    inputs: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in kept:
            kept[storage._cdata] = tensor
            counts[inside[0]] += storage.nbytes()
        return tensor

    def enter(number: int, states: Tensor) -> None:
        inside[0] = number
        inputs.append(states.nbytes)

    def leave() -> None:
        inside[0] = len(layers)

    ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens).unsqueeze(0)
    with (
        _reading_two_of_a_kind(layers, enter, leave) as stands_for,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        find_decoder(causal)(input_ids=ids, position_ids=positions, use_cache=False)
    return TokenActivations(tuple(counts[other] for other in stands_for), counts[-1], max(inputs, default=0))


@contextmanager
def _reading_two_of_a_kind(
    layers: list[nn.Module], enter: Callable[[int, Tensor], None], leave: Callable[[], None]
) -> Iterator[list[int]]:
    """A context in which layers that are like two before them hand on what they read. Gives the layer that each counts
    as. The first of a kind may keep less than others, where nothing before it is trained."""
    stands_for = _stands_for(layers)
    outputs: dict[int, Any] = {}
    before = [layer.forward for layer in layers]

    def reading(number: int) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            enter(number, hidden_states)
            outputs[number] = before[number](hidden_states, *args, **options)
            leave()
            return outputs[number]

        return forward

    def passing(number: int) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            like = outputs[number]
            return (hidden_states, *like[1:]) if isinstance(like, tuple) else hidden_states

        return forward

    try:
        for number, (layer, read) in enumerate(zip(layers, stands_for, strict=True)):
            layer.forward = reading(number) if read == number else passing(read)
        yield stands_for
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.forward = forward


def _kind(layer: nn.Module) -> Hashable:
    """Equal for layers that keep equally much."""
    shapes = ((name, value.shape, value.requires_grad) for name, value in layer.named_parameters())
    return (type(layer), getattr(layer, "layer_type", None), getattr(layer, "attention_type", None), *shapes)


class _CountedExperts(TorchFunctionMode):
    """Products of experts in any dtype: fake tensors have those of bf16 alone, and devices more."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return _KeepsItsFactors.apply(*args[:2])
        return func(*args, **(kwargs or {}))


class _KeepsItsFactors(torch.autograd.Function):
    """Rows [S, K] times the matrix of their group of [G, K, N]; keeps both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])


class _KeepsWhatKernelsKeep(torch.autograd.Function):
    """Attention of a kernel that keeps its inputs and its output, and no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = query.new_empty(batch, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output


def _counted_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D], as `segment_attention`, with nothing in it."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (part.to(torch.bfloat16) for part in (query, key, value))
    return _KeepsWhatKernelsKeep.apply(query, key, value), None  # type: ignore[return-value]


AttentionInterface.register(_COUNTED_ATTENTION, _counted_attention)
