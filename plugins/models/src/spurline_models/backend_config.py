"""Base classes of the settings of backends that train Hugging Face models. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem, listing
from spurline.plugins.registry import resolve
from spurline.protocols.backend import Backend, BackendConfig, BackendFacts
from spurline.protocols.dataset import KnowsLongest
from spurline_models.configs import Checkpointing, Fp8, Kernels, LoraConfig, check_libraries, missing_kernels
from spurline_models.machine import num_gpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_OF_TRAINING = ("optimizer", "masters", "gradients", "checkpoint copy", "critic")
"""Kept parts that are not the weights of a model."""

_DIVISION = (
    "collator",
    *(f"backend.{name}" for name in ("ranks", "rows_per_microbatch", "max_tokens_per_microbatch")),
    "backend.reshard_after_forward",
)
"""Key paths of the settings that only divide a batch or its weights, which changes no bit of reproducible sums."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that training needs, in bytes, as `spurline plan` shows it.

    Attributes:
        kept: Bytes of each part that stays in memory from step to step, on the device that needs the most.
        moments: For each phase of a step, the bytes of the parts that exist in this phase only.
        host: Bytes of host memory, on the machine that needs the most.
    """

    kept: Mapping[str, int]
    moments: tuple[Mapping[str, int], ...]
    host: int = 0

    @property
    def peak(self) -> int:
        return sum(self.kept.values()) + max((sum(moment.values()) for moment in self.moments), default=0)

    @property
    def parts(self) -> dict[str, int]:
        return {**self.kept, **{name: size for moment in self.moments for name, size in moment.items()}}

    @property
    def lent(self) -> dict[str, int]:
        """The parts that stay on the device while an engine uses it, if the trainer's weights are not offloaded."""
        stays = {name: size for name, size in self.kept.items() if name not in _OF_TRAINING}
        # The part `critic` includes the critic's optimizer. The critic's weights are as large as the policy's.
        return stays | ({"critic": self.kept["weights"]} if "critic" in self.kept else {})


@dataclass(frozen=True)
class LargestUpdate:
    """The largest optimizer step of a run: the tokens of its longest row, and the tokens of all its rows."""

    row_length: int
    tokens: int


@dataclass(frozen=True)
class ColocatedEngine:
    """An engine on the devices of the backend. Engine and backend take turns.

    Attributes:
        memory: A function that gets the memory of a device in bytes. It returns the bytes of the engine's `weights`
            and `cache` on the device that needs the most, or {} if they are not known.
        offloads_trainer: Whether the trainer's weights leave the device while the engine generates.
        takes_less: Sentences that name settings which reduce the engine's memory.
        bucket_bytes: Bytes of the weights that are sent to the engine at once.
    """

    memory: Callable[[int], Mapping[Literal["weights", "cache"], int]]
    offloads_trainer: bool
    takes_less: str
    bucket_bytes: int


class ModelBackendConfig(BackendConfig):
    """Settings of a backend that trains a model of Hugging Face transformers, or adapters on it.

    `spurline plan` calls some of the methods (`spurline_planning.protocols`).
    """

    beyond: ClassVar[str] = ""
    """A sentence that tells the user what to do if no setting makes a model fit into memory."""

    device: Annotated[Literal["auto", "cpu", "cuda"], OnResume.TO_ROUNDING] = "auto"
    """`auto` is `cuda` if this machine has GPUs, else `cpu`."""
    precision: Annotated[Literal["auto", "fp32", "bf16"], OnResume.BY_NAME] = "auto"
    """`bf16` computes in bf16, and keeps fp32 values of trained weights and sums of gradients. `auto` is bf16 on GPUs,
    fp32 on CPU, and a resumed run keeps what it was."""
    logits_chunk_tokens: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Number of positions whose logits exist at the same time, in each rank. null is 4,096. If Triton kernels compute
    logprobs (see `kernels`), which need a third to a sixth of the memory for a logit, null is 32,768."""

    @property
    def on(self) -> Literal["cpu", "cuda"]:
        """The device, with `auto` replaced by the device of this machine."""
        if self.device == "auto":
            return "cuda" if num_gpus() else "cpu"
        return self.device

    @property
    def computes_in(self) -> Literal["fp32", "bf16", "fp64"]:
        """The precision, with `auto` replaced by the usual precision of the device."""
        if self.precision == "auto":
            return "bf16" if self.on == "cuda" else "fp32"
        return self.precision

    @property
    def device_words(self) -> str:
        """Words about device and precision, such as `cuda, bf16 (auto)`."""
        return f"{self.on}, {self.computes_in}{' (auto)' if self.precision == 'auto' else ''}"

    @property
    def fuses_logprobs(self) -> bool:
        """True if Triton kernels compute logprobs, and replace logits by their gradients."""
        return False

    @property
    def chunk_tokens(self) -> int:
        """The value of `logits_chunk_tokens`, with null replaced."""
        return self.logits_chunk_tokens or (32_768 if self.fuses_logprobs else 4096)

    def choices(self, run: RunConfig) -> Mapping[str, Any]:
        return {"precision": self.computes_in} if self.precision == "auto" else {}

    @property
    def facts(self) -> BackendFacts:
        lora = self.adapters
        return replace(
            super().facts,
            computes_in=self.computes_in,
            device=f"on {self.device_words}",
            trains_adapters=lora is not None,
            dropout_rates={} if lora is None else {"lora.dropout": lora.dropout},
        )

    @property
    def adapters(self) -> LoraConfig | None:
        """Settings of the adapters, or None if the run trains weights instead."""
        return None

    @property
    def is_reproducible(self) -> bool:
        """True if results do not depend on packing, micro-batches and the number of data-parallel ranks."""
        return False

    def check_trainable(self, run: RunConfig) -> None:
        _part("trainable:check_trainable", "check of the model")(run)

    def check_lengths(
        self, loaded: LoadedConfig, source: KnowsLongest, evaluations: Sequence[KnowsLongest]
    ) -> Sequence[str]:
        return _part("lengths:check_lengths", "check of lengths")(loaded, source, evaluations)

    def export(
        self,
        backend: Backend,
        loaded: LoadedConfig,
        tokenizer: PreTrainedTokenizerBase,
        path: Path,
        *,
        replace: bool,
        adapter: bool = False,
    ) -> Path:
        export = _part("export:export_model", "export of a model")
        return export(backend, loaded, tokenizer, path, replace=replace, adapter=adapter)

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate | None:
        """Estimate the memory of a step of `tokens` tokens in rows of `row_length`. Returns None if it is unknown."""
        return None

    def device_bytes(self) -> int | None:
        """Return the memory of the smallest device that this machine would train on, or None if it is not known."""
        return None

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of these settings that save memory. Keys are names of settings, such as `lora.base_dtype`.

        Changes that cost less time come first. `spurline plan` names the first change of each setting.
        """
        return ()


class TransformersBackendConfig(ModelBackendConfig):
    """Settings of a backend whose model computes with the code of Hugging Face transformers."""

    activation_checkpointing: Annotated[Checkpointing, OnResume.TO_ROUNDING] = False
    """Recompute activations in the backward pass. This needs less memory, and about a third more time. A number between
    0 and 1 does this in a share of the decoder's layers, rounded up."""
    offload_activations: Annotated[bool, OnResume.FREE] = False
    """Keep the inputs of the decoder's layers in host memory until the backward pass. This is meant for GPUs, and needs
    `activation_checkpointing: true`."""
    compile: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Run each decoder layer through torch.compile."""
    kernels: Annotated[Kernels, OnResume.TO_ROUNDING] = "auto"
    """Kernels of norms, gated activations and rotary positions. `liger` uses the fused kernels of Liger-Kernel. `auto`
    uses them on a GPU if Liger-Kernel is installed and supports the model. With both, attention uses FlashAttention 3
    on GPUs of Hopper's generation if it is installed, and Triton kernels of Spurline compute logprobs on a GPU. `none`
    uses PyTorch."""
    fp8: Annotated[Fp8, OnResume.BY_NAME] = False
    """Compute linear layers approximately in fp8, on GPUs of Hopper's generation or newer. `emulated` rounds in the
    same way on every device, and is slow."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    sums: Annotated[Literal["fast", "reproducible"], OnResume.TO_ROUNDING] = "fast"
    """`reproducible` gives a run the same bits for any number of data-parallel ranks, any micro-batches and packing.
    Each sequence is then a micro-batch of its own, and gradients are added up exactly, with 16 more bytes for each
    trained value."""

    @property
    def is_reproducible(self) -> bool:
        return self.sums == "reproducible"

    def free_after(self, before: Mapping[str, Any]) -> Collection[str]:
        # On GPUs, equal bits were never measured.
        is_exact = self.is_reproducible and before.get("sums") == self.sums and self.on == "cpu"
        return _DIVISION if is_exact else ()

    @property
    def adapters(self) -> LoraConfig | None:
        return self.lora

    @property
    def fuses_logprobs(self) -> bool:
        # PyTorch for GPUs comes with Triton.
        return self.on == "cuda" and self.kernels != "none" and self.computes_in != "fp64"

    def computing_problems(self, device: str, precision: str) -> Iterable[Problem]:
        """Yield the problems of these settings with this device (`cpu` or `cuda`) and precision."""
        if self.compile and self.offload_activations:
            yield Problem("offload_activations", "together with compile is not supported. Turn one of them off.")
        if self.offload_activations and self.activation_checkpointing is not True:
            yield Problem(
                "offload_activations", "moves the inputs of checkpointed layers. Set activation_checkpointing: true."
            )
        if self.fp8 and self.lora is not None:
            yield Problem("fp8", "together with lora is not supported. Remove one.")
        if self.fp8 == "emulated" and precision == "fp64":
            yield Problem(
                "fp8", "is emulated, which needs precision: fp32 or bf16. Set precision: bf16, or fp8: false."
            )
        if self.fp8 is True and device == "cpu":
            yield Problem(
                "fp8", "needs a GPU of Hopper's generation or newer. Set device: cuda, or fp8: emulated, which is slow."
            )
        if self.fp8 is True and precision != "bf16":
            yield Problem("fp8", f"needs precision: bf16, and precision is {precision}.")

    def reproducibility_problems(
        self, run: RunConfig, device: str, precision: str, num_threads: int | None
    ) -> Iterable[Problem]:
        """Yield the settings that `sums: reproducible` does not support."""
        if not self.is_reproducible:
            return
        optimizers = [run.optimizer, *([] if run.trained_critic is None else [run.trained_critic.optimizer])]
        others = {optimizer.name for optimizer in optimizers if not optimizer.is_elementwise}
        refused = {
            f"optimizer {listing(others)}, whose steps read several values at once": bool(others),
            "compile": self.compile,
            "fp8": bool(self.fp8),
            "lora.dropout": self.lora is not None and self.lora.dropout > 0,
            "model.router_aux_loss": run.model.router_aux_loss is not None,
            "precision: fp64": precision == "fp64",
            "precision: bf16 on a CPU": precision == "bf16" and device == "cpu",
        }
        for setting in (name for name, is_set in refused.items() if is_set):
            yield Problem("sums", f"is reproducible, which does not support {setting}. Change it, or set sums: fast.")
        if device == "cpu" and num_threads is None:
            yield Problem(
                "num_threads",
                "is needed with sums: reproducible, because the results of matrix products on a CPU depend on it.",
            )

    def check_computing(self, run: RunConfig, device: str, precision: str) -> None:
        """Raise ConfigError if a library is missing, or if the model cannot be computed with these settings."""
        check_libraries(self.lora, self.fp8)
        if self.is_reproducible:
            _part("trainable:check_reproducible", "check of a model")(run.model)
        if self.kernels == "liger":
            _part("kernels:chooses_liger", "kernels of a model")(self.kernels, run.model, device, precision)

    def notes(self, run: RunConfig) -> Sequence[str]:
        adapters = [] if self.lora is None else _part("adapters.lora:notes", "list of adapters")(run.model, self.lora)
        return [*adapters, *missing_kernels(self.kernels, self.on)]


@runtime_checkable
class HasAdapters(Protocol):
    """Settings of a backend that may train adapters."""

    @property
    def adapters(self) -> LoraConfig | None: ...


def adapters_of(run: RunConfig) -> LoraConfig | None:
    """Return the settings of the run's adapters, or None if the run trains weights instead."""
    return run.backend.adapters if isinstance(run.backend, HasAdapters) else None


def _part(name: str, what: str) -> Any:
    return resolve(f"spurline_models.{name}", what)
