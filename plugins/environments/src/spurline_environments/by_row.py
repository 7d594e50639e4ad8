"""Environment `by_row`: several environments in one run, among which each row chooses.

Data flow: row -> label -> the environment of this label -> Trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import DataError, listing, suggestion
from spurline.plugins.registry import Registry
from spurline.threads import call_on_daemon
from spurline_environments.configs import AttemptLimits, ByRowConfig
from spurline_rl.protocols.environment import Environment, PolicyHandle, ShowsPrompt, Task
from spurline_rl.trajectory import Trajectory
from spurline_text.rows.rows import column_paths, describe, explain_bad_row, value_at


class ByRow:
    """Passes each attempt to the environment that its row names."""

    def __init__(
        self, config: ByRowConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._parts: dict[str, Environment] = {}
        try:
            for label, part in config.environments.items():
                made = registry.create("environment", part, registry=registry, tokenizer=tokenizer, data=data)
                self._parts[label] = made
        except BaseException:
            # A notebook's thread has an event loop already.
            call_on_daemon("close", lambda: asyncio.run(self.close())).result()
            raise
        self.notes = [f"{label}: {note}" for label, part in self._parts.items() for note in getattr(part, "notes", ())]

    def label_of(self, task: Task) -> str:
        column, row = self._config.column, task.row
        value = value_at(row, column)
        if str(value) in self._parts:
            return str(value)
        if value is None:
            why = f", which chooses the environment, is missing or null.{suggestion(column, column_paths(row))}"
            fix = f" The row has: {listing(column_paths(row))}. `constants` of a dataset adds a column to its rows."
        else:
            why = f" is {describe(value)}, which is no environment of this run.{suggestion(str(value), self._parts)}"
            fix = ""
        text = f"the column '{column}'{why} Environments: {listing(self._parts)}.{fix}"
        raise explain_bad_row(task.location, DataError(text))

    def time_limit_of(self, label: str) -> tuple[float, str] | None:
        seconds = self._config.limits.get(label, AttemptLimits()).attempt_timeout_s
        return None if seconds is None else (seconds, f"source.environment.limits.{label}.attempt_timeout_s")

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        label = self.label_of(task)
        longest = self._config.turn_tokens(label, policy.sampling.max_new_tokens)
        policy.sampling = replace(policy.sampling, max_new_tokens=longest)
        return await self._parts[label].run(task, policy)

    def first_prompt(self, task: Task) -> Sequence[int] | None:
        """See `ShowsPrompt`."""
        part = self._parts[self.label_of(task)]
        return part.first_prompt(task) if isinstance(part, ShowsPrompt) else None

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for part in self._parts.values():
                stack.push_async_callback(_close, part)


async def _close(part: Any) -> None:
    closing = part.close() if hasattr(part, "close") else None
    if inspect.isawaitable(closing):
        await closing
