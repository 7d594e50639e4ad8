"""Attempts of environment `harness` with a scripted engine: a real server, real clients, no model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import openai
from rl_attempts import SORT_ROW, core_registry, make_task
from transformers import PreTrainedTokenizerBase

from spurline_agents.agents import Session
from spurline_agents.configs import HarnessConfig
from spurline_agents.environment import HarnessEnvironment
from spurline_rl.policy import EnginePolicy
from spurline_rl.protocols.environment import PolicyHandle
from spurline_rl.protocols.rollout_engine import Sampling
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

LIMIT_S = 60.0
MODULE = "harness_test_agents"

AgentFunction = Callable[[Session], Any]


class Harness:
    """One environment with one agent, to be used in `async with` on one event loop."""

    def __init__(
        self,
        agent: AgentFunction,
        engine: ScriptedEngine,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> None:
        module = ModuleType(MODULE)
        vars(module)["agent"] = agent
        sys.modules[MODULE] = module
        self.engine = engine
        config = HarnessConfig(**{"agent": None if "command" in settings else f"{MODULE}:agent", **settings})
        self.environment = HarnessEnvironment(config, core_registry(), tokenizer or tiny_tokenizer(), None)  # type: ignore[arg-type]

    async def __aenter__(self) -> Harness:
        return self

    async def __aexit__(self, *error: object) -> None:
        closing = self.environment.close()
        if closing is not None:
            await asyncio.wait_for(closing, LIMIT_S)

    def policy(self, sample: int = 0, *, any_distribution: bool = False, **sampling: Any) -> EnginePolicy:
        task = make_task(sample=sample)
        settings = Sampling(**{"max_new_tokens": 256, **sampling})
        return EnginePolicy(self.engine, settings, run_seed=0, task=task, any_distribution=any_distribution)

    async def attempt(
        self, row: Mapping[str, Any] = SORT_ROW, *, sample: int = 0, policy: PolicyHandle | None = None
    ) -> Trajectory:
        """One attempt at the row."""
        task = make_task(row, sample=sample)
        return await asyncio.wait_for(self.environment.run(task, policy or self.policy(sample)), LIMIT_S)


def client(session: Session, **settings: Any) -> openai.AsyncOpenAI:
    """The async client of the session; it does not repeat requests unless told to."""
    return openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, **{"max_retries": 0, "timeout": LIMIT_S, **settings}
    )


def attempt(agent: AgentFunction, engine: ScriptedEngine, **settings: Any) -> Trajectory:
    """The trajectory of one attempt on an event loop of its own."""

    async def run() -> Trajectory:
        async with Harness(agent, engine, **settings) as harness:
            return await harness.attempt()

    return asyncio.run(run())
