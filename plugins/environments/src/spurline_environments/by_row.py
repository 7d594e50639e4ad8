"""Environment `by_row`: several environments in one run, among which each row chooses.

Data flow: row -> label -> the environment of this label -> Trajectory, whose `info["environment"]` is the label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import DataError, listing, suggestion
from spurline.plugins.registry import Registry
from spurline_environments.configs import AttemptLimits, ByRowConfig
from spurline_rl.protocols.environment import Environment, PolicyHandle, ShowsPrompt, Task
from spurline_rl.scoring import close_each
from spurline_rl.trajectory import Trajectory, with_fields
from spurline_text.rows.rows import column_paths, describe, value_at


class ByRow:
    """Passes each attempt to the environment that its row names."""

    def __init__(
        self, config: ByRowConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._parts: dict[str, Environment] = {
            label: registry.create("environment", part, registry=registry, tokenizer=tokenizer, data=data)
            for label, part in config.environments.items()
        }

    def label_of(self, row: Mapping[str, Any]) -> str:
        column, value = self._config.column, value_at(row, self._config.column)
        if value is None:
            raise DataError(
                f"the column '{column}', which chooses the environment, is missing or null."
                f"{suggestion(column, column_paths(row))} Environments: {listing(self._parts)}. The row has: "
                f"{listing(column_paths(row))}. If all rows of a file have the same environment, set `constants: "
                f"{{{column}: {next(iter(self._parts))}}}` of the dataset."
            )
        if str(value) not in self._parts:
            raise DataError(
                f"the column '{column}' is {describe(value)}, which is no environment of source.environment."
                f"{suggestion(str(value), self._parts)} Environments: {listing(self._parts)}."
            )
        return str(value)

    def time_limit_of(self, label: str) -> tuple[float, str] | None:
        seconds = self._limits(label).attempt_timeout_s
        return None if seconds is None else (seconds, f"source.environment.limits.{label}.attempt_timeout_s")

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        label = self.label_of(task.row)
        longest = self._limits(label).max_new_tokens
        if longest is not None:
            policy.sampling = replace(policy.sampling, max_new_tokens=longest)
        trajectory = await self._parts[label].run(task, policy)
        return with_fields(trajectory, info={**trajectory.info, "environment": label})

    def first_prompt(self, task: Task) -> Sequence[int] | None:
        """See `ShowsPrompt`."""
        part = self._parts[self.label_of(task.row)]
        return part.first_prompt(task) if isinstance(part, ShowsPrompt) else None

    async def close(self) -> None:
        await close_each(self._parts.values())

    def _limits(self, label: str) -> AttemptLimits:
        return self._config.limits.get(label, AttemptLimits())
