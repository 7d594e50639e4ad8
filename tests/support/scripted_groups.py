"""Prompts, environments and runners for tests of groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from spurline.config.run_config import DatasetConfig
from spurline_rl.draws import Draw
from spurline_rl.group_runner import GivenUpPrompts, GroupRunner, Outcome
from spurline_rl.policy import EnginePolicy
from spurline_rl.protocols.environment import PolicyHandle, Task
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_rl.scoring import score
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory

Behaviour = Callable[[Task, PolicyHandle], Awaitable[Any]]


class Prompt(Draw):
    def __init__(
        self, number: int, row: Mapping[str, Any] | None = None, on_bad_row: Literal["error", "skip"] = "error"
    ) -> None:
        dataset = DatasetConfig(name="rows", on_bad_row=on_bad_row)
        super().__init__(number, f"train:{number}@{number}", dataset, f"rows.jsonl:{number + 1}", row or {})


class Scripted:
    """An environment that calls a function."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        return await self._behaviour(task, policy)


async def answer(task: Task, policy: PolicyHandle) -> Trajectory:
    result = await policy.generate([1, 2, 3])
    return policy.finish({"length": float(len(result.token_ids))})


def one_token(request: GenerationRequest) -> list[int]:
    return [request.seed % 100]


def make_runner(behaviour: Behaviour = answer, **settings: Any) -> GroupRunner:
    """Settings of the runner, with engine, run_seed, max_groups and weights."""
    engine = settings.pop("engine", ScriptedEngine(one_token))
    run_seed, weights = settings.pop("run_seed", 0), settings.pop("weights", {})
    given_up = settings.pop("given_up", GivenUpPrompts(settings.pop("max_groups", 0)))

    def policy(task: Task, attempt: int) -> PolicyHandle:
        return EnginePolicy(engine, Sampling(), run_seed=run_seed, task=task, attempt=attempt)

    defaults = {"samples_per_prompt": 3, "retries": 2, "attempt_timeout_s": 60.0, "max_concurrent": 64}
    return GroupRunner(Scripted(behaviour), policy, lambda it: score(it, weights), given_up, **{**defaults, **settings})


def run_and_leave_nothing(runner: GroupRunner, *prompts: Prompt) -> list[Outcome]:
    async def observe() -> list[Outcome]:
        try:
            return await runner.run_groups(prompts)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, f"still running: {others}"

    return asyncio.run(observe())
