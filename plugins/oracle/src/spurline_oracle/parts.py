"""Let gradients flow through a part of a module's computation, while its values stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Replace = Callable[[nn.Module, tuple[Any, ...], Any], Tensor]
"""A function that gets a module, its arguments and its output, and returns another output."""


@contextmanager
def each_forward(modules: Sequence[nn.Module], replace: Replace) -> Iterator[None]:
    """Replace the outputs of modules in the context. The calls of modules that `replace` makes stay as they are."""
    inside = False

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        nonlocal inside
        if inside:
            return None
        inside = True
        try:
            return replace(module, inputs, output)
        finally:
            inside = False

    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def without_weight_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
    """Return the output of a module, from which no gradient flows to its own parameters."""
    return functional_call(module, {name: value.detach() for name, value in module.named_parameters()}, inputs)


def without_input_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
    """Return the output of a module, from which no gradient flows to its input."""
    return module(inputs[0].detach(), *inputs[1:])


def is_part(count: int, index: Tensor, part: int, parts: int) -> Tensor:
    """Return whether each index of `count` things belongs to one of `parts` equal parts."""
    size = -(-count // parts)
    return (index >= part * size) & (index < (part + 1) * size)


def embedding_name(causal: Any) -> str | None:
    """Return the name of the weight of the input embeddings, or None without one."""
    weight = getattr(causal.get_input_embeddings(), "weight", None)
    return next((name for name, value in causal.named_parameters() if value is weight), None)
