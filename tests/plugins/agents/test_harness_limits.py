"""What the endpoint refuses, and how it says so."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import openai
import pytest
from harness_requests import BODY, QUESTION, good, hello, posting
from harness_runs import Harness, attempt, client

from spurline.errors import ConfigError, DataError
from spurline_agents.agents import Session


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "top_p": 1, "top_k": -1, "presence_penalty": 0, "logit_bias": {}, "seed": None},
        {"user": "me", "metadata": {}, "store": False, "parallel_tool_calls": True, "nobody_knows": 1},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "stop": None, "n": None, "tools": None},
    ],
)
def test_fields_that_ask_for_nothing_else_are_accepted(fields: dict[str, Any]) -> None:
    agent = posting({**BODY, **fields})
    attempt(agent, hello())
    assert agent.told[0] == 200


def test_the_refusal_of_another_temperature_names_the_fix_and_the_setting_ignores_it() -> None:
    body = {**BODY, "temperature": 0.2, "seed": 7, "frequency_penalty": 1}
    agent = posting({**BODY, "temperature": 0.2})
    attempt(agent, hello())
    assert "ignore_sampling: true" in agent.told[1]["error"]["message"]
    agent, engine = posting(body), hello()
    attempt(agent, engine, ignore_sampling=True)
    assert agent.told[0] == 200
    assert engine.requests[0].sampling.temperature == 1.0


def test_where_nothing_is_trained_a_request_samples_as_it_says() -> None:
    agent, engine = posting({**BODY, "temperature": 0.2}), hello()

    async def run() -> None:
        async with Harness(agent, engine) as harness:
            await harness.attempt(policy=harness.policy(any_distribution=True, temperature=0.0))

    asyncio.run(run())
    assert [request.sampling.temperature for request in engine.requests] == [0.2, 0.0]


@pytest.mark.parametrize("shown", ["", "Bearer wrong", "Bearer ", "Basic x"])
def test_a_wrong_key_opens_nothing(shown: str) -> None:
    agent = posting(BODY, Authorization=shown)
    engine = hello()
    attempt(agent, engine)
    status, answer = agent.told
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert len(engine.requests) == 1


def test_the_openai_client_raises_its_own_errors() -> None:
    raised: list[type] = []

    async def agent(session: Session) -> float:
        wrong_key = openai.AsyncOpenAI(base_url=session.base_url, api_key="wrong", max_retries=0)
        elsewhere = openai.AsyncOpenAI(
            base_url=session.base_url.replace("/sessions/", "/sessions/x"), api_key=session.api_key, max_retries=0
        )
        async with wrong_key, elsewhere, client(session) as right:
            for api, temperature in ((wrong_key, 1.0), (elsewhere, 1.0), (right, 0.1)):
                try:
                    await api.chat.completions.create(model="policy", messages=QUESTION, temperature=temperature)
                except openai.APIStatusError as error:
                    raised.append(type(error))
            await right.chat.completions.create(model="policy", messages=QUESTION)
        return 1.0

    attempt(agent, hello())
    assert raised == [openai.AuthenticationError, openai.AuthenticationError, openai.BadRequestError]


@pytest.mark.parametrize("path", ["/embeddings", "/chat"])
def test_other_addresses_are_answered_with_those_that_there_are(path: str) -> None:
    agent = posting(BODY, path)
    attempt(agent, hello())
    status, answer = agent.told
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert "/v1/chat/completions" in answer["error"]["message"]


def test_the_key_of_the_config_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    async def agent(session: Session) -> float:
        keys.append(session.api_key)
        await good(session)
        return 1.0

    monkeypatch.setenv("HARNESS_KEY", "a-key")
    attempt(agent, hello(), api_key_env="HARNESS_KEY")
    attempt(agent, hello())
    attempt(agent, hello())
    assert keys[0] == "a-key"
    assert len(set(keys)) == 3, "a key of each run's own"
    monkeypatch.delenv("HARNESS_KEY")
    with pytest.raises(ConfigError, match="HARNESS_KEY, which is not set"):
        attempt(agent, hello(), api_key_env="HARNESS_KEY")


def test_a_body_over_the_limit_is_refused() -> None:
    agent = posting({"messages": [{"role": "user", "content": "x" * 5000}]})
    attempt(agent, hello(), max_body_bytes=4000)
    status, answer = agent.told
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert "4000" in answer["error"]["message"]


def test_turns_over_the_limit_are_refused_and_not_asked_again_by_the_client() -> None:
    refusals: list[openai.RateLimitError] = []

    def agent(session: Session) -> float:
        api = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        with api:
            for _ in range(3):
                api.chat.completions.create(model="policy", messages=QUESTION)
            try:
                api.chat.completions.create(model="policy", messages=QUESTION)
            except openai.RateLimitError as error:
                refusals.append(error)
        return 0.5

    trajectory = attempt(agent, hello(), max_turns=3)
    assert len(trajectory.turns) == 3
    [refusal] = refusals
    assert refusal.code == "max_turns"
    assert "environment.max_turns" in refusal.message


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            attempt(good, hello(), port=port)  # type: ignore[arg-type]


def test_the_endpoint_listens_on_loopback_and_agents_are_told_the_public_url() -> None:
    urls: list[str] = []

    async def agent(session: Session) -> float:
        urls.append(session.base_url)
        inside = session.base_url.replace("http://agents.example", "http://127.0.0.1")
        async with openai.AsyncOpenAI(base_url=inside, api_key=session.api_key) as api:
            await api.chat.completions.create(model="policy", messages=QUESTION)
        return 1.0

    async def local(session: Session) -> float:
        urls.append(session.base_url)
        await good(session)
        return 1.0

    attempt(local, hello())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    attempt(agent, hello(), port=port, public_url=f"http://agents.example:{port}/")
    assert urls[0].startswith("http://127.0.0.1:")
    assert urls[1].startswith(f"http://agents.example:{port}/sessions/")
    assert urls[1].endswith("/v1")


def test_a_row_that_is_malformed_is_named() -> None:
    async def run() -> None:
        async with Harness(good, hello()) as harness:  # type: ignore[arg-type]
            await harness.attempt({"messages": [{"role": "user"}]})

    with pytest.raises(DataError, match=r"rows\.jsonl:1: messages\[0\]"):
        asyncio.run(run())
