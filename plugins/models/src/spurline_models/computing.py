"""Replace the computation of layers by kernels, as the backend's settings `kernels` and `fp8` say."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline_models.configs import Fp8, Kernels
from spurline_models.device_profile import DeviceProfile
from spurline_models.fp8 import FP8, check_device, use_fp8
from spurline_models.kernels import KERNELS, chooses_liger, use_kernels
from spurline_models.other_forwards import giving_back


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
            check_device(profile)
        use_fp8(causal, emulated=fp8 == "emulated")


def own_code(causal: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model computes without these kernels."""
    return giving_back(causal, (KERNELS, FP8))


def in_full_precision(causal: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which no layer computes in fp8."""
    return giving_back(causal, (FP8,))
