"""Estimate whether a run fits its devices: its memory by part, the total, and what to change if it does not fit.

The backend's config makes the estimate, for the largest step that a plan has found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spurline.config.run_config import RunConfig
from spurline.config.section import sections_within
from spurline_models.backend_config import ColocatedEngine, MemoryEstimate
from spurline_models.machine import memory_bytes, num_gpus
from spurline_planning.protocols import HoldsMemory, PlansLayouts, PlansMemory

SHARE_USED = 0.9
"""Share of a device's memory that a run may use. Kernels, network buffers and the allocator need the rest."""

BUCKETS = 4
"""Number of buckets on a device while weights are published: two of the sender and two of the receiver."""


@dataclass(frozen=True)
class Load:
    """The size of the largest step that a plan has found.

    Attributes:
        row_length: Tokens of the longest row; 0 if no batch is known.
        tokens: Tokens of the step; 0 if no batch is known.
        generation: Memory by part, in bytes, that generation needs on the trainer's device between updates.
        engine: The engine that takes turns with the trainer on the trainer's devices, if there is one.
    """

    row_length: int = 0
    tokens: int = 0
    generation: Mapping[str, int] = field(default_factory=dict[str, int])
    engine: ColocatedEngine | None = None


def estimate_load(run: RunConfig, load: Load) -> MemoryEstimate | None:
    """Estimate the memory of the step and the generation in `load`. Return None if the backend has no estimate."""
    if not isinstance(run.backend, PlansMemory):
        return None
    estimate = run.backend.estimate_memory(run, load.row_length, load.tokens)
    if estimate is None:
        return None
    for path, section in sections_within(run):
        if isinstance(section, HoldsMemory):
            held = {f"{name} ({path})": size for name, size in section.held_memory(run).items()}
            estimate = replace(estimate, kept={**estimate.kept, **held})
    if not load.generation:
        return estimate
    generation = {f"{name}, while generating": size for name, size in load.generation.items()}
    return replace(estimate, moments=(*estimate.moments, generation))


def memory_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Return lines with the memory of each part on the fullest device, the total, and whether the run fits.

    Return no lines if the backend has no estimate.

    Args:
        run: The run to plan.
        load: The run's largest step.
        device_bytes: Memory of a device. If None, the backend looks at the devices of this machine.

    Raises:
        ModelError: If the model's config cannot be read.
        ConfigError: If a parameter group of an optimizer matches no parameter.
    """
    estimate = estimate_load(run, load)
    if estimate is None:
        return []
    lines = [f"{name}: {_mib(size)}" for name, size in estimate.parts.items() if size > 0 or load.tokens]
    turns = " (not the sum, since not all parts are in memory at once)" if len(estimate.moments) > 1 else ""
    unknown = ", without activations and logits, whose size depends on the batches" if not load.tokens else ""
    lines.append(f"total: {_mib(estimate.peak)}{turns}{unknown}")
    if estimate.host:
        lines.append(f"in the memory of the fullest machine: {_mib(estimate.host)}")
    limit = _device_limit(run.backend, device_bytes)
    if limit is None:
        return lines
    # With `device_bytes`, the plan is for another machine.
    if device_bytes is None and estimate.host > SHARE_USED * memory_bytes():
        lines.append(f"does not fit the memory of this machine: {_usable(memory_bytes())}")
    if estimate.peak <= SHARE_USED * limit:
        return [*lines, f"fits a device of {gib(limit)}"]
    return [*lines, f"does not fit a device of {_usable(limit)}", _suggestion(run, load)]


def _suggestion(run: RunConfig, load: Load) -> str:
    """Name the settings of the backend that save memory. Settings that cost less time come first."""
    backend = run.backend
    assert isinstance(backend, PlansMemory)
    changes: dict[str, Any] = {}
    for change in backend.savings(run, load.row_length, load.tokens):
        # The first change of a setting is the smallest one.
        changes = changes | {key: value for key, value in change.items() if key not in changes}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    words = " ".join(f"--set backend.{key}={text}" for key, text in texts.items())
    saving = f"these save memory, the cheapest first: {words}." if words else "no setting of the backend saves memory."
    return f"suggestion: {saving} {backend.beyond}".rstrip()


def layout_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Return lines about other ways to divide the model among the same ranks.

    Return no lines if no batch or no device is known. For arguments and errors, see `memory_lines`.
    """
    limit = _device_limit(run.backend, device_bytes)
    if limit is None or not load.tokens or not isinstance(run.backend, PlansLayouts):
        return []
    return list(run.backend.suggested_layouts(run, load.row_length, load.tokens, int(SHARE_USED * limit)))


def phase_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """Return lines with the memory of each phase of a run whose engines and trainer take turns on a device.

    Return no lines for other runs, or if `device_bytes` is None and this machine has no GPU. For arguments and errors,
    see `memory_lines`.
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
            lines.append(f"{name} does not fit a device of {_usable(limit)}. {fix}")
    if len(lines) == len(phases):
        lines.append(f"each phase fits a device of {gib(limit)}")
    return lines


def _device_limit(backend: object, device_bytes: int | None) -> int | None:
    """Return `device_bytes` if it is given, else the memory of a device of this machine, or None if unknown."""
    if device_bytes is None and isinstance(backend, PlansMemory):
        return backend.device_bytes()
    return device_bytes


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _usable(limit: int) -> str:
    return f"{gib(limit)}, of which {SHARE_USED:.0%} can be used"


def gib(size: int) -> str:
    """Return the size in GiB, with its unit."""
    return f"{size / 2**30:,.1f} GiB"
