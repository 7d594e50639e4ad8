"""Base of the settings of backends that train Hugging Face models, and the adapters that a run trains.

Imports no torch: what looks at a model is found by name, as factories are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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


class ModelBackendConfig(BackendConfig):
    """A backend that trains a model of Hugging Face transformers, or adapters on it.

    Besides what a run asks, it answers what `spurline plan` does: the estimates below are bytes, and a backend that has
    none gives no part.
    """

    beyond: ClassVar[str] = ""
    """What to do with a model that its settings cannot make fit, as a sentence."""
    update_parts: ClassVar[frozenset[str]] = frozenset()
    """Names of the parts of `estimate_memory` that are given back when an update ends, before anything generates."""

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

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes on the fullest device by part, for a step of so many tokens in rows of this length; {} if unknown."""
        return {}

    def estimate_generation(self, run: RunConfig) -> dict[str, int]:
        """Bytes on the fullest device by part that `evaluation.generate` takes beside what stays between updates."""
        return {}

    def estimate_yielded(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes by part that stay on the fullest device while engines have it and weights are kept.

        Arguments, and names of the parts, as in `estimate_memory`.
        """
        parts = self.estimate_memory(run, row_length, tokens)
        kept = {name: parts[name] for name in ("weights", "reference") if name in parts}
        # As large as the policy but for its output layer.
        return kept | ({"critic": parts["weights"]} if "critic" in parts else {})

    def estimate_host_memory(self, run: RunConfig) -> int:
        """Bytes in the memory of the fullest machine that stand for parts kept off its devices."""
        return 0

    def estimate_offloaded_activations(self, run: RunConfig, row_length: int, tokens: int) -> int:
        """Bytes of activations in the memory of the fullest machine, to come to `estimate_host_memory`."""
        return 0

    def device_bytes(self) -> int | None:
        """Memory of the smallest device that it would train on here; None where that is not known."""
        return None

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Changes of this section that need less memory, each tried on top of those before: the cheapest in time first.

        A key is that of a setting, such as `compile`, or of one in a section of this one, such as `lora.base_dtype`.
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
