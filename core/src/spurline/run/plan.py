"""`spurline plan`: find every problem a run would meet, and say what it would do, without training.

Reads the config, the tokenizer and the data (a sample of large data), lays out the first batches and estimates memory
from the model's architecture. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import ReductionConfig
from spurline.data.token_store import describe
from spurline.errors import ConfigError, Problem, UserError
from spurline.plugins.registry import CORE, group_by_kind
from spurline.protocols.loss import Loss
from spurline.run.build import DataComponents, build_data, build_trackers
from spurline.update.reduction import describe_reduction

ROW_LIMIT = 10_000
"""Rows of each dataset that a plan looks at."""

BATCHES_SHOWN = 3

T = TypeVar("T")


@dataclass
class Plan:
    """What `spurline plan` found. sections: heading -> lines. problems: what must be mended before training."""

    sections: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    problems: list[UserError] = field(default_factory=list[UserError])


def make_plan(loaded: LoadedConfig, row_limit: int | None = ROW_LIMIT) -> Plan:
    """Look at everything that can be known before training. Problems are collected, not raised."""
    plan = Plan()
    plan.sections["plugins"] = _plugins(loaded)
    _attempt(plan, lambda: build_trackers(loaded))
    warning = _attempt(plan, loaded.config.backend.missing_here)
    if warning:
        plan.sections["on this machine"] = [warning]
    with ExitStack() as stack:
        data = _attempt(plan, lambda: build_data(loaded, stack, row_limit))
        if data is not None:
            plan.sections["data"] = _data(data, row_limit)
            plan.sections["objective"] = _objective(loaded, data)
            plan.sections["steps"] = _steps(loaded, data)
            largest = _attempt(plan, lambda: _batches(plan, data))
            _attempt(plan, lambda: _divisibility(loaded, data))
            if largest is not None:
                _attempt(plan, lambda: _memory(plan, loaded, *largest))
    return plan


def _attempt(plan: Plan, part: Callable[[], T]) -> T | None:
    try:
        return part()
    except UserError as problem:
        plan.problems.append(problem)
        return None


def _plugins(loaded: LoadedConfig) -> list[str]:
    lines: list[str] = []
    for name, plugin in loaded.host.plugins.items():
        provided = group_by_kind(loaded.host.registry.entries(name))
        components = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in provided.items())
        lines.append(f"{name} {plugin.version} ({plugin.distribution}) provides {components or 'no components'}")
        hooks = [hook for hook in plugin.hooks if hook != "register_components"]
        if name != CORE and hooks:
            lines.append(f"  hooks: {', '.join(hooks)}")
    return lines


def _data(data: DataComponents, row_limit: int | None) -> list[str]:
    lines = describe("train", dict(data.source.summary()))
    if data.evaluation is not None:
        lines += describe("eval", dict(data.evaluation.summary()))
    rounded = data.source.summary().get("rounded")
    lines += rounded if isinstance(rounded, list) else []
    if data.source.summary().get("read_in_part"):
        lines.append(f"looked at the first {row_limit:,} rows of each dataset; steps and epochs below are estimates")
    return lines


def _objective(loaded: LoadedConfig, data: DataComponents) -> list[str]:
    more = data.source.summary().get("objective")
    before = more if isinstance(more, list) else []
    lines = [*before, f"{data.loss.describe()} {describe_reduction(loaded.config.reduction)}"]
    if loaded.config.critic is not None:
        critic: Loss = loaded.host.registry.create("loss", loaded.config.critic.loss)
        lines.append(f"{critic.describe()} {describe_reduction(ReductionConfig())}")
    return lines


def _steps(loaded: LoadedConfig, data: DataComponents) -> list[str]:
    config, source = loaded.config, data.source
    epochs = source.epoch(source.total_steps)
    facts = source.summary()
    step_of = facts.get("step_of", f"{config.batch_size} samples")
    lines = [f"{source.total_steps:,} steps of {step_of}, {data.total_updates:,} optimizer steps, {epochs:.2f} epochs"]
    per_epoch, per_step = facts.get("samples_per_epoch"), facts.get("samples_per_step", config.batch_size)
    if isinstance(per_epoch, int) and isinstance(per_step, int):
        beyond = (source.total_steps * per_step) % per_epoch
        if config.epochs is not None and beyond and beyond < per_step:
            lines.append(f"the last batch wraps around and takes {beyond} samples of the next epoch")
    return lines


def _batches(plan: Plan, data: DataComponents) -> tuple[int, int]:
    """Lay out the first batches; returns row length and tokens of the one with most tokens, 0 where unknown."""
    if not (data.source.pure or data.source.reads_only_data):
        plan.sections["batches"] = ["made by rollouts; their shapes are known when the run generates"]
        return 0, 0
    lines: list[str] = []
    largest = (0, 0)
    for step in range(1, min(BATCHES_SHOWN, data.source.total_steps) + 1):
        batch = data.source.build(step)
        lines.append(
            f"step {step}: {batch.num_rows} rows x {batch.length} tokens, {batch.num_tokens:,} real "
            f"({batch.info.get('packing/fill', 0.0):.0%} fill), {batch.num_loss_tokens:,} with loss"
        )
        largest = max(largest, (batch.length, batch.num_tokens), key=lambda length_and_tokens: length_and_tokens[1])
        batch.release()
    plan.sections["batches"] = lines
    return largest


def _divisibility(loaded: LoadedConfig, data: DataComponents) -> None:
    config, layout = loaded.config, data.context.layout
    if config.source.num_prompts is None and config.batch_size < layout.data:
        problem = Problem(
            "batch_size",
            f"is {config.batch_size}, but the backend has {layout.data} data-parallel ranks, so some would never get a "
            f"sample. Set batch_size to at least {layout.data}.",
        )
        raise ConfigError([problem], loaded.origin)


def _memory(plan: Plan, loaded: LoadedConfig, row_length: int, tokens: int) -> None:
    parts = loaded.config.backend.estimate_memory(loaded.config, row_length, tokens)
    if not parts:
        return
    # Without a batch, what grows with its tokens comes out as 0.
    lines = [f"{name}: {size / 2**20:,.0f} MiB" for name, size in parts.items() if size or tokens]
    total = f"total: {sum(parts.values()) / 2**20:,.0f} MiB"
    if not tokens:
        total += ", to which come activations, logits and generation, whose size depends on how long rollouts get"
    plan.sections["memory (estimate)"] = [*lines, total]
