"""Protocols of component settings that only `spurline plan` and `spurline doctor` use.

A config may implement the methods without importing this package. If it does not, the plan says less.
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
    """Settings of a backend that estimate its memory. `ModelBackendConfig` implements all these methods."""

    beyond: ClassVar[str]
    """A sentence with advice if a model does not fit with any settings of this backend; may be empty."""

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate | None:
        """Estimate the memory of a step on the fullest device. Return None if nothing is known.

        `row_length` is the number of tokens of the longest row, `tokens` the number of tokens of the step.
        """
        ...

    def device_bytes(self) -> int | None:
        """Return the memory of the smallest device of this machine that trains, or None if it is not known."""
        ...

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of the backend's settings that save memory. The changes that cost the least time come first.

        A plan adds one change after another. A key names a setting, such as `compile`, or a setting of an inner
        section, such as `lora.base_dtype`. The settings must stay valid after each change.
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

        Args:
            run: The run to plan.
            row_length: Tokens of the longest row.
            tokens: Tokens of a step.
            usable_bytes: Memory of a device that the run may use.
        """
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """Settings of a component that `spurline doctor` can try out without a model."""

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        """Start everything that a run starts except the model, and yield the findings.

        A failure is a Finding with a fix. It is not raised.
        """
        ...


@runtime_checkable
class PlansRollouts(Protocol):
    """Settings of a source with rollouts that know the largest size of a step.

    All methods take the run, the number of tokens of its longest prompt, and the number of tokens that the model can
    see, or None without a limit. They assume that every response has the largest allowed length.
    """

    def largest_update(self, run: RunConfig, prompt_tokens: int, context: int | None) -> LargestUpdate:
        """Return the largest size of one optimizer step."""
        ...

    def generation_memory(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Mapping[str, int]:
        """Return what generation needs on the trainer's device, in bytes by part. {} if engines use other devices."""
        ...

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        """Return the engine that takes turns with the trainer on the trainer's devices, if there is one."""
        ...

    def generation_notes(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Sequence[str]:
        """Return sentences for the user about where the run generates."""
        ...


def planned(source: SourceConfig) -> PlansRollouts | None:
    """Return this source, or the source that it decorates, whichever has these methods; None if neither has them."""
    if isinstance(source, PlansRollouts):
        return source
    return None if source.decorates is None else planned(getattr(source, source.decorates))
