"""Make layers compute with fused kernels or in fp8, according to the backend's settings `kernels` and `fp8`.

Liger-Kernel (arXiv:2410.10989) has fused kernels for norms, gated activations and rotary positions. Liger itself
changes the classes and functions of transformers for the whole process. Here only the modules of one model get Liger's
functions. Liger's fused linear cross-entropy is not used, since it rounds the weight of each token, computes no
entropy, and waits for the device.

torchao computes linear layers in fp8. Weights, gradients and optimizer keep their dtypes. In the matrix products that
compute the output and the gradient of the input, both factors are rounded to e4m3, with a scale for each row or column.
Gradients of weights are computed without fp8 (recipe `rowwise_with_gw_hp`). So no token's rounding depends on others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, ModelError, listing
from spurline_models.architecture import load_model_config, num_experts, output_layer
from spurline_models.configs import Fp8, Kernels
from spurline_models.device_profile import DeviceProfile

_RECIPE = "rowwise_with_gw_hp"
_MULTIPLE = 16
"""Both sides of a matrix in fp8 must be divisible by this."""
_NEEDS = (9, 0)
"""The lowest compute capability for which torchao has kernels with a scale for each row."""

_NAMES = {"RMSNorm": "norms", "LayerNorm": "norms", "MLP": "gated activations", "Attention": "rotary positions"}

_ROTATE = "apply_rotary_pos_emb"
"""The name of the function of rotary positions in the Python modules of transformers."""

_OWN = "_spurline_own_forward"
"""Attribute of a changed module: (the setting that changed the module, its original forward function)."""


def change_computing(
    causal: PreTrainedModel, model: ModelConfig, kernels: Kernels, fp8: Fp8, profile: DeviceProfile
) -> None:
    """Make layers compute with these kernels and in fp8. Call this before adding adapters and sharding parameters.

    Raises:
        ConfigError: If the kernels cannot be used on this device, or a library is missing.
        ModelError: If the kernels do not fit the model.
    """
    precision = "fp64" if profile.weight_dtype.itemsize == 8 else "fp32"
    if chooses_liger(kernels, model, profile.device.type, precision):
        _use_kernels(causal)
    if kernels != "none" and not getattr(causal.config.get_text_config(), "attention_dropout", None):
        # FlashAttention 3 has no dropout.
        profile.use_fastest_attention()
    if fp8 is True:
        capability = cast(tuple[int, int], torch.cuda.get_device_capability(profile.device))
        if capability < _NEEDS:
            raise ConfigError.at(
                "backend.fp8",
                f"needs a GPU of Hopper's generation or newer (compute capability {_NEEDS[0]}.{_NEEDS[1]}), and "
                f"{profile.name} has {capability[0]}.{capability[1]}. Set fp8: false.",
            )
    if fp8:
        _use_fp8(causal, emulated=fp8 == "emulated")


@contextmanager
def own_code(causal: nn.Module, settings: Collection[str] = ("kernels", "fp8")) -> Iterator[None]:
    """Use the original forward functions of modules that these settings changed, in the context."""
    changed = [module for module in causal.modules() if vars(module).get(_OWN, ("",))[0] in settings]
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


def _use_fp8(causal: PreTrainedModel, *, emulated: bool) -> None:
    """Make the decoder's linear layers compute in fp8, except routers and layers with sizes that do not fit."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore

    config = Float8LinearConfig.from_recipe_name(_RECIPE)
    head = output_layer(causal)
    experts = num_experts(causal.config.get_text_config())

    def fits(module: nn.Module, name: str) -> bool:
        return (
            type(module) is nn.Linear
            and module is not head
            and module.out_features != experts
            and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
        )

    names = [name for name, module in causal.named_modules() if fits(module, name)]
    convert: Any = convert_to_float8_training
    convert(causal, config=replace(config, emulate=emulated), module_filter_fn=fits)
    for name in names:
        module = causal.get_submodule(name)
        vars(module)[_OWN] = ("fp8", nn.Linear.forward)
        module.register_forward_pre_hook(_as_under_autocast)


def _as_under_autocast(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Round the input as autocast does. torchao itself respects autocast only on GPUs."""
    (hidden,) = inputs
    kind = hidden.device.type
    return (hidden.to(torch.get_autocast_dtype(kind)),) if torch.is_autocast_enabled(kind) else None


def _use_kernels(causal: PreTrainedModel) -> None:
    """Make modules of this model compute with Liger's functions. Raises ModelError if the functions do not fit."""
    from liger_kernel.transformers import monkey_patch, rope  # pyright: ignore

    before = {id(module): dict(vars(module)) for module in causal.modules()}
    try:
        with _undone(causal) as namespaces:
            monkey_patch._apply_liger_kernel_to_instance(causal, cross_entropy=False, fused_linear_cross_entropy=False)
            # Liger knows which families rotate in the standard way. The others keep their function.
            rotating = {space["__name__"] for space in namespaces if space.get(_ROTATE) is rope.liger_rotary_pos_emb}
    except (TypeError, AttributeError, ImportError, AssertionError, NotImplementedError, ValueError) as error:
        raise ModelError(
            f"backend.kernels: Liger's kernels do not fit {type(causal).__name__} of the installed transformers "
            f"({type(error).__name__}: {error}). Set backend.kernels: none."
        ) from error
    for module in causal.modules():
        own, given = before[id(module)], vars(module).get("forward")
        forward = type(module).forward
        # Modules that store all experts in one tensor keep their own code, because expert parallelism and routing
        # replay depend on it. No other parameter has three dimensions.
        stores_experts = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        fused = None if given is None or stores_experts else given.__func__
        rotates = isinstance(forward, FunctionType) and _ROTATE in forward.__code__.co_names
        if rotates and forward.__module__ in rotating:
            fused = _rotating(forward)
        if fused is None or "forward" in own:
            vars(module).clear()
            vars(module).update(own)
        else:
            vars(module)[_OWN] = ("kernels", forward)
            vars(module)["forward"] = MethodType(fused, module)


@cache
def _rotating(forward: FunctionType) -> FunctionType:
    """Return a copy of an attention's forward function that rotates queries and keys by Liger's kernel.

    All modules of a class share the copy, and it has a code object of its own. torch.compile finds compiled code by
    the code object, and keeps a part of it in the function's globals, so functions must not share only one of them.
    """
    from liger_kernel.ops import LigerRopeFunction  # pyright: ignore

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        # Liger's own function chooses among libraries in each call, which torch.compile cannot trace.
        return LigerRopeFunction.apply(query, key, cos, sin, None, unsqueeze_dim)

    code = forward.__code__.replace(co_name=f"{forward.__name__}_with_liger")
    used = {**forward.__globals__, _ROTATE: rotate}
    copy = FunctionType(code, used, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def kernels_of(causal: nn.Module) -> str:
    """Name what fused kernels compute in this model, such as `norms`. Returns "" if they compute nothing."""
    kinds = [type(module).__name__ for module in causal.modules() if vars(module).get(_OWN, ("",))[0] == "kernels"]
    named = {word for kind in kinds for part, word in _NAMES.items() if kind.removeprefix("FSDP").endswith(part)}
    return ", ".join(sorted(named or set(kinds)))


def chooses_liger(kernels: Kernels, model: ModelConfig, device: str, precision: str) -> bool:
    """Return whether the model uses Liger's kernels with this setting, on `cpu` or `cuda`.

    Raises:
        ConfigError: If `kernels` is `liger`, and Liger's kernels cannot be used.
        ModelError: If the model's config cannot be read.
    """
    if kernels == "none" or (kernels == "auto" and device != "cuda"):
        return False
    reason = _why_not(model, device, precision)
    if kernels == "liger" and reason is not None:
        raise ConfigError.at("backend.kernels", f"is liger, but {reason}, or set kernels: auto.")
    return reason is None


def _why_not(model: ModelConfig, device: str, precision: str) -> str | None:
    """Return why Liger's kernels cannot be used and what to set, without the final period, or None if they can."""
    # Tests run Triton programs on the CPU, in Triton's interpreter.
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
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
def _undone(causal: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    """Yield the namespaces of Python modules that define this model's classes. At the end, undo changes of them."""
    files = {type(module).__module__ for module in causal.modules()}
    namespaces = [vars(sys.modules[name]) for name in files if name in sys.modules]
    owners = [value for space in namespaces for value in space.values() if isinstance(value, type)]
    methods = {owner: vars(owner).get("forward") for owner in owners if issubclass(owner, nn.Module)}
    before = [dict(space) for space in namespaces]
    try:
        yield namespaces
    finally:
        for space, old in zip(namespaces, before, strict=True):
            for name in space.keys() - old.keys():
                del space[name]
            space.update(old)
        for owner, forward in methods.items():
            if forward is not None and vars(owner).get("forward") is not forward:
                owner.forward = forward
