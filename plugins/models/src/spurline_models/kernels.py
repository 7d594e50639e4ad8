"""Let Liger-Kernel (arXiv:2410.10989) compute a model's norms and gated activations.

Liger replaces them by type of model, in the classes of transformers, for the whole process. Here the same functions are
given to the modules of one model, and the classes stay as they are. Liger's rotary positions are not used, since they
replace a function of the whole process. Its fused linear cross-entropy is not used either: it rounds the weight of each
token, computes no entropy, and waits for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, ModelError, listing
from spurline_models.architecture import load_model_config
from spurline_models.device_profile import runs_triton

KERNELS = "kernels"
"""The giver of these functions, for `give_forward`."""

_NAMES = {"RMSNorm": "norms", "LayerNorm": "norms", "MLP": "gated activations"}


_OWN = "_spurline_own_forward"
"""Attribute of a module with another forward: who gave it, and the module's own."""


def use_kernels(causal: PreTrainedModel) -> None:
    """Let Liger compute this model, whose type it must know, before adapters are added. Raises ModelError."""
    from liger_kernel.transformers import monkey_patch  # pyright: ignore

    before = {id(module): dict(vars(module)) for module in causal.modules()}
    try:
        with _undone(causal):
            monkey_patch._apply_liger_kernel_to_instance(
                causal, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
            )
    except (TypeError, AttributeError, ImportError, AssertionError, NotImplementedError, ValueError) as error:
        raise ModelError(
            f"backend.kernels: Liger's kernels do not fit {type(causal).__name__} of the installed transformers "
            f"({type(error).__name__}: {error}). Set backend.kernels: none."
        ) from error
    for module in causal.modules():
        own, given = before[id(module)], vars(module).get("forward")
        # Stored experts keep their code, which other modules divide and replay.
        if given is None or own.get("forward") is not None or _stores_experts(module):
            _restore(module, own)
        else:
            give_forward(module, given.__func__, KERNELS)


def kernels_of(causal: nn.Module) -> str:
    """Describe what fused kernels compute in this model; empty if nothing."""
    kinds = [type(module).__name__ for module in changed_by(causal, KERNELS)]
    named = {word for kind in kinds for part, word in _NAMES.items() if kind.removeprefix("FSDP").endswith(part)}
    return ", ".join(sorted(named or set(kinds)))


def chooses_liger(kernels: Literal["auto", "liger", "none"], model: ModelConfig, device: str, precision: str) -> bool:
    """Return whether the model computes by Liger's kernels with this setting on `cpu` or `cuda`.

    Raises:
        ConfigError: If they are asked for and cannot be used.
        ModelError: If the model's config cannot be read.
    """
    if kernels == "none" or (kernels == "auto" and device != "cuda"):
        return False
    reason = _why_not(model, device, precision)
    if kernels == "liger" and reason is not None:
        raise ConfigError.at("backend.kernels", f"is liger, but {reason}, or set kernels: auto.")
    return reason is None


def _why_not(model: ModelConfig, device: str, precision: str) -> str | None:
    """Return why Liger's kernels cannot be used, and what to do, as the beginning of a sentence; None if they can."""
    if not runs_triton(device):
        return "Liger's kernels are Triton programs, which run on a GPU. Set device: cuda"
    if precision == "fp64":
        return "Liger's kernels compute in fp32. Set precision: fp32 or bf16"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed. Run `pip install 'spurline-models[liger]'`"
    from liger_kernel.transformers import monkey_patch  # pyright: ignore

    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = load_model_config(model).model_type
    if kind in known:
        return None
    return f"Liger does not know the model type '{kind}'. It knows {listing(known)}. Set kernels: none"


@contextmanager
def _undone(causal: PreTrainedModel) -> Iterator[None]:
    """Restore the modules (files) of transformers that define this model when the context ends."""
    files = {type(module).__module__ for module in causal.modules()}
    namespaces = [vars(sys.modules[name]) for name in files if name in sys.modules]
    owners = [value for space in namespaces for value in space.values() if isinstance(value, type)]
    methods = {owner: vars(owner).get("forward") for owner in owners if issubclass(owner, nn.Module)}
    before = [dict(space) for space in namespaces]
    try:
        yield
    finally:
        for space, old in zip(namespaces, before, strict=True):
            for name in space.keys() - old.keys():
                del space[name]
            space.update(old)
        for owner, forward in methods.items():
            if forward is not None and vars(owner).get("forward") is not forward:
                owner.forward = forward


def _restore(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    own = vars(module)
    for name in own.keys() - attributes.keys():
        del own[name]
    own.update(attributes)


def _stores_experts(module: nn.Module) -> bool:
    """Return whether a module stores the experts of a layer as one tensor: nothing else has three dimensions."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def give_forward(module: nn.Module, forward: Callable[..., Any], by: str) -> None:
    """Let the module compute by this function. `by` is the giver's name, for `giving_back`."""
    note_own_forward(module, type(module).forward, by)
    vars(module)["forward"] = MethodType(forward, module)


def note_own_forward(module: nn.Module, own: Callable[..., Any], by: str) -> None:
    """Note the own forward function of a module whose class computes otherwise."""
    vars(module)[_OWN] = (by, own)


def changed_by(causal: nn.Module, by: str) -> list[nn.Module]:
    """Return the modules that were given a forward function by `by`."""
    return [module for module in causal.modules() if vars(module).get(_OWN, ("",))[0] == by]


@contextmanager
def giving_back(causal: nn.Module, by: Collection[str]) -> Iterator[None]:
    """Let modules that were given a function by one of `by` compute by their own in the context."""
    changed = [module for one in by for module in changed_by(causal, one)]
    given = [vars(module).get("forward") for module in changed]
    for module in changed:
        vars(module)["forward"] = MethodType(vars(module)[_OWN][1], module)
    try:
        yield
    finally:
        for module, forward in zip(changed, given, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
