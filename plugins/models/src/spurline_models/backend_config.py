"""Base of the settings of backends that train Hugging Face models. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

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
        kept: Bytes by part on the fullest device that stay from step to step.
        moments: Bytes by part that come and go. Parts of one moment are there together, and moments take turns.
        host: Bytes in the memory of the fullest machine for what is kept off its devices.
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
        """The parts that stay on the device while engines have it and the weights are kept there."""
        stays = {name: self.kept[name] for name in ("weights", "reference") if name in self.kept}
        # As large as the policy but for its output layer.
        return stays | ({"critic": self.kept["weights"]} if "critic" in self.kept else {})


@dataclass(frozen=True)
class LargestUpdate:
    """The largest optimizer step: the tokens of its longest row, and of all its rows."""

    row_length: int
    tokens: int


class ColocatedSettings(Protocol):
    """Settings of an engine that takes turns with the backend on its devices."""

    takes_less: ClassVar[str]
    """Sentences on the settings that leave a trainer more of the device."""

    @property
    def offloads_trainer(self) -> bool:
        """True if the trainer's weights leave the device while the engine generates."""
        ...

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> Mapping[Literal["weights", "cache"], int]:
        """Return the bytes that the engine needs on the fullest device; {} if they are not known.

        Args:
            run: The run that it generates for.
            responses: Responses that it writes together.
            length: Tokens of each, prompt included.
            device_bytes: Memory of the device.
        """
        ...


@dataclass(frozen=True)
class ColocatedEngine:
    """An engine that takes turns with the backend on its devices, and its work.

    Attributes:
        config: Its settings.
        responses: Responses that it writes together.
        length: Tokens of each, prompt included.
        bucket_bytes: Bytes of the weights that are on their way at a time.
    """

    config: ColocatedSettings
    responses: int
    length: int
    bucket_bytes: int


class ModelBackendConfig(BackendConfig):
    """A backend that trains a model of Hugging Face transformers, or adapters on it.

    It also answers what `spurline plan` asks (`spurline_planning.protocols`).
    """

    beyond: ClassVar[str] = ""
    """A sentence on what to do with a model that no setting makes fit."""

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
        """Settings of the adapters that are trained instead of all weights, if there are any."""
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
        """Estimate a step of so many tokens in rows of this length, on the fullest device; None if nothing is known."""
        return None

    def device_bytes(self) -> int | None:
        """Return the memory of the smallest device that it would train on here, if that is known."""
        return None

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of this section that need less memory, in the order in which a plan tries them.

        Each is tried on top of those before. A key names a setting, such as `compile` or `lora.base_dtype`.
        """
        return ()


def adapters_of(run: RunConfig) -> LoraConfig | None:
    """Return the adapters that this run trains instead of all weights, if its backend trains any."""
    return run.backend.adapters if isinstance(run.backend, ModelBackendConfig) else None


def _part(name: str, what: str) -> Any:
    return resolve(f"spurline_models.{name}", what)
