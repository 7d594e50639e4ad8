"""Base of the settings of backends that train Hugging Face models. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.plugins.registry import resolve
from spurline.protocols.backend import Backend, BackendConfig, BackendFacts
from spurline.protocols.dataset import KnowsLongest
from spurline_models.configs import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes, as `spurline plan` shows them.

    Attributes:
        kept: Bytes on the fullest device by part, for parts that stay from step to step.
        moments: Bytes by part that come and go. All parts of a moment exist together, and moments take turns.
        host: Bytes in the memory of the fullest machine for parts that are kept off its devices.
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
        """The parts that stay on the device while engines use it, if weights are kept there."""
        stays = {name: self.kept[name] for name in ("weights", "reference") if name in self.kept}
        # A critic is as large as the policy, except for its output layer.
        return stays | ({"critic": self.kept["weights"]} if "critic" in self.kept else {})


@dataclass(frozen=True)
class LargestUpdate:
    """The largest optimizer step: the tokens of its longest row, and of all its rows."""

    row_length: int
    tokens: int


@dataclass(frozen=True)
class ColocatedEngine:
    """An engine that takes turns with the backend on its devices.

    Attributes:
        memory: Returns the bytes of `weights` and `cache` on the fullest device of this size; {} if they are not known.
        offloads_trainer: Whether the trainer's weights leave the device while the engine generates.
        takes_less: Sentences that name the settings by which the engine takes less of the device.
        bucket_bytes: Bytes of the weights that are sent to the engine at a time.
    """

    memory: Callable[[int], Mapping[Literal["weights", "cache"], int]]
    offloads_trainer: bool
    takes_less: str
    bucket_bytes: int


class ModelBackendConfig(BackendConfig):
    """Settings of a backend that trains a model of Hugging Face transformers, or adapters on it.

    Some methods answer questions of `spurline plan` (`spurline_planning.protocols`).
    """

    beyond: ClassVar[str] = ""
    """A sentence that says what to do if no setting makes a model fit."""

    @property
    def facts(self) -> BackendFacts:
        lora = self.adapters
        return replace(
            super().facts,
            trains_adapters=lora is not None,
            dropout_rates={} if lora is None else {"lora.dropout": lora.dropout},
        )

    @property
    def adapters(self) -> LoraConfig | None:
        """Settings of the adapters, if adapters are trained instead of all weights."""
        return None

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
        """Estimate a step of `tokens` tokens in rows of this length, on the fullest device, if that is known."""
        return None

    def device_bytes(self) -> int | None:
        """Return the memory of the smallest device that this machine would train on, if that is known."""
        return None

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of this section that need less memory, in the order in which a plan tries them.

        A plan keeps earlier changes when it tries the next. A key names a setting, such as `lora.base_dtype`.
        """
        return ()


@runtime_checkable
class HasAdapters(Protocol):
    """Settings of a backend that may train adapters."""

    @property
    def adapters(self) -> LoraConfig | None: ...


def adapters_of(run: RunConfig) -> LoraConfig | None:
    """Return the settings of the run's adapters, if adapters are trained instead of all weights."""
    return run.backend.adapters if isinstance(run.backend, HasAdapters) else None


def _part(name: str, what: str) -> Any:
    return resolve(f"spurline_models.{name}", what)
