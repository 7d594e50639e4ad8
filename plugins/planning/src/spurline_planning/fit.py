"""Say whether a run fits its devices: memory by part, the total beside a device, and what to change if it does not fit.

In: the estimates of the backend's config, for the largest step that a plan knows. Out: lines of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from spurline.config.run_config import RunConfig
from spurline_models.backend_config import ColocatedEngine, MemoryEstimate
from spurline_models.machine import memory_bytes, num_gpus
from spurline_planning.protocols import PlansLayouts, PlansMemory

_Section = TypeVar("_Section", bound=BaseModel)

SHARE_USED = 0.9
"""Share of a device's memory that a plan counts on: kernels, network buffers and the allocator take the rest."""

BUCKETS = 4
"""Buckets of weights on a device while weights are published: two of the sender and two of the receiver."""


@dataclass(frozen=True)
class Load:
    """The largest step that is known.

    Attributes:
        row_length: Tokens of the longest row; 0 if no batch is known.
        tokens: Tokens of the step; 0 if no batch is known.
        generation: Bytes by part that generating takes on the device, in turn with updates.
        engine: The engine that has the device by turns with the trainer; None if engines have other devices.
    """

    row_length: int = 0
    tokens: int = 0
    generation: Mapping[str, int] = field(default_factory=dict[str, int])
    engine: ColocatedEngine | None = None


def estimate_load(run: RunConfig, load: Load, backend: object = None) -> MemoryEstimate | None:
    """Estimate the memory of this step, generation included, with this backend; None if it does not say."""
    backend = backend or run.backend
    if not isinstance(backend, PlansMemory):
        return None
    estimate = backend.estimate_memory(run, load.row_length, load.tokens)
    if estimate is None or not load.generation:
        return estimate
    generation = {f"{name}, while generating": size for name, size in load.generation.items()}
    return replace(estimate, moments=(*estimate.moments, generation))


def memory_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Return memory by part on the fullest device, the total, and whether it fits; nothing if the backend cannot say.

    Args:
        run: The run to plan.
        load: Its largest step.
        device_bytes: Memory of a device; None asks the backend for that of this machine.

    Raises:
        ModelError: If the model's config cannot be read.
        ConfigError: If an optimizer's group fits no parameter.
    """
    estimate = estimate_load(run, load)
    if estimate is None:
        return []
    lines = [f"{name}: {_mib(size)}" for name, size in estimate.parts.items() if size > 0 or load.tokens]
    turns = ", as not all of it is there at once" if len(estimate.moments) > 1 else ""
    unknown = ", without activations and logits, whose size depends on the batches" if not load.tokens else ""
    lines.append(f"total: {_mib(estimate.peak)}{turns}{unknown}")
    if estimate.host:
        lines.append(f"in the memory of the fullest machine, beside it: {_mib(estimate.host)}")
    limit = _device_limit(run.backend, device_bytes)
    if limit is None:
        return lines
    # With `device_bytes`, the plan is for another machine.
    if device_bytes is None and estimate.host > SHARE_USED * memory_bytes():
        lines.append(f"does not fit the memory of this machine, {_beside(memory_bytes())}")
    if estimate.peak <= SHARE_USED * limit:
        return [*lines, f"fits a device of {_gib(limit)}"]
    return [*lines, f"does not fit a device of {_beside(limit)}", _suggestion(run, load, SHARE_USED * limit)]


def _suggestion(run: RunConfig, load: Load, usable: float) -> str:
    """Return the cheapest changes of the backend's settings that fit; all of them if even these do not."""
    backend = run.backend
    assert isinstance(backend, PlansMemory)
    changes: dict[str, Any] = {}
    estimate = None
    for change in backend.savings(run, load.row_length, load.tokens):
        changes |= change
        estimate = estimate_load(run, load, _with_changes(run.backend, changes))
        assert estimate is not None
        if estimate.peak <= usable:
            break
    if estimate is None:
        return f"suggestion: none of its settings needs less. {backend.beyond}".rstrip()
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    words = " ".join(f"--set backend.{key}={text}" for key, text in texts.items())
    host = f" and {_gib(estimate.host)} in the memory of the fullest machine" if estimate.host else ""
    needs = f"{_gib(estimate.peak)}{host}"
    if estimate.peak <= usable:
        return f"suggestion: {words}, which needs {needs}"
    return f"suggestion: even {words} needs {needs}. {backend.beyond}".rstrip()


def layout_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Return how the backend could divide the same ranks otherwise; nothing without a batch, or a device to fit.

    Arguments and errors are those of `memory_lines`.
    """
    limit = _device_limit(run.backend, device_bytes)
    if limit is None or not load.tokens or not isinstance(run.backend, PlansLayouts):
        return []
    return list(run.backend.suggested_layouts(run, load.row_length, load.tokens, int(SHARE_USED * limit)))


def phase_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Return what is on a device in each phase of a run whose engines and trainer have it by turns.

    Arguments and errors are those of `memory_lines`. Nothing for other runs, or without GPUs to fit.
    """
    engine, estimate = load.engine, estimate_load(run, load)
    limit = _device_limit(run.backend, device_bytes)
    if engine is None or estimate is None or limit is None or (device_bytes is None and not num_gpus()):
        return []
    awake = engine.memory(limit)
    weights = {"the engine's weights": awake.get("weights", 0)}
    trainer = {f"the trainer's {name}": size for name, size in estimate.lent.items()}
    beside = {} if engine.offloads_trainer else trainer
    phases: dict[str, tuple[Mapping[str, int], str]] = {
        "generating": ({**weights, "keys and values": awake.get("cache", 0), **beside}, engine.takes_less),
        "publishing": (
            {**weights, **trainer, "weights on their way": BUCKETS * engine.bucket_bytes},
            f"Lower source.weight_sync.bucket_mb. {engine.takes_less}",
        ),
        "training": ({"the trainer alone": estimate.peak}, "See memory above: engines sleep while the trainer trains."),
    }
    lines: list[str] = []
    for name, (parts, fix) in phases.items():
        total = sum(parts.values())
        listed = ", ".join(f"{part} {size / 2**20:,.0f}" for part, size in parts.items() if size)
        lines.append(f"{name}: {_mib(total)} ({listed})")
        if total > SHARE_USED * limit:
            lines.append(f"{name} does not fit a device of {_beside(limit)}. {fix}")
    if len(lines) == len(phases):
        lines.append(f"each phase fits a device of {_gib(limit)}")
    return lines


def _device_limit(backend: object, device_bytes: int | None) -> int | None:
    """Return `device_bytes`, or the memory of the devices that the backend finds here; None if it finds none."""
    if device_bytes is None and isinstance(backend, PlansMemory):
        return backend.device_bytes()
    return device_bytes


def _with_changes(section: _Section, changes: Mapping[str, Any]) -> _Section:
    """Return a copy of the section with other values by key. A key such as `lora.base_dtype` leads into a section."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        inner = values.get(first, getattr(section, first))
        values[first] = _with_changes(inner, {rest: value}) if rest else value
    return section.model_copy(update=values)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _beside(limit: int) -> str:
    return f"{_gib(limit)}, of which {SHARE_USED:.0%} can be counted on"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
