"""Requests that are refused, wrong, large, slow, many, or harmful: none costs an attempt or holds others up."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import random
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
from every_run import SOAK
from harness_requests import BODY, QUESTION, TOKENIZER, attempt_after, dial, good, head, hello, post, posting
from harness_runs import Harness, attempt, client
from rl_attempts import says

from spurline.errors import ConfigError, DataError
from spurline_agents import server
from spurline_agents.agents import Session
from spurline_agents.chat_completions import ChatBody
from spurline_agents.messages import MessagesBody
from spurline_agents.responses_api import ResponsesBody
from spurline_agents.sessions import SMALL_BYTES
from spurline_rl import chat_front
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text import prompts

LONG = "long " * SMALL_BYTES
LIMIT_S = 30.0


def called(arguments: Any) -> dict[str, Any]:
    """A conversation in which the model has called a tool with these arguments."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}, *QUESTION]}


def said(content: Any, role: Any = "user") -> list[Any]:
    return [{"role": role, "content": content}]


def message(content: bytes, more: bytes = b"") -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + content + b'"}]' + more + b"}"


def nested(depth: int) -> str:
    return '{"a": ' + "[" * depth + "]" * depth + "}"


MALFORMED = {
    "nothing": (b"", None, "invalid_json"),
    "half of an object": (b"{", None, "invalid_json"),
    "a list": (b"[]", None, "invalid_json"),
    "no UTF-8": (b"\xff\xfe", None, "invalid_json"),
    "UTF-16": (json.dumps(BODY).encode("utf-16"), None, "invalid_json"),
    "100,000 levels": (b"[" * 100_000, None, None),
    "300 levels": (b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", None, "invalid_json"),
    "half of a surrogate pair": (message(b"\\ud800"), None, "invalid_json"),
    "half of a surrogate pair in bytes": (message(b"\xed\xa0\x80"), None, "invalid_json"),
    "half of a surrogate pair as a key": (message(b'x", "\\ud83d": "1'), None, "invalid_json"),
    "infinity": (message(b"x", b', "temperature": Infinity'), None, "invalid_json"),
    "not a number": (message(b"x", b', "temperature": NaN'), None, "invalid_json"),
    "a number of 5,000 digits": (message(b"x", b', "seed": ' + b"9" * 5000), None, "invalid_json"),
    "a seed of 4,300 digits": (message(b"x", b', "seed": ' + b"9" * 4300), "seed", "sampling_differs"),
    "no messages": ({}, "messages", None),
    "an empty list of messages": ({"messages": []}, "messages", None),
    "a text as messages": ({"messages": "hello"}, "messages", None),
    "20,000 messages": ({"messages": QUESTION * 20_000}, "messages", None),
    "a message without content": ({"messages": [{"role": "user"}]}, "messages[0]", None),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", None),
    "a role of 90,000 characters": ({"messages": [{"role": "usr" * 30_000, "content": "x"}]}, "messages[0].role", None),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", None),
    "900 levels in a call": (called(nested(900)), None, None),
    "20,000 levels in a call": (called(nested(20_000)), None, None),
    "no choices": ({**BODY, "n": 0}, "n", None),
    "10,000 choices": ({**BODY, "n": 10_000}, "n", None),
    "no tokens": ({**BODY, "max_tokens": 0}, "max_tokens", None),
    "a temperature in words": ({**BODY, "temperature": "hot"}, "temperature", None),
    "logprobs of 5 tokens": ({**BODY, "top_logprobs": 5}, "top_logprobs", None),
    "a tool that is a name": ({**BODY, "tools": ["add"]}, "tools", None),
    "2,000 tools": ({**BODY, "tools": [{}] * 2000}, "tools", None),
    "a model's name of 2,000 characters": ({**BODY, "model": "x" * 2000}, "model", None),
    "100 texts to stop at": ({**BODY, "stop": [str(number) for number in range(100)]}, "stop", None),
    "a text to stop at of 2,000 characters": ({**BODY, "stop": "x" * 2000}, "stop", None),
    "JSON as format": (
        {**BODY, "response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
    ),
    "a call that is required": ({**BODY, "tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    "a suffix of 100,000 characters": ({**BODY, "suffix": "x" * 100_000}, "suffix", "unsupported_parameter"),
    "another temperature": ({**BODY, "temperature": 0.5}, "temperature", "sampling_differs"),
    "another top_p": ({**BODY, "top_p": 0.9}, "top_p", "sampling_differs"),
    "another top_k": ({**BODY, "top_k": 5}, "top_k", "sampling_differs"),
    "a seed": ({**BODY, "seed": 1}, "seed", "sampling_differs"),
    "a penalty": ({**BODY, "presence_penalty": 0.5}, "presence_penalty", "sampling_differs"),
}


@pytest.mark.parametrize(("body", "param", "code"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_are_refused_and_cost_no_attempt(body: Any, param: str | None, code: str | None) -> None:
    agent = posting(body)
    trajectory = attempt(agent, hello())
    status, answer = agent.told
    error = answer["error"]
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) <= 2000
    if param or code:
        assert (error["param"], error["code"]) == (param, code)
    assert len(trajectory.turns) == 1, "what was refused is no turn"


ASKED = {"messages": QUESTION, "max_tokens": 4}
ELSEWHERE = {
    "no max_tokens": ("/messages", {"messages": QUESTION}, "max_tokens", None),
    "a block that is a text": ("/messages", {**ASKED, "messages": said(["x"])}, "messages[0].content[0]", None),
    "a block without a type": ("/messages", {**ASKED, "messages": said([{}])}, "messages[0].content[0]", None),
    "a document": ("/messages", {**ASKED, "messages": said([{"type": "document"}])}, "messages[0].content[0]", None),
    "an image as a result": (
        "/messages",
        {**ASKED, "messages": said([{"type": "tool_result", "content": [{"type": "image"}]}])},
        "messages[0].content[0].content[0]",
        None,
    ),
    "a call without a name": (
        "/messages",
        {**ASKED, "messages": [*said([{"type": "tool_use", "input": {}}], "assistant"), *QUESTION]},
        "messages[0][0].tool_calls[0]",
        None,
    ),
    "a wizard": ("/messages", {**ASKED, "messages": said("x", ["wizard"])}, "messages[0][0].role", None),
    "a turn to continue": (
        "/messages",
        {**ASKED, "messages": said("x", "assistant")},
        "messages",
        "unsupported_parameter",
    ),
    "a tool of the server": ("/messages", {**ASKED, "tools": [{"type": "web_search", "name": "x"}]}, "tools[0]", None),
    "a call of any tool": (
        "/messages",
        {**ASKED, "tool_choice": {"type": "any"}},
        "tool_choice",
        "unsupported_parameter",
    ),
    "a schema": (
        "/messages",
        {**ASKED, "output_config": {"format": {}}},
        "output_config.format",
        "unsupported_parameter",
    ),
    "100 texts to stop at": ("/messages", {**ASKED, "stop_sequences": ["x"] * 100}, "stop_sequences", None),
    "another temperature": ("/messages", {**ASKED, "temperature": 0.5}, "temperature", "sampling_differs"),
    "two choices": ("/messages", {**ASKED, "n": 2}, "n", None),
    "a wrong count": ("/messages/count_tokens", {"messages": []}, "messages", None),
    "no input": ("/responses", {}, "input", None),
    "an input file": ("/responses", {"input": said([{"type": "input_file"}])}, "input[0].content[0]", None),
    "an item of the server": ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", None),
    "an item without a role": ("/responses", {"input": [{"content": "x"}]}, "input[0].role", None),
    "arguments that are no JSON": (
        "/responses",
        {"input": [{"type": "reasoning"}, {"type": "function_call", "name": "f", "arguments": "{"}]},
        "input[1][0].tool_calls[0].arguments",
        None,
    ),
    "a built-in tool": ("/responses", {"input": "x", "tools": [{"type": "mcp"}]}, "tools[0]", None),
    "a schema of the text": (
        "/responses",
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
        "text.format",
        "unsupported_parameter",
    ),
    "in the background": ("/responses", {"input": "x", "background": True}, "background", "unsupported_parameter"),
}


@pytest.mark.parametrize(("path", "body", "param", "code"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_malformed_requests_of_other_apis_are_refused_in_their_own_form(
    path: str, body: Any, param: str, code: str | None
) -> None:
    agent = posting(body, path)
    trajectory = attempt(agent, hello())
    status, answer = agent.told
    error = answer["error"]
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
    assert answer.get("type") == ("error" if path.startswith("/messages") else None)
    assert len(trajectory.turns) == 1, "what was refused is no turn"


def test_fields_that_ask_for_nothing_else_are_accepted() -> None:
    sampling = {"temperature": 1.0, "top_p": 1, "top_k": -1, "presence_penalty": 0, "logit_bias": {}, "seed": None}
    unknown = {"user": "me", "metadata": {}, "store": False, "parallel_tool_calls": True, "nobody_knows": 1}
    neutral = {"response_format": {"type": "text"}, "tool_choice": "auto", "stop": None, "n": None, "tools": None}
    agent = posting({**BODY, **sampling, **unknown, **neutral})
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
    agent = posting(BODY, **{"Authorization": shown, "x-api-key": shown.removeprefix("Bearer ")})
    engine = hello()
    attempt(agent, engine)
    status, answer = agent.told
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert len(engine.requests) == 1


def test_the_openai_client_raises_its_own_errors() -> None:
    raised: list[openai.APIStatusError] = []

    async def agent(session: Session) -> float:
        # Retries are the client's own: what is refused must not be asked again.
        async with client(session, max_retries=2) as api:
            wrong_key = api.with_options(api_key="wrong")
            for asked, temperature in ((wrong_key, 1.0), (api, 0.1), (api, 1.0), (api, 1.0)):
                try:
                    await asked.chat.completions.create(model="policy", messages=QUESTION, temperature=temperature)
                except openai.APIStatusError as error:
                    raised.append(error)
        return 1.0

    # The refused temperature has taken its turn.
    assert len(attempt(agent, hello(), max_turns=2).turns) == 1
    assert [type(error) for error in raised] == [
        openai.AuthenticationError,
        openai.BadRequestError,
        openai.RateLimitError,
    ]
    assert raised[-1].code == "max_turns"


@pytest.mark.parametrize("path", ["/embeddings", "/chat"])
def test_other_addresses_are_answered_with_those_that_there_are(path: str) -> None:
    agent = posting(BODY, path)
    attempt(agent, hello())
    status, answer = agent.told
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert " /chat/completions, " in answer["error"]["message"]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            attempt(good, hello(), port=port)  # type: ignore[arg-type]


def test_agents_are_told_the_public_url() -> None:
    urls: list[str] = []

    async def agent(session: Session) -> float:
        urls.append(session.base_url)
        inside = session.base_url.replace("http://agents.example", "http://127.0.0.1")
        async with openai.AsyncOpenAI(base_url=inside, api_key=session.api_key) as api:
            await api.chat.completions.create(model="policy", messages=QUESTION)
        return 1.0

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    attempt(agent, hello(), port=port, public_url=f"http://agents.example:{port}/")
    assert urls == [f"http://agents.example:{port}/v1"]


def test_a_row_that_is_malformed_is_named() -> None:
    async def run() -> None:
        async with Harness(good, hello()) as harness:  # type: ignore[arg-type]
            await harness.attempt({"messages": [{"role": "user"}]})

    with pytest.raises(DataError, match=r"rows\.jsonl:1: messages\[0\]"):
        asyncio.run(run())


@pytest.mark.parametrize("prompt", ["", [], [[1], []], [5, 10**6], [-1]])
def test_a_prompt_that_means_nothing_is_refused(prompt: Any) -> None:
    agent = posting({"prompt": prompt}, "/completions")
    attempt(agent, hello())
    assert (agent.told[0], agent.told[1]["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("item", [b"[],", b'{},"":', b"0,"])
def test_json_of_too_many_values_is_refused_unread(item: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("spurline_agents.bodies.from_json")
    agent = posting(b'{"prompt": [' + item * 5000 + b"0]}", "/completions")
    with pytest.raises(NameError):
        attempt(agent, hello(), max_body_bytes=2**20)
    with pytest.raises(NameError):
        # The request after it, which is read.
        attempt(agent, hello(), max_body_bytes=2**16)
    assert agent.told[0] == 413
    assert agent.told[1]["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": ["hello"] * 200}, "/completions"),
        ({"prompt": "hello", "n": 100}, "/completions"),
        ({**BODY, "n": 100}, "/chat/completions"),
    ],
)
def test_a_request_for_too_many_turns_is_refused_before_it_is_encoded(
    body: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = watch_encoding(monkeypatch)
    agent = posting(body, path)
    attempt(agent, hello(), max_turns=50)
    assert (agent.told[0], agent.told[1]["error"]["code"]) == (429, "max_turns")
    # The good request after it is encoded.
    assert sum(map(len, encoded)) < 500


def watch_encoding(monkeypatch: pytest.MonkeyPatch, wait: Callable[[str], Any] = len) -> list[str]:
    """The texts that are encoded; `wait` is called with each before."""
    texts: list[str] = []
    encode = chat_front.encode_batch

    def watched(tokenizer: Any, batch: list[str], is_chat: bool) -> Any:
        texts.extend(batch)
        for text in batch:
            wait(text)
        return encode(tokenizer, batch, is_chat)

    monkeypatch.setattr(chat_front, "encode_batch", watched)
    monkeypatch.setattr(prompts, "encode_batch", watched)
    return texts


Agent = Callable[[Session], Awaitable[None]]


def together(*agents: Agent, engine: ScriptedEngine | None = None, **settings: Any) -> list[Trajectory]:
    """An attempt of each agent, all at the same time in one run."""

    async def agent(session: Session) -> float:
        await agents[session.sample](session)
        return 1.0

    async def run() -> list[Trajectory]:
        async with Harness(agent, engine or hello(), **settings) as harness:
            return list(await asyncio.gather(*(harness.attempt(sample=sample) for sample in range(len(agents)))))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": said(LONG)}, "/chat/completions"),
        ({"prompt": LONG}, "/completions"),
        ({"messages": said(LONG)}, "/messages/count_tokens"),
        ({"input": LONG}, "/responses"),
    ],
)
def test_while_a_long_prompt_is_encoded_others_are_answered_and_the_sessions_own_wait(
    body: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, is_encoding = threading.Event(), threading.Event()

    def wait(text: str) -> None:
        if LONG in text:
            is_encoding.set()
            assert goes_on.wait(LIMIT_S)

    watch_encoding(monkeypatch, wait)
    order: list[str] = []

    async def hostile(session: Session) -> None:
        async def ask(name: str, body: Any, path: str) -> None:
            await post(session, body, path)
            order.append(name)

        first = asyncio.ensure_future(ask("first", body, path))
        while not is_encoding.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(ask("second", BODY, "/chat/completions"))
        await asyncio.wait_for(answered.wait(), LIMIT_S)
        assert not second.done(), "the order of turns must not depend on threads"
        goes_on.set()
        await asyncio.gather(first, second)
        await good(session)

    async def other(session: Session) -> None:
        while not is_encoding.is_set():
            await asyncio.sleep(0.001)
        await asyncio.wait_for(good(session), LIMIT_S)
        answered.set()

    answered = asyncio.Event()
    together(hostile, other)
    assert order == ["first", "second"]


def test_a_request_whose_client_hangs_up_holds_up_the_sessions_next_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, at_work = threading.Event(), threading.Semaphore(0)

    def wait(text: str) -> None:
        if LONG in text:
            at_work.release()
            assert goes_on.wait(LIMIT_S)

    encoded = watch_encoding(monkeypatch, wait)

    async def hostile(session: Session) -> None:
        for _ in range(8):
            asking = asyncio.ensure_future(post(session, {"prompt": LONG}, "/completions"))
            await asyncio.sleep(0.02)
            asking.cancel()
        await asyncio.wait_for(answered.wait(), LIMIT_S)
        assert sum(LONG in text for text in encoded) == 1
        goes_on.set()
        await good(session)

    async def other(session: Session) -> None:
        await asyncio.to_thread(at_work.acquire)
        for _ in range(8):
            await good(session)
        answered.set()

    answered = asyncio.Event()
    together(hostile, other)


def test_what_the_model_wrote_in_one_session_is_no_turn_of_another() -> None:
    said: list[Any] = []

    async def first(session: Session) -> None:
        _, answer = await post(session, BODY)
        said.append(answer["choices"][0]["message"])
        await done.wait()

    async def second(session: Session) -> None:
        while not said:
            await asyncio.sleep(0)
        await post(session, {"messages": [*QUESTION, said[0], *QUESTION]})
        done.set()

    done = asyncio.Event()
    # The model has written no text that its own tokenizer would encode so.
    odd = ScriptedEngine(lambda request: [*TOKENIZER.encode("a"), *TOKENIZER.encode("b"), TOKENIZER.eos_token_id])
    one, other = together(first, second, engine=odd)
    assert (len(one.turns), len(other.turns), other.info["conversations"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        pytest.param(f'{{"name": "f", "arguments": {nested(192)}}}', id="192 levels, in a request of eight more"),
    ],
)
def test_a_call_that_no_client_could_send_back_is_text(call: str) -> None:
    said: list[Any] = []

    async def agent(session: Session) -> float:
        tools = [{"type": "function", "function": {"name": "f"}}]
        _, answered = await post(session, {**BODY, "tools": tools})
        said.append(answered["choices"][0])
        status, _ = await post(session, {"messages": [*QUESTION, said[0]["message"], *QUESTION], "tools": tools})
        assert status == 200
        return 1.0

    async def run() -> Trajectory:
        async with Harness(agent, ScriptedEngine(says(TOKENIZER, written, "hi"))) as harness:
            return await harness.attempt(policy=harness.policy(max_new_tokens=1024))

    written = f"<tool_call>{call}</tool_call>"
    assert len(asyncio.run(run()).turns) == 2
    assert (said[0]["message"]["content"], said[0]["finish_reason"]) == (written, "stop")


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return not await asyncio.wait_for(reader.read(), LIMIT_S)
    except ConnectionResetError:
        return True


async def status(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), LIMIT_S)).split()[1])


@pytest.mark.parametrize(
    ("lines", "body", "expected"),
    [
        (("Content-Length: 10", "Content-Encoding: gzip"), b"0123456789", 415),
        (("Content-Length: 17000000",), b"", 413),
        (("Transfer-Encoding: chunked",), b"zz\r\n", 400),
        (("Transfer-Encoding: chunked",), b"5\r\n{}   \r\nzz\r\n", 400),
        (("Content-Length: 5", "Transfer-Encoding: chunked"), b"0\r\n\r\n", 400),
        (("Content-Length: -5",), b"", 400),
        (("Broken",), b"", 400),
        (tuple(f"X-{number}: 1" for number in range(500)), b"", 400),
        (("X: " + "x" * 100_000,), b"", 400),
        (("Expect: a miracle",), b"", 417),
    ],
)
def test_broken_http_is_answered_and_costs_no_attempt(
    lines: Sequence[str], body: bytes, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(session: Session) -> None:
        reader, writer = await dial(session)
        writer.write(head(session, *lines) + body)
        assert await status(reader) == expected
        writer.close()

    with caplog.at_level(logging.DEBUG, "aiohttp.server"):
        assert len(attempt_after(agent).turns) == 1
    assert not caplog.records, "a client could fill the log"


def test_a_body_without_an_end_is_refused_when_it_gets_too_large() -> None:
    async def agent(session: Session) -> None:
        reader, writer = await dial(session)
        writer.write(head(session, "Transfer-Encoding: chunked"))
        for _ in range(20):
            writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert await status(reader) == 413
        writer.close()

    attempt_after(agent, max_body_bytes=10_000)


def test_a_session_keeps_few_bodies_in_memory_and_waits_for_itself() -> None:
    async def hostile(session: Session) -> None:
        unfinished = [await dial(session) for _ in range(4)]
        for _, writer in unfinished:
            writer.write(head(session, "Content-Length: 5000") + b"x" * 4000)
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(good(session))
        await asyncio.wait_for(answered.wait(), LIMIT_S)
        assert not waiting.done()
        for _, writer in unfinished:
            writer.close()
        await asyncio.wait_for(waiting, LIMIT_S)

    async def other(session: Session) -> None:
        await asyncio.sleep(0.2)
        await asyncio.wait_for(good(session), LIMIT_S)
        answered.set()

    answered = asyncio.Event()
    together(hostile, other)


def test_a_session_has_few_requests_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CALLS", 2)

    async def agent(session: Session) -> None:
        unfinished = [await dial(session) for _ in range(2)]
        for _, writer in unfinished:
            writer.write(head(session, "Content-Length: 5000") + b"x")
        await asyncio.sleep(0.1)
        reader, writer = await dial(session)
        writer.write(head(session, "Content-Length: 2") + b"{}")
        assert b'"too_many_requests"' in await asyncio.wait_for(reader.readuntil(b"}}"), LIMIT_S)
        for _, writer in unfinished:
            writer.close()
        await asyncio.sleep(0.1)

    attempt_after(agent)


def test_the_bytes_of_a_request_are_gone_while_the_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    async def agent(session: Session) -> float:
        await good(session)
        return 1.0

    class Raw(bytes):
        def __del__(self) -> None:
            alive.remove(1)

    receive = server._receive

    async def received(request: Any, limit: int) -> bytes:
        raw = Raw(await receive(request, limit))
        assert request._read_bytes is None, "aiohttp keeps a copy"
        alive.append(1)
        return raw

    def reply(request: Any) -> Any:
        seen.append(len(alive))
        return says(TOKENIZER, "hello")(request)

    seen: list[int] = []
    monkeypatch.setattr(server, "_receive", received)
    attempt(agent, ScriptedEngine(reply))
    assert seen == [0]


def test_idle_connections_and_slow_heads_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_TIMEOUT_S", 0.3)

    async def agent(session: Session) -> None:
        silent, _ = await dial(session)
        slow, writer = await dial(session)
        writer.write(head(session)[:-10])
        second, again = await dial(session)
        again.write(head(session, "Content-Length: 2") + b"{}")
        assert b" 400 " in await asyncio.wait_for(second.readuntil(b"}}"), LIMIT_S)
        again.write(b"P")
        assert all([await is_closed(reader) for reader in (silent, slow, second)])

    attempt_after(agent)


@pytest.mark.parametrize(("most", "most_files"), [(2, 1000), (1000, 4)])
def test_connections_beyond_the_limit_replace_idle_ones_and_leave_the_process_half_of_its_files(
    most: int, most_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", most)
    monkeypatch.setattr(server.resource, "getrlimit", lambda kind: (most_files, most_files))

    async def agent(session: Session) -> None:
        opened = [await dial(session) for _ in range(3)]
        assert await is_closed(opened[0][0]), "it is the oldest"
        for _, writer in opened[1:]:
            writer.write(head(session, "Content-Length: 5000") + b"x")
        await asyncio.sleep(0.05)
        refused, _ = await dial(session)
        assert await status(refused) == 503
        opened[1][1].close()
        await asyncio.sleep(0.05)

    attempt_after(agent)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_cut_off(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_WRITE_TIMEOUT_S", 0.2)
    body = json.dumps({**BODY, "n": 20, "logprobs": True, "stream": stream}).encode()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def agent(session: Session) -> float:
        connections = harness[0].environment._server._runner.server  # type: ignore[union-attr]
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((urlsplit(session.base_url).hostname, urlsplit(session.base_url).port))
            await until(lambda: len(connections.connections) == 1)
            [ours] = connections.connections
            ours.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.sendall(head(session, f"Content-Length: {len(body)}") + body)
            await until(lambda: not connections.connections)
        await good(session)
        return 1.0

    harness: list[Any] = []

    async def run() -> Trajectory:
        async with Harness(agent, ScriptedEngine(says(TOKENIZER, *["x" * 250] * 20, "hi"))) as made:
            harness.append(made)
            return await made.attempt()

    assert asyncio.run(run()).rewards == {"reward": 1.0}


GARBAGE: Any = (None, True, -1, 10**30, 1e300, "", "\u2028", [], [[]], {}, {"x": [1]}, [None], "[[", "\0")
FIELDS = sorted(
    {
        *(
            field
            for kind in (ChatBody, MessagesBody, ResponsesBody)
            for field in (*kind.model_fields, *kind.unsupported)
        ),
        *("max_completion_tokens", "max_output_tokens", "prompt", "response_format", "presence_penalty", "echo"),
    }
)
CALL = {"id": "c", "call_id": "c", "name": "f", "input": {"a": 1}, "arguments": "{}", "output": "1", "tool_use_id": "c"}
REQUESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "/chat/completions": lambda: dict(BODY),
    "/completions": lambda: {"prompt": ["a", [5, 6]]},
    "/messages": lambda: {"messages": [*QUESTION, *blocks("assistant", "thinking", "text", "tool_use"), *answered()]},
    "/messages/count_tokens": lambda: {"messages": blocks("user", "text"), "system": [{"type": "text", "text": "s"}]},
    "/responses": lambda: {"input": [*QUESTION, *items("reasoning", "function_call", "function_call_output")]},
}
"""A valid request of each API."""


def items(*kinds: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": "x", "thinking": "x", **CALL} for kind in kinds]


def blocks(role: str, *kinds: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": items(*kinds)}]


def answered() -> list[dict[str, Any]]:
    return blocks("user", "tool_result", "text")


def put_garbage(value: Any, draws: random.Random) -> Any:
    """Replace one part of a request, at any depth."""
    if not isinstance(value, (dict, list)) or not value or draws.random() < 0.2:
        return draws.choice(GARBAGE)
    key = draws.choice(list(value)) if isinstance(value, dict) else draws.randrange(len(value))
    value[key] = put_garbage(value[key], draws)
    return value


STRANGE_HEADS = (
    b"GET / HTTP/9.9\r\n",
    b"\x16\x03\x01\x02\0",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"Content-Length: x\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"Authorization: no\r\n",
)
STATUSES = {0, 100, 200, 400, 401, 404, 405, 408, 413, 415, 417, 429, 503}
"""The statuses that a client may get; 0 is a connection that is closed, or waits for more."""


async def send_any(session: Session, draws: random.Random) -> int:
    """Send a valid, malformed, slow or huge request, and return the status of the answer."""
    path, valid = draws.choice(list(REQUESTS.items()))
    body: Any = {**valid(), "max_tokens": 4, "stream": draws.random() < 0.2}
    if path.endswith("completions"):
        body["n"] = draws.choice([1, 2])
    begin, strange, limit_s, pieces = b"", b"", LIMIT_S, 1
    kind = draws.choice(["valid", "valid", "field", "part", "nested", "bytes", "head", "slow", "huge"])
    if kind == "field":
        body[draws.choice(FIELDS)] = draws.choice(GARBAGE)
    if kind == "part":
        body = put_garbage(copy.deepcopy(body), draws)
    if kind == "huge":
        text = draws.choice(["x", "long words ", "\n", "\u00e9", "[,", " "]) * draws.randrange(10_000, 100_000)
        huge = [
            {"prompt": text},
            {"messages": [{"role": text, "content": text}]},
            {**BODY, "model": text},
            {**body, "input": text, "system": text},
        ]
        body = draws.choice(huge)
    raw = json.dumps(body).encode()
    if kind == "nested":
        depth = draws.choice([10, 190, 1000, 100_000])
        raw = raw[:-1] + f', "{draws.choice(FIELDS)}": {"[" * depth}{"]" * depth}'.encode() + b"}"
    if kind == "bytes":
        place = draws.randrange(len(raw))
        raw = raw[:place] + draws.randbytes(draws.randrange(4)) + raw[place + 1 :]
    if kind == "slow":
        pieces = draws.randrange(2, 10)
    if kind == "head":
        strange, limit_s = draws.choice(STRANGE_HEADS), 0.5
        if b":" not in strange:
            begin, strange = strange, b""
    whole = head(session, "Connection: close", f"Content-Length: {len(raw)}", path=path)
    whole = begin + whole[:-2] + strange + b"\r\n" + raw
    hangs_up = pieces > 1 and draws.random() < 0.5
    reader, writer = await dial(session)
    try:
        size = len(whole) // pieces + 1
        for start in range(0, len(whole) - hangs_up, size):
            writer.write(whole[start : start + size - hangs_up])
            await writer.drain()
        if hangs_up:
            return 0
        async with asyncio.timeout(limit_s):
            answered = await reader.read()
        return int(answered.split()[1]) if answered else 0
    except (ConnectionError, TimeoutError):
        assert limit_s < LIMIT_S, "no answer"
        return 0
    finally:
        writer.close()


def test_requests_of_all_kinds_end_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPURLINE_SOAK=1 sends 20,000, and looks at the memory."""
    if SOAK:
        monkeypatch.setattr("harness_runs.LIMIT_S", 7200.0)
    statuses: Counter[int] = Counter()
    memory: list[int] = []
    engine = hello()

    async def agent(session: Session) -> None:
        draws = random.Random(session.sample)
        for number in range(5000 if SOAK else 60):
            statuses[await send_any(session, draws)] += 1
            if number % 500 == 499:
                # The engine keeps all prompts, also long ones that are refused.
                engine.requests.clear()
                engine.exchanges.clear()
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)
        await good(session)

    trajectories = together(*[agent] * 4, engine=engine, max_turns=100_000, max_body_bytes=2**18)
    assert [trajectory.rewards for trajectory in trajectories] == [{"reward": 1.0}] * 4
    assert set(statuses) <= STATUSES, statuses
    assert statuses[200] > statuses.total() / 5, statuses
    assert not memory or memory[-1] - memory[len(memory) // 4] < 50 * 2**20, memory
