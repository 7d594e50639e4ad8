"""Say what is on a device in each phase of a run whose engines and trainer have it by turns.

In: the estimates of the backend's config and of the engine's, for the largest step that a plan knows. Out: lines of
text, and one suggestion for each phase that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spurline.config.run_config import RunConfig
from spurline_models.machine import num_gpus
from spurline_models.rollout_load import ColocatedEngine
from spurline_planning.fit import SHARE_USED, Load, as_gib, as_value, device_limit, memory_parts, peak_memory
from spurline_planning.protocols import PlansMemory

BUCKETS = 4
"""Weights on their way that a device has: two buckets of whoever sends, and two of whoever receives."""

_SMALLEST_BUCKET = 64 << 20

Phases = Mapping[str, Mapping[str, int]]
"""Bytes by part in each phase."""


def phase_lines(run: RunConfig, load: Load, device_bytes: int | None) -> list[str]:
    """The phases of a run with colocated engines; none of another one, and none where no device is known.

    device_bytes: memory of a device; None takes that of the GPUs here. Raises ModelError, ConfigError.
    """
    backend = run.backend
    if not isinstance(backend, PlansMemory) or load.engine is None or (device_bytes is None and not num_gpus()):
        return []
    limit = device_limit(backend, device_bytes)
    if limit is None:
        return []
    phases = _phases(run, backend, load, load.engine, limit)
    lines = [_shown(name, parts) for name, parts in phases.items()]
    misfits = [name for name, parts in phases.items() if sum(parts.values()) > SHARE_USED * limit]
    if not misfits:
        return [*lines, f"each phase fits a device of {as_gib(limit)}"]
    for name in misfits:
        lines.append(f"{name} does not fit a device of {as_gib(limit)}, of which {SHARE_USED:.0%} can be counted on")
        lines.append(f"suggestion: {_suggestion(name, run, backend, load, load.engine, limit)}")
    return lines


def _phases(run: RunConfig, backend: PlansMemory, load: Load, engine: ColocatedEngine, limit: int) -> Phases:
    training, generation = memory_parts(run, backend, load)
    stays = backend.estimate_yielded(run, load.row_length, load.tokens)
    awake = engine.config.colocated_memory(run, engine.responses, engine.length, limit)
    engine_weights = {"the engine's weights": awake.get("weights", 0)}
    trainer_weights = {f"the trainer's {name}": size for name, size in stays.items()}
    return {
        "generating": {
            **engine_weights,
            "keys and values": awake.get("cache", 0),
            **({} if engine.config.offloads_trainer else trainer_weights),
        },
        "publishing": {**engine_weights, **trainer_weights, "weights on their way": BUCKETS * engine.bucket_bytes},
        "training": {"the trainer alone": peak_memory(training, generation, backend.update_parts)},
    }


def _shown(name: str, parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{part} {size / 2**20:,.0f}" for part, size in parts.items() if size)
    return f"{name}: {sum(parts.values()) / 2**20:,.0f} MiB ({listed})"


def _suggestion(
    name: str, run: RunConfig, backend: PlansMemory, load: Load, engine: ColocatedEngine, limit: int
) -> str:
    usable = int(SHARE_USED * limit)
    if name == "training":
        # What changes it is the same whether engines share the device or not.
        return "see memory above: engines sleep while the trainer trains"
    if name == "publishing":
        fixed = sum(_phases(run, backend, load, replace(engine, bucket_bytes=0), limit)[name].values())
        if (usable - fixed) // BUCKETS >= _SMALLEST_BUCKET:
            # Whole MiB, rounded down.
            return f"--set source.weight_sync.bucket_mb={((usable - fixed) // BUCKETS) >> 20}"
    stays = sum(backend.estimate_yielded(run, load.row_length, load.tokens).values())
    asked = run, engine.responses, engine.length, limit
    for change in engine.config.colocated_savings(*asked, usable - stays, usable):
        changed = replace(engine, config=engine.config.model_copy(update=change))
        needed = sum(_phases(run, backend, load, changed, limit)[name].values())
        if change and needed <= usable:
            words = " ".join(f"--set {engine.key}.{key}={as_value(value)}" for key, value in change.items())
            return f"{words}, with which {name} needs {as_gib(needed)}"
    return f"no setting of the engine makes it fit. {backend.beyond}".rstrip()
