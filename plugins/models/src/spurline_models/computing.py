"""Replace the computation of layers by fused kernels or by fp8, as the backend's settings `kernels` and `fp8` say.

Linear layers in fp8 are computed by torchao, with weights, gradients and optimizer as they were. Output and gradient of
the input are products of values rounded to e4m3 with a scale for each token and each output. The gradient of weights is
computed in full precision (recipe `rowwise_with_gw_hp`). So no token's rounding depends on the other tokens of its
batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError
from spurline_models.architecture import num_experts
from spurline_models.configs import Fp8, Kernels
from spurline_models.device_profile import DeviceProfile
from spurline_models.kernels import KERNELS, chooses_liger, giving_back, note_own_forward, use_kernels

_FP8 = "fp8"
"""The giver of these functions, for `note_own_forward`."""
_RECIPE = "rowwise_with_gw_hp"
_MULTIPLE = 16
"""Both sides of a matrix must be divisible by this."""
_NEEDS = (9, 0)
"""Compute capability from which on there are kernels for scales by row."""


def change_computing(
    causal: PreTrainedModel, model: ModelConfig, kernels: Kernels, fp8: Fp8, profile: DeviceProfile
) -> None:
    """Let layers use these kernels. Call it before adapters are added and parameters are sharded.

    Raises:
        ConfigError: If the kernels cannot be used on this device, or a library is missing.
        ModelError: If the kernels do not fit the model.
    """
    precision = "fp64" if profile.weight_dtype.itemsize == 8 else "fp32"
    if chooses_liger(kernels, model, profile.device.type, precision):
        use_kernels(causal)
    if fp8:
        if fp8 is True:
            _check_device(profile)
        _use_fp8(causal, emulated=fp8 == "emulated")


def own_code(causal: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model computes without these kernels."""
    return giving_back(causal, (KERNELS, _FP8))


def in_full_precision(causal: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which no layer computes in fp8."""
    return giving_back(causal, (_FP8,))


def _check_device(profile: DeviceProfile) -> None:
    capability = cast(tuple[int, int], torch.cuda.get_device_capability(profile.device))
    if capability < _NEEDS:
        raise ConfigError.at(
            "backend.fp8",
            f"needs a GPU of Hopper's generation or newer (compute capability {_NEEDS[0]}.{_NEEDS[1]}), and "
            f"{profile.name} has {capability[0]}.{capability[1]}. Set fp8: false.",
        )


def _use_fp8(causal: PreTrainedModel, *, emulated: bool) -> None:
    """Let the decoder's linear layers compute in fp8, except routers and layers whose sizes do not fit.

    `emulated` rounds alike on every device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore

    config = Float8LinearConfig.from_recipe_name(_RECIPE)
    head = causal.get_output_embeddings()
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
        note_own_forward(module, nn.Linear.forward, _FP8)
        module.register_forward_pre_hook(_as_under_autocast)


def _as_under_autocast(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Round the input as autocast does: torchao asks for the autocast of GPUs only."""
    (hidden,) = inputs
    kind = hidden.device.type
    return (hidden.to(torch.get_autocast_dtype(kind)),) if torch.is_autocast_enabled(kind) else None
