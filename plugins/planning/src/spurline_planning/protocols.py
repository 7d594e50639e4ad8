"""Protocols for the config sections of components. Only `spurline plan` and `spurline doctor` use them.

A section can implement a protocol without importing this package. If it does not, the plan has fewer lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from spurline.config.run_config import RunConfig
from spurline.protocols.source import SourceConfig
from spurline_models.backend_config import ColocatedEngine, LargestUpdate, MemoryEstimate
from spurline_models.machine import Finding


@runtime_checkable
class PlansMemory(Protocol):
    """Settings of a backend that can estimate its memory. `ModelBackendConfig` implements this protocol."""

    beyond: ClassVar[str]
    """Advice to print after the settings that save memory. It may be empty."""

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate | None:
        """Estimate the memory of a step on the fullest device. Return None if there is no estimate.

        `row_length` is the number of tokens of the longest row. `tokens` is the number of tokens of the step.
        """
        ...

    def device_bytes(self) -> int | None:
        """Return the memory in bytes of the smallest device that trains on this machine, or None if unknown."""
        ...

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of the backend's settings that save memory. Changes that cost less time come first.

        A plan names the first change of each setting. A key names a setting, such as `compile`, or a setting of a
        subsection, such as `lora.base_dtype`.
        """
        ...


@runtime_checkable
class HoldsMemory(Protocol):
    """Settings of any component, such as a source or a reward, that has a model of its own beside the trained one."""

    def held_memory(self, run: RunConfig) -> Mapping[str, int]:
        """Return the bytes of each part that stays on the trainer's device during the whole run, by its words.

        For example, `{"weights of the judge": 1 << 30}`. Return {} if other devices hold the model.
        """
        ...


@runtime_checkable
class PlansLayouts(Protocol):
    """Settings of a backend that divides a model among ranks."""

    def describe_layout(self, run: RunConfig) -> Sequence[str]:
        """Return sentences about the backend's ranks: their number, machines and groups."""
        ...

    def suggested_layouts(self, run: RunConfig, row_length: int, tokens: int, usable_bytes: int) -> Iterable[str]:
        """Return lines about other ways to divide the model among the ranks, if there are any.

        `usable_bytes` is the memory of a device that the run may use. See `PlansMemory` for the other arguments.
        """
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """Settings of a component that `spurline doctor` can try out without a model."""

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        """Start everything that a run starts except the model, and yield the findings.

        Yield a failure as a Finding with a fix. Do not raise it.
        """
        ...


@runtime_checkable
class PlansRollouts(Protocol):
    """Settings of a source with rollouts that can compute the largest possible size of a step.

    All methods take the run, the number of tokens of its longest prompt, and the largest number of tokens in the
    model's context (None if there is no limit). They assume that every response has the largest allowed length.
    """

    def largest_update(self, run: RunConfig, prompt_tokens: int, context: int | None) -> LargestUpdate:
        """Return the largest size of one optimizer step."""
        ...

    def generation_memory(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Mapping[str, int]:
        """Return the bytes of each part of generation on the trainer's device, or {} if other devices generate."""
        ...

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        """Return the engine that takes turns with the trainer on the trainer's devices, or None."""
        ...

    def generation_notes(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Sequence[str]:
        """Return sentences for the user about the engines and devices that generate."""
        ...


def planned(source: SourceConfig) -> PlansRollouts | None:
    """Return the first `PlansRollouts` among this source and the sources that it decorates, or None."""
    if isinstance(source, PlansRollouts):
        return source
    return None if source.decorates is None else planned(getattr(source, source.decorates))
