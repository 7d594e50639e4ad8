"""Protocols of what `spurline plan` and `spurline doctor` ask of the settings of components, beside what a run asks.

The configs have the methods and need not know of this package. A plan leaves out what a config does not answer.
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
    """Settings of a backend that know what it takes of its devices. `ModelBackendConfig` has defaults of all this."""

    beyond: ClassVar[str]
    """A sentence on what to do with a model that its settings cannot make fit; may be empty."""

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate | None:
        """Estimate a step of so many tokens in rows of this length, on the fullest device; None if nothing is known."""
        ...

    def device_bytes(self) -> int | None:
        """Return the memory of the smallest device that it would train on here; None if that is not known."""
        ...

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Return changes of this section that need less memory, in the order in which a plan tries them.

        Each is tried on top of those before, so the cheapest in time comes first. A key names a setting, such as
        `compile`, or one of a section in this one, such as `lora.base_dtype`. With each the section stays valid.
        """
        ...


@runtime_checkable
class PlansLayouts(Protocol):
    """Settings of a backend that divides a model among ranks."""

    def describe_layout(self, run: RunConfig) -> Sequence[str]:
        """Return sentences on its ranks: how many, where, and in which groups."""
        ...

    def suggested_layouts(self, run: RunConfig, row_length: int, tokens: int, usable_bytes: int) -> Iterable[str]:
        """Return lines on how its ranks could be divided otherwise; none if there is one way.

        Args:
            run: The run to plan.
            row_length: Tokens of the longest row.
            tokens: Tokens of a step.
            usable_bytes: Memory of a device that a plan counts on.
        """
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """Settings of a component that `spurline doctor` can try out without a model."""

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        """Start what a run would start, all but the model, and yield what is found on the way.

        A failure is a Finding with its fix, and not an error.
        """
        ...


@runtime_checkable
class PlansRollouts(Protocol):
    """Settings of a source whose steps can be sized before a prompt is answered.

    All methods take the run, the tokens of its longest prompt and the tokens that the model can see, which are None
    without a limit. They assume that every response is as long as it may get.
    """

    def largest_update(self, run: RunConfig, prompt_tokens: int, context: int | None) -> LargestUpdate:
        """Return the most that one optimizer step may hold."""
        ...

    def generation_memory(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Mapping[str, int]:
        """Return the bytes by part that generating takes on the trainer's device; {} where it generates elsewhere."""
        ...

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        """Return the engine that has the trainer's devices by turns with it, if there is one."""
        ...

    def generation_notes(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Sequence[str]:
        """Return sentences about where it generates, for people."""
        ...


def planned(source: SourceConfig) -> PlansRollouts | None:
    """Return the source that plans can ask about rollouts: this one or one that it decorates; None if neither."""
    if isinstance(source, PlansRollouts):
        return source
    return None if source.decorates is None else planned(getattr(source, source.decorates))
