"""Requests that mean harm, or come from who means none and has gone wrong: each is its client's own trouble."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from harness_requests import BODY, QUESTION, TOKENIZER, good, hello, post, posting
from harness_runs import Harness, attempt
from rl_attempts import says

from spurline.errors import nearest
from spurline_agents import connections, responses, server
from spurline_agents.agents import Session
from spurline_agents.work import SMALL_BYTES
from spurline_rl import chat_front
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory

LONG = "long " * SMALL_BYTES
LIMIT_S = 30.0


def called(arguments: Any) -> dict[str, Any]:
    """A conversation in which the model has called a tool with these arguments."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}, *QUESTION]}


def nested(depth: int) -> str:
    return '{"a": ' + "[" * depth + "]" * depth + "}"


MALFORMED = {
    "UTF-16": json.dumps(BODY).encode("utf-16"),
    "UTF-32": json.dumps(BODY).encode("utf-32"),
    "half of a surrogate pair in bytes": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "half of a surrogate pair as a key": b'{"messages": [{"role": "user", "content": "x", "\\ud83d": 1}]}',
    "infinity": b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    "a number of 5,000 digits": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
    "a seed of 4,300 digits": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 4300 + b"}",
    "300 levels": b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}",
    "50,000 levels in a call": called(nested(50_000)),
    "900 levels in a call": called(nested(900)),
    "a model's name of 2,000 characters": {**BODY, "model": "x" * 2000},
    "100 texts to stop at": {**BODY, "stop": [str(number) for number in range(100)]},
    "a text to stop at of 2,000 characters": {**BODY, "stop": "x" * 2000},
    "2,000 tools": {**BODY, "tools": [{}] * 2000},
    "20,000 messages": {"messages": QUESTION * 20_000},
    "a role of 100,000 characters": {"messages": [{"role": "usr" * 30_000, "content": "x"}]},
    "an unsupported field of 100,000 characters": {**BODY, "suffix": "x" * 100_000},
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_the_clients_mistake_and_costs_no_attempt(body: Any) -> None:
    agent = posting(body)
    trajectory = attempt(agent, hello())
    status, answer = agent.told
    assert status == 400
    assert 0 < len(answer["error"]["message"]) <= 2000
    assert len(trajectory.turns) == 1


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


def test_a_word_of_megabytes_has_no_nearest_name() -> None:
    assert nearest("usr", ("user",)) == "user"
    assert nearest("usr" * 10**6, ("user",)) is None


@pytest.mark.parametrize(
    ("body", "path", "code"),
    [
        ({"prompt": ["hello"] * 200}, "/completions", "max_turns"),
        ({"prompt": "hello", "n": 100}, "/completions", "max_turns"),
        ({**BODY, "n": 100}, "/chat/completions", "max_turns"),
        ({"prompt": LONG}, "/completions", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": LONG}]}, "/chat/completions", "context_length_exceeded"),
    ],
)
def test_what_is_refused_for_its_size_is_not_encoded_before(
    body: Any, path: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = watch_encoding(monkeypatch)
    monkeypatch.setattr(responses, "_PIECE", 1000)
    agent = posting(body, path)
    attempt(agent, hello(), max_turns=50, max_prompt_tokens=3000)
    assert agent.told[0] in (400, 429)
    assert agent.told[1]["error"]["code"] == code
    # Of the good request after it at least.
    assert sum(map(len, encoded)) < (500 if code == "max_turns" else 5000)


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
    monkeypatch.setattr(responses, "encode_batch", watched)
    return texts


Agent = Callable[[Session], Awaitable[float]]


def together(*agents: Agent, engine: ScriptedEngine | None = None, **settings: Any) -> list[Trajectory]:
    """An attempt of each agent, all at the same time in one run."""

    async def agent(session: Session) -> float:
        return await agents[session.sample](session)

    async def run() -> list[Trajectory]:
        async with Harness(agent, engine or hello(), **settings) as harness:
            return list(await asyncio.gather(*(harness.attempt(sample=sample) for sample in range(len(agents)))))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "user", "content": LONG}]}, "/chat/completions"),
        ({"prompt": LONG}, "/completions"),
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

    async def hostile(session: Session) -> float:
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
        return 1.0

    async def other(session: Session) -> float:
        while not is_encoding.is_set():
            await asyncio.sleep(0.001)
        await asyncio.wait_for(good(session), LIMIT_S)
        answered.set()
        return 1.0

    answered = asyncio.Event()
    together(hostile, other)
    assert order == ["first", "second"]


def test_a_request_that_is_worked_on_when_its_client_hangs_up_holds_up_the_sessions_next_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, at_work = threading.Event(), threading.Semaphore(0)

    def wait(text: str) -> None:
        if LONG in text:
            at_work.release()
            assert goes_on.wait(LIMIT_S)

    encoded = watch_encoding(monkeypatch, wait)

    async def hostile(session: Session) -> float:
        for _ in range(8):
            asking = asyncio.ensure_future(post(session, {"prompt": LONG}, "/completions"))
            await asyncio.sleep(0.02)
            asking.cancel()
        await asyncio.wait_for(answered.wait(), LIMIT_S)
        assert sum(LONG in text for text in encoded) == 1
        goes_on.set()
        await good(session)
        return 1.0

    async def other(session: Session) -> float:
        await asyncio.to_thread(at_work.acquire)
        for _ in range(8):
            await good(session)
        answered.set()
        return 1.0

    answered = asyncio.Event()
    together(hostile, other)


def test_the_key_of_a_session_opens_no_other_and_does_not_tell_whether_there_is_one() -> None:
    sessions: list[Session] = []
    told: list[Any] = []

    async def mine(session: Session) -> float:
        sessions.append(session)
        await both.wait()
        return 1.0 if (await good(session)) is None else 0.0

    async def thief(session: Session) -> float:
        while not sessions:
            await asyncio.sleep(0)
        [victim] = sessions
        bases = (victim.base_url, session.base_url.replace("/sessions/", "/sessions/x"), f"{victim.base_url}/nowhere")
        told.extend([await request(session.api_key, base) for base in bases])
        both.set()
        await good(session)
        sessions.append(session)
        return 1.0

    async def request(key: str, base: str) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{base}/chat/completions", json=BODY, headers=headers) as r,
        ):
            return r.status, await r.json()

    both = asyncio.Event()
    together(mine, thief)
    assert sessions[0].api_key != sessions[1].api_key
    assert [status for status, _ in told] == [401] * 3
    assert told[0] == told[1] == told[2]


def test_what_the_model_wrote_in_one_session_is_no_turn_of_another() -> None:
    said: list[Any] = []

    async def first(session: Session) -> float:
        _, answer = await post(session, BODY)
        said.append(answer["choices"][0]["message"])
        await done.wait()
        return 1.0

    async def second(session: Session) -> float:
        while not said:
            await asyncio.sleep(0)
        await post(session, {"messages": [*QUESTION, said[0], *QUESTION]})
        done.set()
        return 1.0

    done = asyncio.Event()
    # The model has written no text that its own tokenizer would encode so.
    odd = ScriptedEngine(lambda request: [*TOKENIZER.encode("a"), *TOKENIZER.encode("b"), TOKENIZER.eos_token_id])
    one, other = together(first, second, engine=odd)
    assert (len(one.turns), len(other.turns), other.info["conversations"]) == (1, 1, 1)


def test_a_call_whose_name_no_client_could_send_back_is_text() -> None:
    said: list[Any] = []

    async def agent(session: Session) -> float:
        tools = [{"type": "function", "function": {"name": "f"}}]
        _, answered = await post(session, {**BODY, "tools": tools})
        said.append(answered["choices"][0])
        status, _ = await post(session, {"messages": [*QUESTION, said[0]["message"], *QUESTION], "tools": tools})
        assert status == 200
        return 1.0

    written = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert len(attempt(agent, ScriptedEngine(says(TOKENIZER, written, "hi"))).turns) == 2
    assert (said[0]["message"]["content"], said[0]["finish_reason"]) == (written, "stop")


async def dial(session: Session) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(session.base_url)
    return await asyncio.open_connection(url.hostname, url.port)


def head(session: Session, *lines: str) -> bytes:
    url = urlsplit(session.base_url)
    first = (f"POST {url.path}/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {session.api_key}")
    return "".join(f"{line}\r\n" for line in (*first, *lines, "")).encode()


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), LIMIT_S)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return not await answer(reader)
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
def test_what_is_no_request_is_answered_and_costs_no_attempt(
    lines: Sequence[str], body: bytes, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(session: Session) -> float:
        reader, writer = await dial(session)
        writer.write(head(session, *lines) + body)
        assert await status(reader) == expected
        writer.close()
        await good(session)
        return 1.0

    with caplog.at_level(logging.DEBUG, "aiohttp.server"):
        assert len(attempt(agent, hello()).turns) == 1
    assert not caplog.records, "a client could fill the log"


def test_a_body_without_an_end_is_refused_when_it_gets_too_large() -> None:
    async def agent(session: Session) -> float:
        reader, writer = await dial(session)
        writer.write(head(session, "Transfer-Encoding: chunked"))
        for _ in range(20):
            writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert await status(reader) == 413
        writer.close()
        await good(session)
        return 1.0

    attempt(agent, hello(), max_body_bytes=10_000)


def with_server(
    agent: Callable[[Session, Any], Awaitable[float]], engine: ScriptedEngine | None = None, **settings: Any
) -> Trajectory:
    """An attempt of an agent that looks into the server."""

    async def run() -> Trajectory:
        async def whole(session: Session) -> float:
            return await agent(session, harness.environment._server)

        async with Harness(whole, engine or hello(), **settings) as harness:
            return await harness.attempt()

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_unfinished_bodies_have_a_part_of_the_memory_and_give_it_back() -> None:
    async def agent(session: Session, served: Any) -> float:
        unfinished = []
        for _ in range(3):
            reader, writer = await dial(session)
            writer.write(head(session, "Content-Length: 5000") + b"x" * 4500)
            unfinished.append((reader, writer))
        # One has no room beside the others, though there is much in the server as a whole.
        waiting = [asyncio.ensure_future(reader.readline()) for reader, _ in unfinished]
        [refused], _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
        assert b" 503 " in refused.result()
        told = unfinished[waiting.index(refused)][0].readuntil(b"}}")
        assert b"Retry-After: 1" in await asyncio.wait_for(told, LIMIT_S)
        assert 0 < served._buffered.num_bytes <= 10_000
        for _, writer in unfinished:
            writer.close()
        await until(lambda: served._buffered.num_bytes == 0)
        await good(session)
        assert served._buffered.num_bytes <= 1000, "what is answered is not held"
        return 1.0

    with_server(agent, max_body_bytes=10_000, max_buffered_bytes=80_000)


def test_the_rest_of_a_body_that_is_refused_takes_no_room_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connections, "_GRACE_S", 0.05)

    async def agent(session: Session, served: Any) -> float:
        reader, writer = await dial(session)
        writer.write(head(session, "Content-Length: 400000"))
        assert await status(reader) == 413
        for _ in range(3):
            writer.write(b"x" * 100_000)
            await writer.drain()
            await good(session)
            assert served._buffered.num_bytes < 1000
        # It may not take for ever either.
        with suppress(ConnectionResetError):
            await answer(reader)
        return 1.0

    with_server(agent, max_body_bytes=10_000, max_buffered_bytes=80_000)


def test_requests_that_come_before_the_last_is_answered_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_encoding = threading.Event(), threading.Event()

    def wait(text: str) -> None:
        if LONG in text:
            is_encoding.set()
            assert goes_on.wait(LIMIT_S)

    watch_encoding(monkeypatch, wait)
    body = json.dumps({"messages": [{"role": "user", "content": LONG}]}).encode()

    async def agent(session: Session, served: Any) -> float:
        _, writer = await dial(session)
        writer.write(head(session, f"Content-Length: {len(body)}") + body)
        await until(is_encoding.is_set)
        [connection] = served._connections._open.values()
        small = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(20):
            writer.write(small * 10_000)
            await asyncio.sleep(0.01)
        assert len(connection._handler._messages) < 1000
        goes_on.set()
        writer.transport.abort()
        await good(session)
        return 1.0

    with_server(agent)


def test_requests_on_their_way_are_counted_by_session() -> None:
    async def agent(session: Session) -> float:
        waiting = []
        for _ in range(18):
            reader, writer = await dial(session)
            writer.write(head(session, "Content-Length: 5000"))
            waiting.append((reader, writer))
            await asyncio.sleep(0.001)
        assert await status(waiting[-1][0]) == 429
        for _, writer in waiting:
            writer.close()
        return 1.0

    async def both(session: Session) -> float:
        await agent(session)
        await asyncio.sleep(0.05)
        await good(session)
        return 1.0

    attempt(both, hello(), max_turns=1)


def test_the_connection_that_has_been_idle_for_longest_makes_room_and_the_busy_ones_stay() -> None:
    async def agent(session: Session, served: Any) -> float:
        idle = [await dial(session) for _ in range(2)]
        await until(lambda: len(served._connections) == 2)
        _, busy = await dial(session)
        assert await is_closed(idle[0][0]), "the oldest one is closed"
        busy.write(head(session, "Content-Length: 5000"))
        idle[1][1].write(head(session, "Content-Length: 5000"))
        await until(lambda: not served._connections._idle)
        reader, _ = await dial(session)
        refused = await answer(reader)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        busy.close()
        await until(lambda: len(served._connections) == 1)
        await good(session)
        return 1.0

    with_server(agent, max_connections=2)


def test_connections_leave_the_process_half_of_the_files_it_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_most_files", lambda: 6)

    async def agent(session: Session, served: Any) -> float:
        opened = [await dial(session) for _ in range(5)]
        assert await is_closed(opened[0][0])
        await until(lambda: len(served._connections) == 3)
        await good(session)
        return 1.0

    with_server(agent)


def test_the_head_of_a_request_has_a_time_limit_and_an_idle_client_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connections, "_GRACE_S", 0.05)

    async def agent(session: Session, served: Any) -> float:
        async with aiohttp.ClientSession() as http:

            async def ask() -> None:
                headers = {"Authorization": f"Bearer {session.api_key}"}
                async with http.get(f"{session.base_url}/models", headers=headers) as told:
                    assert told.status == 200

            await ask()
            silent, _ = await dial(session)
            slow, writer = await dial(session)
            writer.write(head(session)[:-10])
            slower, again = await dial(session)
            again.write(head(session, "Content-Length: 2") + b"{}")
            assert b" 400 " in await asyncio.wait_for(slower.readuntil(b"}}"), LIMIT_S)
            again.write(b"P")
            assert all([await is_closed(reader) for reader in (silent, slow, slower)])
            await ask()
            assert len(served._connections) == 1, "the one of the client that asked again"
        assert served._buffered.num_bytes == 0
        await good(session)
        return 1.0

    with_server(agent)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_cut_off(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_WRITE_TIMEOUT_S", 0.2)
    body = json.dumps({**BODY, "n": 20, "logprobs": True, "stream": stream}).encode()

    async def agent(session: Session, served: Any) -> float:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((urlsplit(session.base_url).hostname, urlsplit(session.base_url).port))
            await until(lambda: len(served._connections) == 1)
            [ours] = served._connections._open
            ours.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.sendall(head(session, f"Content-Length: {len(body)}") + body)
            await until(lambda: ours not in served._connections._open)
        await good(session)
        return 1.0

    script = says(TOKENIZER, *["x" * 250] * 20, "hi")
    assert with_server(agent, engine=ScriptedEngine(script)).rewards == {"reward": 1.0}
