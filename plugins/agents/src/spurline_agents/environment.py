"""Run attempts of agents that talk to the model over HTTP: the environment `harness`.

A row becomes a Session for the agent. The agent's requests go to the server and from there to the policy. Each answer
that the agent receives is one Turn of the Trajectory. The agent's result gives the rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import DataError
from spurline.plugins.registry import Registry
from spurline_agents.agents import CANCEL_TIMEOUT_S, Agent, Session, command_agent, function_agent
from spurline_agents.configs import HarnessConfig
from spurline_agents.responses import MODEL_NAME
from spurline_agents.server import HarnessServer
from spurline_agents.sessions import LiveSession
from spurline_concurrency.calls import end_tasks
from spurline_environments.tool_formats import Turns
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.protocols.reward import Answer
from spurline_rl.scoring import checked_score, close_all, make_rewards, reward_terms
from spurline_rl.trajectory import Trajectory
from spurline_text.prompts import ChatQuestion, TextQuestion, read_question
from spurline_text.rows.rows import BadRowError

T = TypeVar("T")


async def result_of(work: Awaitable[T], live: LiveSession) -> T:
    """Return the result of an agent. If its session fails, cancel the agent and raise that error."""
    agent = asyncio.ensure_future(work)
    failed = asyncio.ensure_future(live.failed.wait())
    try:
        await asyncio.wait([agent, failed], return_when=asyncio.FIRST_COMPLETED)
        # Look at the failure of the session first, since it may be the cause of the agent's own error.
        if live.failure is not None:
            raise live.failure
        return agent.result()
    finally:
        await end_tasks([agent, failed], f"{live.where}: the agent", CANCEL_TIMEOUT_S)


class HarnessEnvironment:
    """An environment that serves the model to agents. The first attempt starts its server.

    The `info` of a trajectory has the `prompt` of the first turn, the `response` (the agent's answer, or the last
    turn), the `reference`, the `messages` of the last conversation, and the numbers of `turns` and `conversations`. If
    an agent changes the model's words in the messages that it sends back, a new conversation begins.
    """

    def __init__(
        self, config: HarnessConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        if config.command is not None:
            self._agent: Agent = command_agent(config.command, config.pass_env, config.memory_gb)
        else:
            assert config.agent is not None, "the config's check asks for an agent or a command"
            self._agent = function_agent(config.agent)
        self._rewards = make_rewards(config.rewards or {}, registry)
        self._turns = Turns(config.tool_format, registry, tokenizer)
        self.notes = self._turns.notes
        self._starting = asyncio.Lock()
        self._server: HarnessServer | None = None

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        server = await self._started()
        where = f"{task.location} (prompt {task.uid}, sample {task.sample})"
        question = self._question(task)
        live = server.open(policy, where)
        session = Session(
            base_url=server.base_url,
            api_key=live.key,
            model=MODEL_NAME,
            row=task.row,
            messages=question.messages[: question.answer_at] if isinstance(question, ChatQuestion) else (),
            prompt=question.text if isinstance(question, TextQuestion) else None,
            reference=question.reference if question is not None else None,
            uid=task.uid,
            sample=task.sample,
            location=task.location,
        )
        try:
            value = await result_of(self._agent(session), live)
        finally:
            await server.end(live)
        return await self._trajectory(live, session, value)

    def close(self) -> asyncio.Task[None] | None:
        """Close the rewards and the server, if it was started. Return a task that ends once the server has stopped."""
        close_all(self._rewards)
        server, self._server = self._server, None
        return None if server is None else asyncio.get_running_loop().create_task(server.stop())

    async def _started(self) -> HarnessServer:
        async with self._starting:
            if self._server is None:
                server = HarnessServer(self._config, self._tokenizer, self._turns)
                await server.start()
                self._server = server
        return self._server

    async def _trajectory(self, live: LiveSession, session: Session, value: Any) -> Trajectory:
        said = value if self._rewards and isinstance(value, str) else None
        answer, info = live.answer(session.row, session.reference, said)
        terms = await self._terms(live, value, answer)
        info["metrics"].update(answer.metrics)
        return live.policy.finish(terms, info=info)

    async def _terms(self, live: LiveSession, value: Any, answer: Answer) -> Mapping[str, float]:
        if not self._rewards:
            given = value if isinstance(value, Mapping) else {"reward": value}
            if not given:
                raise AttemptFailedError(f"{live.where}: the agent has returned no reward. Give at least one term.")
            return {str(name): checked_score(str(name), number, answer) for name, number in given.items()}
        if value is not None and not isinstance(value, str):
            raise AttemptFailedError(
                f"{live.where}: the agent has returned {value!r:.200}. With `rewards` set, it must return the answer "
                "as text, or nothing if the answer is the model's last turn. Change that, or remove `rewards`."
            )
        return await reward_terms(self._rewards, answer)

    def _question(self, task: Task) -> ChatQuestion | TextQuestion | None:
        """Return the row as a question, or None if its format is unknown. Raises DataError for a malformed row."""
        try:
            return read_question(task.row, task.dataset)
        except BadRowError as error:
            raise error.at(task.location) from error
        except DataError:
            return None
