"""Settings that several backends share: adapters, kernels and fp8. Imports no torch."""

from __future__ import annotations

import logging
import math
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.section import OnResume, Section
from spurline.errors import ConfigError

Kernels = Literal["auto", "liger", "none"]
Fp8 = bool | Literal["emulated"]
Checkpointing = bool | Annotated[float, Field(gt=0, lt=1)]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft. They need `pip install spurline-models[lora]`."""

    retired: ClassVar[tuple[str, ...]] = ("dora",)
    rank: int = Field(default=16, gt=0)
    """Rank of the update matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is multiplied by alpha / rank."""
    dropout: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the adapters' inputs."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get adapters."""
    rslora: bool = False
    """Multiply the update by alpha / sqrt(rank) instead, for high ranks (Kalajdzievski 2023, arXiv:2312.03732)."""
    base_dtype: Annotated[Literal["auto", "fp32", "bf16", "nf4"], OnResume.FREE] = "auto"
    """Dtype of the frozen weights. `auto` is the dtype of the model's files, so no value changes. `bf16` needs half the
    memory of `fp32`, and rounds weights of fp32 files. `fp32` avoids conversions in fp32 runs. `nf4` quantizes linear
    layers to 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), and needs `pip install spurline-models[qlora]`."""

    @property
    def is_quantized(self) -> bool:
        """True if the weights under the adapters are quantized. No dtype of an engine can represent their values."""
        return self.base_dtype == "nf4"

    @property
    def merged_because(self) -> str | None:
        """A clause that says why engines need merged weights, or None if engines can use the adapter itself."""
        reason = "engines would add the adapter to weights without the quantization of backend.lora.base_dtype"
        return reason if self.is_quantized else None


def no_peft() -> ConfigError:
    """Return the error to raise if peft is not installed."""
    return ConfigError.at("backend.lora", "needs peft. Run `pip install 'spurline-models[lora]'`.")


def quiet_bitsandbytes() -> None:
    """Silence a warning about an unused CPU kernel of bitsandbytes. Call this before importing bitsandbytes or PEFT."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def num_checkpointed(share: float, layers: int) -> int:
    """Return how many of the lowest layers are checkpointed, for a setting of the type `Checkpointing`."""
    return math.ceil(share * layers)


def missing_kernels(kernels: Kernels, device: str) -> list[str]:
    """Return a note if training would be faster with Liger's kernels, which are not installed."""
    if kernels != "auto" or device != "cuda" or find_spec("liger_kernel") is not None:
        return []
    return ["kernels: PyTorch's. Fused kernels are faster and need less memory: pip install 'spurline-models[liger]'"]


def check_libraries(lora: LoraConfig | None, fp8: Fp8) -> None:
    """Raise ConfigError if a library that these settings need is not installed."""
    if lora is not None and find_spec("peft") is None:
        raise no_peft()
    if lora is not None and lora.is_quantized and find_spec("bitsandbytes") is None:
        raise ConfigError.at(
            "backend.lora.base_dtype",
            f"is {lora.base_dtype}, which needs bitsandbytes. Run `pip install 'spurline-models[qlora]'`.",
        )
    if fp8 and find_spec("torchao") is None:
        raise ConfigError.at("backend.fp8", "needs torchao. Run `pip install 'spurline-models[fp8]'`.")
