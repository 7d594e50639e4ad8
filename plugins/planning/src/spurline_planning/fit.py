"""Say whether a run fits its devices: memory by part, the total beside a device, and one suggestion where it does not.

In: the estimates of the backend's config, for the largest step that a plan knows. Out: lines of text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from spurline.config.run_config import RunConfig
from spurline_models.machine import memory_bytes
from spurline_models.rollout_load import ColocatedEngine
from spurline_planning.protocols import PlansLayouts, PlansMemory

_Section = TypeVar("_Section", bound=BaseModel)

SHARE_USED = 0.9
"""Of a device's memory: the rest is for kernels, buffers of the network and what the allocator leaves unused."""


@dataclass(frozen=True)
class Load:
    """The largest step that is known. row_length, tokens: both 0 where no batch is.

    generation: bytes by part that generating takes on the device, in turn with updates.
    engine: that has the device by turns with the trainer; None where it has others.
    """

    row_length: int = 0
    tokens: int = 0
    generation: Mapping[str, int] = field(default_factory=dict[str, int])
    engine: ColocatedEngine | None = None


def peak_memory(training: Mapping[str, int], generation: Mapping[str, int], update_parts: Collection[str]) -> int:
    """Bytes at the peak. Both take turns: what only an update needs is not there while responses are written.

    update_parts: those of `training`, as `PlansMemory.update_parts` names them.
    """
    update_only = sum(training.get(name, 0) for name in update_parts)
    return sum(training.values()) - update_only + max(update_only, sum(generation.values()))


def memory_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Memory by part on the fullest device and in total; none where the backend cannot say.

    device_bytes: memory of a device; None asks the backend what there is here. Raises ModelError, ConfigError.
    """
    backend = run.backend
    if not isinstance(backend, PlansMemory):
        return []
    parts, generation = memory_parts(run, backend, load)
    if not parts:
        return []
    # Without a batch, what grows with its tokens comes out as 0.
    lines = [
        f"{name}: {size / 2**20:,.0f} MiB" for name, size in parts.items() if size > 0 or (load.tokens and not size)
    ]
    lines += [f"{name}, while generating: {size / 2**20:,.0f} MiB" for name, size in generation.items()]
    peak = peak_memory(parts, generation, backend.update_parts)
    total = f"total: {peak / 2**20:,.0f} MiB"
    # Less than the parts of an update add up to, some of which come while others go.
    if spared := -sum(size for size in parts.values() if size < 0) >> 20:
        total += f" at once, {spared:,} MiB less than the sum of the parts"
    if generation:
        total += ", as an update and generating take turns"
    if not load.tokens:
        total += ", to which come activations and logits, whose size depends on the batches"
    lines.append(total)
    host = _host_memory(run, backend, load)
    if host:
        lines.append(f"in the memory of the fullest machine, beside it: {host / 2**20:,.0f} MiB")
    limit = device_limit(backend, device_bytes)
    if limit is None:
        return lines
    # A plan for devices of another size is one for another machine.
    here = memory_bytes() if device_bytes is None else None
    if here is not None and host > SHARE_USED * here:
        lines.append(
            f"does not fit the memory of this machine, {as_gib(here)}, of which {SHARE_USED:.0%} can be counted on"
        )
    return lines + _beside_device(run, backend, load, peak, limit, here)


def layout_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """How the backend could divide the same ranks otherwise; none without a batch, or without a device to fit.

    device_bytes: as in `memory_lines`. Raises ModelError, ConfigError.
    """
    backend = run.backend
    limit = device_limit(backend, device_bytes)
    if limit is None or not load.tokens or not isinstance(backend, PlansLayouts):
        return []
    usable = int(SHARE_USED * limit)
    return list(backend.suggested_layouts(run, load.row_length, load.tokens, limit, usable))


def device_limit(backend: object, device_bytes: int | None) -> int | None:
    """Memory of the device that a run is planned for: device_bytes, or what the backend finds here; None for none."""
    if device_bytes is None and isinstance(backend, PlansMemory):
        return backend.device_bytes()
    return device_bytes


def _beside_device(
    run: RunConfig, backend: PlansMemory, load: Load, peak: int, limit: int, here: int | None
) -> list[str]:
    """here: memory of this machine, where it is the one that trains."""
    if peak <= SHARE_USED * limit:
        return [f"fits a device of {as_gib(limit)}"]
    lines = [f"does not fit a device of {as_gib(limit)}, of which {SHARE_USED:.0%} can be counted on"]
    found, needed = _suggest(run, backend, load, SHARE_USED * limit)
    if not found:
        return [*lines, f"suggestion: none of its settings needs less. {backend.beyond}".rstrip()]
    words = " ".join(f"--set backend.{key}={as_value(value)}" for key, value in found.items())
    needs = as_gib(needed) + _host_words(_host_memory(run, _with_changes(run, found), load), here)
    if needed <= SHARE_USED * limit:
        return [*lines, f"suggestion: {words}, which needs {needs}"]
    return [*lines, f"suggestion: even {words} needs {needs}. {backend.beyond}".rstrip()]


def _host_memory(run: RunConfig, backend: PlansMemory, load: Load) -> int:
    return backend.estimate_host_memory(run) + backend.estimate_offloaded_activations(run, load.row_length, load.tokens)


def _host_words(host: int, here: int | None) -> str:
    """What a suggestion takes of the host, to follow what it takes of a device."""
    if not host:
        return ""
    said = f" and {as_gib(host)} in the memory of the fullest machine"
    if here is None:
        return said
    return f"{said}, {'more than can be counted on of' if host > SHARE_USED * here else 'of'} the {as_gib(here)} here"


def _suggest(run: RunConfig, backend: PlansMemory, load: Load, limit: float) -> tuple[dict[str, Any], int]:
    """The cheapest changes of the backend's settings that fit, and their peak; all of them where none do."""
    changes: dict[str, Any] = {}
    peak = _peak_with(run, changes, load)
    for change in backend.savings(run, load.row_length, load.tokens):
        changes |= change
        peak = _peak_with(run, changes, load)
        if peak <= limit:
            break
    else:
        return changes, peak
    # Some may not be needed beside what came later; the dearest in time are given up first.
    for key in reversed(list(changes)):
        fewer = {name: value for name, value in changes.items() if name != key}
        if fewer and _peak_with(run, fewer, load) <= limit:
            changes = fewer
    return changes, _peak_with(run, changes, load)


def _peak_with(run: RunConfig, changes: Mapping[str, Any], load: Load) -> int:
    backend = _with_changes(run, changes)
    return peak_memory(*memory_parts(run, backend, load), backend.update_parts)


def _with_changes(run: RunConfig, changes: Mapping[str, Any]) -> PlansMemory:
    """The backend's settings with other values."""
    changed = with_changes(run.backend, changes)
    assert isinstance(changed, PlansMemory)
    return changed


def with_changes(section: _Section, changes: Mapping[str, Any]) -> _Section:
    """A copy of the section with other values, by key; those of sections in it as in `lora.base_dtype`."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        inner = values.get(first, getattr(section, first))
        values[first] = with_changes(inner, {rest: value}) if rest else value
    return section.model_copy(update=values)


def memory_parts(run: RunConfig, backend: PlansMemory, load: Load) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part of this backend's updates, and of generating on its device."""
    parts = backend.estimate_memory(run, load.row_length, load.tokens)
    return parts, {**load.generation, **backend.estimate_generation(run)}


def as_gib(size: int) -> str:
    """Bytes for people: `79.6 GiB`."""
    return f"{size / 2**30:,.1f} GiB"


def as_value(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
