"""What ends when clients, engines, sessions and the run end, and what becomes of the attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from harness_requests import BODY, TOKENIZER, Stuck, attempt_after, dial, good, head, hello, post
from harness_runs import Harness, attempt
from rl_attempts import encode

from spurline.errors import PluginError, RunFailedError
from spurline_agents.agents import Session
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory


def test_an_agent_that_asks_forever_ends() -> None:
    async def agent(session: Session) -> float:
        while True:
            await post(session, BODY)

    with pytest.raises(AttemptFailedError, match=r"2 turns \(environment.max_turns\)"):
        attempt(agent, hello(), max_turns=2)


def test_a_turn_that_takes_too_long_is_given_up() -> None:
    engine = Stuck()

    async def agent(session: Session) -> None:
        status, answer = await post(session, BODY)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        await engine.cancelled.acquire()
        engine.go.set()

    assert len(attempt_after(agent, engine, request_timeout_s=0.2).turns) == 1


def test_answers_of_a_request_whose_client_hung_up_meanwhile_are_no_turns() -> None:
    class OneOfTwo(Stuck):
        """Answers the first request at once."""

        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.name.endswith("turn 0"):
                return await ScriptedEngine.generate(self, request)
            return await super().generate(request)

    async def agent(session: Session) -> None:
        asking = asyncio.ensure_future(post(session, {**BODY, "n": 2}))
        await engine.asked.wait()
        asking.cancel()
        await asyncio.wait_for(engine.cancelled.acquire(), 30)
        engine.go.set()

    engine = OneOfTwo()
    [turn] = attempt_after(agent, engine).turns
    assert turn.response_ids.tolist()[:1] == encode(TOKENIZER, "1"), "the answer to the second request"


def test_what_is_under_way_when_the_agent_returns_ends_and_the_key_opens_nothing_later() -> None:
    engine = Stuck()
    seen: list[Session] = []
    asking: list[asyncio.Future[Any]] = []

    async def agent(session: Session) -> float:
        engine.go.set()
        await good(session)
        engine.go.clear()
        engine.asked.clear()
        asking.append(asyncio.ensure_future(post(session, BODY)))
        await engine.asked.wait()
        seen.append(session)
        return 1.0

    async def run() -> Trajectory:
        async with Harness(agent, engine) as harness:
            trajectory = await harness.attempt()
            for status, answer in (await asking[0], await post(seen[0], BODY)):
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        return trajectory

    assert len(asyncio.run(run()).turns) == 1


def test_a_request_that_arrives_when_its_session_has_ended_asks_nothing() -> None:
    open_requests: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    engine = hello()

    async def agent(session: Session) -> float:
        reader, writer = await dial(session)
        writer.write(head(session, "Content-Length: 15", "Expect: 100-continue", path="/completions"))
        # The server has found the session and waits for the body.
        assert b" 100 " in await asyncio.wait_for(reader.readline(), 30)
        assert await reader.readline() == b"\r\n"
        open_requests.append((reader, writer))
        await good(session)
        return 1.0

    async def run() -> None:
        async with Harness(agent, engine) as harness:
            await harness.attempt()
            [(reader, writer)] = open_requests
            writer.write(b'{"prompt": "x"}')
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()

    asyncio.run(run())
    assert len(engine.requests) == 1


def test_closing_ends_the_server_and_what_it_has_under_way() -> None:
    engine = Stuck()
    told: list[Any] = []
    sessions: list[Session] = []

    async def agent(session: Session) -> float:
        sessions.append(session)
        told.append(await post(session, BODY))
        return 1.0

    async def run() -> None:
        harness = Harness(agent, engine)
        running = asyncio.ensure_future(harness.attempt())
        await engine.asked.wait()
        closing = harness.environment.close()
        assert closing is not None
        await asyncio.wait_for(closing, 30)
        with pytest.raises(AttemptFailedError, match="without an answer"):
            await running
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(sessions[0], BODY)
        assert harness.environment.close() is None, "closing again does nothing"

    asyncio.run(run())
    assert (told[0][0], told[0][1]["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("raised", [RunFailedError("the engine died"), ValueError("a bug"), PluginError("broken")])
def test_an_error_of_the_engine_ends_the_attempt_whatever_the_agent_makes_of_it(raised: Exception) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            raise raised

    async def agent(session: Session) -> float:
        status, answer = await post(session, BODY)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        return 1.0

    with pytest.raises(type(raised), match=str(raised)):
        attempt(agent, Broken(lambda request: []))


def test_a_request_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spurline_agents.server._READ_TIMEOUT_S", 0.2)

    async def agent(session: Session) -> None:
        reader, writer = await dial(session)
        writer.write(head(session, "Content-Length: 100") + b"{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()

    assert len(attempt_after(agent).turns) == 1


def test_a_context_that_is_full_is_the_agents_to_handle() -> None:
    codes: list[Any] = []

    async def agent(session: Session) -> float:
        await good(session)
        status, answer = await post(session, {"messages": [{"role": "user", "content": "x" * 300}]})
        codes.append((status, answer["error"]["code"]))
        return 1.0

    engine = ScriptedEngine(lambda request: [TOKENIZER.eos_token_id], context=200)
    assert len(attempt(agent, engine).turns) == 1
    assert codes == [(400, "context_length_exceeded")]
