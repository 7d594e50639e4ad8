"""Find the problems of a run, and describe what it would do, for `spurline plan`.

A plan reads config, tokenizer and data (only the first rows of large data), lays out the first batches or shows the
first prompt, and estimates memory from the model's architecture. It loads no weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from spurline.config.loading import LoadedConfig
from spurline.config.paths import shown_path
from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ConfigError, RunDirectoryError, UserError
from spurline.progress import Progress, silent
from spurline.protocols.loss import Loss
from spurline.run.build import DataComponents, prepare
from spurline.trackers.readout import quantity
from spurline.update.update import columns_from_source
from spurline_models.architecture import load_model_config
from spurline_models.lengths import position_limit
from spurline_models.loading import check_weights_fit
from spurline_models.memory import count_parameters
from spurline_models.streams.token_stream import check_columns, check_tokens
from spurline_models.trainable import check_losses, check_reading
from spurline_models.weight_files import check_weight_files
from spurline_planning.data_preview.rows import ROW_LIMIT, facts_of, first_rows
from spurline_planning.data_preview.terminal import marked
from spurline_planning.fit import Load, layout_lines, memory_lines, phase_lines
from spurline_planning.protocols import PlansLayouts, planned

BATCHES_SHOWN = 3

EXAMPLE_TOKENS = 120
"""Maximum number of tokens to show of the example. The middle of a longer example is left out."""

T = TypeVar("T")


@dataclass
class Plan:
    """The findings of `spurline plan`: lines by heading, and the problems that would stop training."""

    sections: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    problems: list[UserError] = field(default_factory=list[UserError])

    def attempt(self, part: Callable[[], T]) -> T | None:
        """Return the result of `part`. If `part` raises a UserError, add it to the plan's problems and return None."""
        try:
            return part()
        except UserError as problem:
            self.problems.append(problem)
            return None

    def add(self, heading: str, lines: Callable[[], Iterable[str]]) -> None:
        """Add these lines under this heading, if there are any."""
        found = self.attempt(lambda: list(lines()))
        if found:
            self.sections[heading] = found


def make_plan(
    loaded: LoadedConfig,
    row_limit: int | None = ROW_LIMIT,
    progress: Progress = silent,
    device_bytes: int | None = None,
) -> Plan:
    """Plan a run. Collect its problems in the plan instead of raising them.

    Args:
        loaded: The config of the run.
        row_limit: Maximum number of rows to read of each dataset. If None, all rows are read.
        progress: Called before each slow part.
        device_bytes: Memory of one device. If None, the plan is for the devices of this machine.
    """
    plan, config = Plan(), loaded.config
    backend = config.backend
    warning = plan.attempt(backend.missing_here)
    with ExitStack() as stack:
        prepared = prepare(loaded, stack, row_limit, progress, attempt=plan.attempt)
        data = prepared.data
        progress("reading the model's config")
        model = plan.attempt(lambda: _model(config.model))
        if model is not None:
            plan.attempt(lambda: backend.check_model(config))
        plan.attempt(lambda: check_reading(config, loaded.host.registry))
        if backend.rank_request() is not None:
            plan.attempt(lambda: check_losses(config, loaded.host.registry))
        plan.sections["this run"] = [summarize_plan(loaded, data, model)]
        if isinstance(backend, PlansLayouts):
            plan.add("parallel layout", partial(backend.describe_layout, config))
        plan.add("backend", lambda: prepared.notes["backend"])
        if data is not None:
            plan.sections["data"] = [*_data(data, row_limit), *prepared.notes["data"]]
            plan.sections["objective"] = _objective(loaded, data)
            plan.sections["steps"] = [*_steps(config, data), *prepared.notes["steps"]]
            load = None if model is None else plan.attempt(lambda: _batches(plan, config, data, model))
            if load is not None:
                plan.add("memory (estimate)", lambda: memory_lines(config, load, device_bytes))
                plan.add("phases of a device (estimate)", lambda: phase_lines(config, load, device_bytes))
                plan.add("layouts (estimate)", lambda: layout_lines(config, load, device_bytes))
    plan.attempt(lambda: check_weight_files(config.model))
    plan.attempt(lambda: check_weights_fit(config.model))
    if device_bytes is None:
        # With `device_bytes`, the plan is for another machine.
        plan.attempt(lambda: _check_run_dir(config))
    if warning:
        plan.sections["on this machine"] = [warning]
    located = [
        problem.in_file(loaded.origin) if isinstance(problem, ConfigError) else problem for problem in plan.problems
    ]
    # Several parts may find the same problem.
    plan.problems = list({str(problem): problem for problem in located}.values())
    return plan


@dataclass(frozen=True)
class _Model:
    """Facts about a model. `context` is in tokens, or None if there is no limit. `vocabulary` is None if unknown."""

    parameters: int
    context: int | None
    vocabulary: int | None


def _model(model: ModelConfig) -> _Model:
    config = load_model_config(model)
    limit = position_limit(config)
    context = None if limit is None or (limit.extends and model.allow_extrapolation) else limit.tokens
    return _Model(count_parameters(model), context, getattr(config.get_text_config(), "vocab_size", None))


def _check_run_dir(config: RunConfig) -> None:
    run_dir = config.run_dir
    nearest = next((path for path in (run_dir, *run_dir.parents) if os.path.lexists(path)), run_dir)
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    why = "writable for this user" if nearest.is_dir() else "a folder"
    raise RunDirectoryError(
        f"run_dir {run_dir} cannot be written: {nearest} is not {why}. Choose another with --set run_dir=PATH."
    )


def summarize_plan(loaded: LoadedConfig, data: DataComponents | None, model: _Model | None) -> str:
    """Return a sentence about model, data, length and output of the run. Facts that are None are left out."""
    config = loaded.config
    size = f" ({quantity(model.parameters)} parameters)" if model is not None else ""
    adapted = "adapters of " if config.backend.facts.trains_adapters else ""
    amount = ""
    if data is not None:
        facts, steps = data.source.summary(), data.source.total_steps
        found = (f" on {facts[name]:,} {name}" for name in ("pairs", "prompts", "samples") if name in facts)
        amount = f"{next(found, '')} for {steps:,} steps ({data.source.epoch(steps):.2f} epochs)"
    backend = f"backend '{config.backend.name}' {config.backend.facts.device}".rstrip()
    return (
        f"Train {adapted}{shown_path(config.model.path)}{size} with source '{config.source.name}' and loss "
        f"'{config.loss.name}'{amount}, {backend}; metrics, checkpoints and the report go to {config.run_dir}."
    )


def _data(data: DataComponents, row_limit: int | None) -> list[str]:
    lines = facts_of(data)
    if data.source.summary().get("read_in_part"):
        lines.append(f"only the first {row_limit:,} rows of each dataset were read, so steps and epochs are estimates")
    return lines


def _objective(loaded: LoadedConfig, data: DataComponents) -> list[str]:
    stated = data.source.summary().get("objective")
    lines = [*(stated if isinstance(stated, list) else [])]
    lines.append(f"{data.loss.describe()} Reduction: {loaded.config.reduction.name}.")
    if loaded.config.trained_critic is not None:
        critic: Loss = loaded.host.registry.create("loss", loaded.config.trained_critic.loss)
        lines.append(critic.describe())
    return lines


def _steps(config: RunConfig, data: DataComponents) -> list[str]:
    source = data.source
    step_of = source.summary().get("step_of", f"{config.batch_size} samples")
    return [
        f"{source.total_steps:,} steps of {step_of}, {data.total_updates():,} optimizer steps, "
        f"{source.epoch(source.total_steps):.2f} epochs"
    ]


def _batches(plan: Plan, config: RunConfig, data: DataComponents, model: _Model) -> Load:
    """Lay out the first batches, or show the first prompt. Return the size of the largest step that is known."""
    if data.source.pure or data.source.reads_only_data:
        # `_example` and `_first_batches` both build the first batches. Only a pure source can build them twice.
        if data.source.pure:
            plan.sections["example"] = _example(data)
        return _first_batches(plan, config, data, model)
    preview = data.source.preview()
    if preview:
        plan.sections["prompts"] = list(preview)
    longest = data.source.longest()
    prompt = 0 if longest is None else longest.prompt_tokens or 0
    rollouts = planned(config.source)
    if rollouts is None:
        name = config.source.name
        plan.sections["batches"] = [f"made by the source '{name}' during training; their shapes are not known yet"]
        return Load()
    update = rollouts.largest_update(config, prompt, model.context)
    known = "" if longest is not None else ". This does not count prompts, which only the environment knows"
    plan.sections["batches"] = [
        f"made by rollouts: at most {update.tokens:,} tokens in an optimizer step, rows of up to "
        f"{update.row_length:,}, if every response has the largest allowed length{known}"
    ]
    plan.sections["generation"] = list(rollouts.generation_notes(config, prompt, model.context))
    generation = rollouts.generation_memory(config, prompt, model.context)
    engine = rollouts.colocated_engine(config, prompt, model.context)
    return Load(update.row_length, update.tokens, generation, engine)


def _first_batches(plan: Plan, config: RunConfig, data: DataComponents, model: _Model) -> Load:
    """Lay out the first batches. Return the size of the batch with the most tokens."""
    lines: list[str] = []
    largest = Load()
    for step in range(1, min(BATCHES_SHOWN, data.source.total_steps) + 1):
        batch = data.source.build(step)
        lines.append(
            f"step {step}: {batch.num_rows} rows x {batch.length} tokens, {batch.num_tokens:,} real "
            f"({batch.info.get('packing/fill', 0.0):.0%} fill), {batch.num_loss_tokens:,} with loss"
        )
        plan.attempt(partial(check_columns, batch, columns_from_source(data.loss)))
        if model.vocabulary is not None:
            plan.attempt(partial(check_tokens, batch, model.vocabulary))
        largest = max(largest, Load(batch.length, batch.num_tokens), key=lambda load: load.tokens)
        batch.release()
    plan.sections["batches"] = lines
    return largest


def _example(data: DataComponents) -> list[str]:
    lines: list[str] = []
    for row in first_rows(data, 1):
        sequence = row.sequences[0]
        lines.append(f"{sequence.uid}, trained tokens in ⟦ ⟧ (`spurline data` shows more):")
        lines += [f"  | {line.plain}" for line in marked(sequence, EXAMPLE_TOKENS).split()]
    return lines
