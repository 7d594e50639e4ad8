"""Base of the settings of backends that train Hugging Face models, and the adapters that a run trains.

Imports no torch: what looks at a model is found by name, as factories are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.plugins.registry import resolve
from spurline.protocols.backend import Backend, BackendConfig, BackendFacts
from spurline.protocols.lengths import KnowsLongest
from spurline_models.configs import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes, as `spurline plan` shows them.

    Attributes:
        kept: Bytes on the fullest device that stay from step to step, by part.
        moments: Bytes by part that come and go. Parts of one moment are there together, and moments take turns.
        host: Bytes in the memory of the fullest machine that stand for what is kept off its devices.
    """

    kept: Mapping[str, int]
    moments: tuple[Mapping[str, int], ...]
    host: int = 0

    @property
    def peak(self) -> int:
        """The bytes on the device at the fullest moment."""
        return sum(self.kept.values()) + max((sum(moment.values()) for moment in self.moments), default=0)

    @property
    def parts(self) -> dict[str, int]:
        """All parts, by name, whether they are there together or not."""
        return {**self.kept, **{name: size for moment in self.moments for name, size in moment.items()}}

    @property
    def lent(self) -> dict[str, int]:
        """The parts that stay on the device while engines have it and the weights are kept there."""
        stays = {name: self.kept[name] for name in ("weights", "reference") if name in self.kept}
        # As large as the policy but for its output layer.
        return stays | ({"critic": self.kept["weights"]} if "critic" in self.kept else {})


class ModelBackendConfig(BackendConfig):
    """A backend that trains a model of Hugging Face transformers, or adapters on it.

    Besides what a run asks, it answers what `spurline plan` asks (`spurline_planning.protocols`).
    """

    beyond: ClassVar[str] = ""
    """A sentence on what to do with a model that its settings cannot make fit."""

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
        """Settings of the adapters that are trained instead of all weights, its section `lora`; None for none."""
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
        function = "export_adapter" if adapter else "export_hf"
        return _part(f"export:{function}", "export of a model")(backend, loaded, tokenizer, path, replace=replace)

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate | None:
        """Estimate a step of so many tokens in rows of this length, on the fullest device; None if nothing is known."""
        return None

    def device_bytes(self) -> int | None:
        """Return the memory of the smallest device that it would train on here; None if that is not known."""
        return None

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of this section that need less memory, in the order in which a plan tries them.

        Each is tried on top of those before, so the cheapest in time comes first. A key names a setting, such as
        `compile`, or one of a section in this one, such as `lora.base_dtype`.
        """
        return ()


@runtime_checkable
class HasAdapters(Protocol):
    """A backend's settings with a section for adapters."""

    @property
    def adapters(self) -> LoraConfig | None: ...


def adapters_of(run: RunConfig) -> LoraConfig | None:
    """Settings of the adapters that this run trains instead of all weights; None where its backend trains none."""
    return run.backend.adapters if isinstance(run.backend, HasAdapters) else None


def _part(name: str, what: str) -> Any:
    return resolve(f"spurline_models.{name}", what)
