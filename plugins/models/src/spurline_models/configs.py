"""Settings of a model that several backends share. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.section import OnResume, Section
from spurline.errors import ConfigError, Problem
from spurline.plugins.registry import resolve

if TYPE_CHECKING:
    from spurline.config.run_config import ModelConfig

Kernels = Literal["auto", "liger", "none"]
Fp8 = bool | Literal["emulated"]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft; needs `pip install spurline-models[lora]`."""

    retired: ClassVar[tuple[str, ...]] = ("dora",)
    rank: int = Field(default=16, gt=0)
    """Rank of the update matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank."""
    dropout: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module names to adapt."""
    rslora: bool = False
    """Scale the update by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732), for high ranks."""
    base_dtype: Annotated[Literal["auto", "fp32", "bf16", "nf4"], OnResume.FREE] = "auto"
    """Dtype of the frozen weights. `auto` takes the dtype of their files, which changes no value. `bf16` rounds the
    weights of fp32 files, and takes half the memory. `fp32` avoids widening them in fp32 runs. `nf4` quantizes linear
    layers to 4 bits with scales that are quantized too (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), and needs `pip
    install spurline-models[qlora]`."""

    @property
    def is_quantized(self) -> bool:
        """True if the weights under the adapters are quantized, to values that no dtype of an engine can hold."""
        return self.base_dtype == "nf4"

    @property
    def merged_because(self) -> str | None:
        """The reason why engines need merged weights, as a clause; None if they can take the adapter."""
        if self.is_quantized:
            return "engines would add the adapter to weights that are not quantized as backend.lora.base_dtype does"
        return None


def adapter_notes(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """Describe the adapters of this model, as `adapters.lora.notes` does. Raises UserError."""
    return resolve("spurline_models.adapters.lora:notes", "the modules that carry adapters")(model, lora)


def no_peft() -> ConfigError:
    """Return the error for a missing library of adapters."""
    return ConfigError.at("backend.lora", "needs peft. Run `pip install 'spurline-models[lora]'`.")


def check_peft(lora: LoraConfig) -> None:
    """Raise ConfigError if a library for these adapters is missing."""
    if find_spec("peft") is None:
        raise no_peft()
    if lora.is_quantized and find_spec("bitsandbytes") is None:
        raise ConfigError.at(
            "backend.lora.base_dtype",
            f"is {lora.base_dtype}, which needs bitsandbytes. Run `pip install 'spurline-models[qlora]'`.",
        )


def check_kernels(kernels: Kernels, model: ModelConfig, device: str, precision: str) -> None:
    """Raise ConfigError if Liger's kernels are asked for and cannot be used. device: `cpu` or `cuda`."""
    if kernels == "liger":
        # A config must not import transformers, which knows the types of models.
        resolve("spurline_models.kernels:chooses_liger", "kernels of a model")(kernels, model, device, precision)


def fp8_problems(fp8: Fp8, device: str, precision: str, lora: LoraConfig | None) -> Iterable[Problem]:
    """Yield what keeps linear layers from computing in fp8. device: `cpu` or `cuda`."""
    if not fp8:
        return
    if lora is not None:
        yield Problem("fp8", "together with lora is not supported. Remove one.")
    if fp8 == "emulated":
        if precision == "fp64":
            yield Problem("fp8", "is emulated in fp32 or bf16. Set precision: bf16, or fp8: false.")
        return
    if device == "cpu":
        yield Problem(
            "fp8", "needs a GPU of Hopper's generation or newer. Set device: cuda, or fp8: emulated, which is slow."
        )
    if precision != "bf16":
        yield Problem("fp8", f"needs precision: bf16, and precision is {precision}.")


def check_torchao(fp8: Fp8) -> None:
    """Raise ConfigError if the library for fp8 is missing."""
    if fp8 and find_spec("torchao") is None:
        raise ConfigError.at("backend.fp8", "needs torchao. Run `pip install 'spurline-models[fp8]'`.")
