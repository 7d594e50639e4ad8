"""What a plan asks of the settings of components, and what `spurline doctor` does, beside what a run asks.

The configs have the methods, and need not know of this package: a plan says nothing about what a config has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from spurline.config.run_config import RunConfig
from spurline.protocols.source import SourceConfig
from spurline_models.finding import Finding
from spurline_models.rollout_load import ColocatedEngine, LargestUpdate


@runtime_checkable
class PlansMemory(Protocol):
    """Settings of a backend that know what it takes of its devices. `ModelBackendConfig` has defaults of all this."""

    beyond: ClassVar[str]
    """What to do with a model that its settings cannot make fit, as a sentence; may be empty."""
    update_parts: ClassVar[frozenset[str]]
    """Names of the parts of `estimate_memory` that are given back when an update ends, before anything generates."""

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes on the fullest device by part, for a step of so many tokens in rows of this length; {} if unknown."""
        ...

    def estimate_generation(self, run: RunConfig) -> dict[str, int]:
        """Bytes on the fullest device by part that `evaluation.generate` takes beside what stays between updates."""
        ...

    def estimate_yielded(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes by part that stay on the fullest device while engines have it and weights are kept.

        Where weights leave too, nothing stays. Arguments, and names of the parts, as in `estimate_memory`.
        """
        ...

    def estimate_host_memory(self, run: RunConfig) -> int:
        """Bytes in the memory of the fullest machine that stand for parts kept off its devices."""
        ...

    def estimate_offloaded_activations(self, run: RunConfig, row_length: int, tokens: int) -> int:
        """Bytes of activations in the memory of the fullest machine, kept off its devices; to come to
        `estimate_host_memory`. Arguments as in `estimate_memory`.
        """
        ...

    def device_bytes(self) -> int | None:
        """Memory of the smallest device that it would train on here; None where that is not known."""
        ...

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Changes of this section that need less memory, each tried on top of those before: the cheapest in time first.

        A key is that of a setting, such as `compile`, or of one in a section of this one, such as `lora.base_dtype`.
        row_length, tokens: as in `estimate_memory`. With each the section stays valid. A plan suggests what is needed.
        """
        ...


@runtime_checkable
class PlansLayouts(Protocol):
    """Settings of a backend that divides a model among ranks."""

    def describe_layout(self, run: RunConfig) -> Sequence[str]:
        """Sentences on its ranks: how many, where, and in which groups."""
        ...

    def suggested_layouts(
        self, run: RunConfig, row_length: int, tokens: int, device_bytes: int, usable_bytes: int
    ) -> Iterable[str]:
        """Lines on how its ranks could be divided otherwise: what fits, the fastest first; none where there is one way.

        row_length, tokens: as in `PlansMemory.estimate_memory`. device_bytes: memory of a device, of which a plan
        counts on usable_bytes.
        """
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """Settings of a component that `spurline doctor` can try out without a model."""

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        """What is found by starting what a run would start, all but the model.

        Yields as it finds. What fails is a Finding with its fix, and not an error.
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
    """Return what a plan can ask about rollouts: the source itself or one that it decorates; None where neither is."""
    if isinstance(source, PlansRollouts):
        return source
    return None if source.decorates is None else planned(getattr(source, source.decorates))
