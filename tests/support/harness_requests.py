"""Raw requests to the endpoint of an attempt, and engines that answer at once or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from harness_runs import attempt
from rl_attempts import encode, says

from spurline_agents.agents import Session
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
QUESTION: Any = [{"role": "user", "content": "hello"}]
BODY = {"model": "policy", "messages": QUESTION}


def hello() -> ScriptedEngine:
    return ScriptedEngine(lambda request: [*encode(TOKENIZER, "hi"), TOKENIZER.eos_token_id])


class Stuck(ScriptedEngine):
    """Generates nothing until it is told to; `cancelled` counts requests that were given up."""

    def __init__(self) -> None:
        super().__init__(says(TOKENIZER, *(str(number) for number in range(10))))
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Semaphore(0)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return await super().generate(request)


async def post(session: Session, body: Any, path: str = "/chat/completions", **headers: str) -> tuple[int, Any]:
    """Send a raw request and return status and JSON. body: bytes, or a value to encode as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {session.api_key}", **headers}
    async with aiohttp.ClientSession() as http, http.post(session.base_url + path, data=raw, headers=headers) as answer:
        return answer.status, await answer.json()


async def good(session: Session) -> None:
    assert (await post(session, BODY))[0] == 200


def posting(body: Any, path: str = "/chat/completions", **headers: str) -> Any:
    """An agent that makes one request like this, and then a good one. `agent.told` holds the answers."""

    async def agent(session: Session) -> float:
        agent.told = await post(session, body, path, **headers)  # type: ignore[attr-defined]
        await good(session)
        return 1.0

    return agent


def attempt_after(
    trouble: Callable[[Session], Awaitable[None]], engine: ScriptedEngine | None = None, **settings: Any
) -> Trajectory:
    """The attempt of an agent that makes trouble, and then a good request."""

    async def agent(session: Session) -> float:
        await trouble(session)
        await good(session)
        return 1.0

    return attempt(agent, engine or hello(), **settings)


async def dial(session: Session) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(session.base_url)
    return await asyncio.open_connection(url.hostname, url.port)


def head(session: Session, *lines: str, path: str = "/chat/completions") -> bytes:
    """The head of a request with these lines."""
    url = urlsplit(session.base_url)
    first = (f"POST {url.path}{path} HTTP/1.1", "Host: x", f"Authorization: Bearer {session.api_key}")
    return "".join(f"{line}\r\n" for line in (*first, *lines, "")).encode()
