"""Serve the sessions of a run over HTTP, in the APIs of OpenAI and Anthropic, and report errors as those do.

One server serves all attempts, on the event loop of the environment. The API key tells which attempt sends a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from spurline.errors import ConfigError
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.bodies import ApiError
from spurline_agents.chat_completions import ChatCompletions, Completions
from spurline_agents.configs import EndpointConfig
from spurline_agents.messages import AnthropicMessages
from spurline_agents.responses import MODEL_NAME, Choice, Dialect
from spurline_agents.responses_api import Responses
from spurline_agents.sessions import SMALL_BYTES, LiveSession
from spurline_concurrency.calls import end_tasks
from spurline_environments.tool_formats import Turns
from spurline_rl.chat_front import PrefixError
from spurline_rl.protocols.environment import PolicyHandle

T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NUM_THREADS = 2
_READ_TIMEOUT_S = 60.0
"""Seconds that a client may take to send the body of a request."""
_WRITE_TIMEOUT_S = 60.0
"""Seconds that a client may take to receive an answer."""
_IDLE_TIMEOUT_S = 60.0
"""Seconds that a connection may be idle, and seconds that a client may take to send the head of a request."""
_STOP_TIMEOUT_S = 10.0
"""Seconds that open connections may take to end when the server stops."""
_MOST_CONNECTIONS = 4096
_BACKLOG = 1024
_MOST_CALLS = 64
"""Maximum number of running requests of one session. Each keeps a connection open."""
FORWARDED_KEY, FORWARDED_NAME = "X-Spurline-Key", "X-Session-ID"
"""Headers of a proxy's requests: its key, and its name of the session."""
_BYTES_PER_TOKEN = 32
"""Writing one token of an answer takes about as long as reading this many bytes of a request."""

_quiet = logging.getLogger("spurline_agents.http")
# A client that sends invalid HTTP gets an error. A log line for each of these requests could fill the disk.
_quiet.setLevel(logging.CRITICAL)


class HarnessServer:
    """A server of the vendors' APIs for all sessions. It listens at `base_url` from `start` until `stop`."""

    def __init__(self, config: EndpointConfig, tokenizer: PreTrainedTokenizerBase, turns: Turns) -> None:
        self._config = config
        self._turns = turns
        self._tokenizer = tokenizer
        self.forwarding_key = secrets.token_urlsafe(32)
        """The key of a proxy in this process that serves many sessions. Agents do not get it."""
        # The open sessions, by their keys.
        self._sessions: dict[str, LiveSession] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="harness-request")
        # The connections with a running request.
        self._busy: set[web.RequestHandler] = set()
        app = web.Application(middlewares=[self._answer_errors])
        app.router.add_get("/v1/models", self._models)
        self._messages = AnthropicMessages(tokenizer, config, turns)
        dialects: dict[str, Dialect[Any]] = {
            "chat/completions": ChatCompletions(tokenizer, config, turns),
            "completions": Completions(tokenizer, config, turns),
            "messages": self._messages,
            "responses": Responses(tokenizer, config, turns),
        }
        for path, dialect in dialects.items():
            app.router.add_post(f"/v1/{path}", partial(self._answer, dialect=dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        self._runner = web.AppRunner(
            app,
            logger=_quiet,
            access_log=None,
            # When a client closes its connection, its request is cancelled.
            handler_cancellation=True,
            keepalive_timeout=_IDLE_TIMEOUT_S,
            shutdown_timeout=_STOP_TIMEOUT_S,
            auto_decompress=False,
        )

    async def start(self) -> None:
        """Listen for requests. Raises ConfigError if the address is in use or belongs to another machine."""
        config = self._config
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._accept, config.host, config.port, backlog=_BACKLOG
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError.at(
                "source.environment.port",
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. Set port: 0 for a free one, "
                "and a host of this machine.",
            ) from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        port = self._listener.sockets[0].getsockname()[1]
        self.base_url = (config.public_url or f"http://{host}:{port}").rstrip("/") + "/v1"

    def _accept(self) -> asyncio.Protocol:
        """Return the protocol of a new connection.

        Connections use at most half of the files that the process may open. At this limit, the oldest connection
        without a request is closed for the new one. So no agent can block other agents with idle connections.
        """
        server = self._runner.server
        assert server is not None
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _MOST_CONNECTIONS if most_files == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, most_files // 2)
        if len(server.connections) >= most:
            # aiohttp keeps its connections in the order in which they were opened.
            waiting = (connection.transport for connection in server.connections if connection not in self._busy)
            idle = next((each for each in waiting if each is not None and not each.is_closing()), None)
            if idle is None:
                return _Refusal()
            # `close` would wait until the client has read everything.
            idle.abort()
        return server()

    def open(self, policy: PolicyHandle, where: str) -> LiveSession:
        """Serve a new session, whose key is for its agent alone."""
        session = LiveSession(policy, self._tokenizer, self._config, where, self._threads, self._turns)
        self._sessions[session.key] = session
        return session

    def forward(self, session: LiveSession, name: str) -> None:
        """Let a proxy that knows `forwarding_key` send requests of this session, under a name of its own."""
        session.forwarded.add(f"{self.forwarding_key} {name}")
        self._sessions[f"{self.forwarding_key} {name}"] = session

    async def end(self, session: LiveSession) -> None:
        """Stop serving this session, and cancel its running requests. Their answers are not recorded."""
        for key in (session.key, *session.forwarded):
            self._sessions.pop(key, None)
        await end_tasks(session.calls, f"{session.where}: a request of the agent", CANCEL_TIMEOUT_S)

    async def stop(self) -> None:
        """End all sessions, connections and the server."""
        for session in list(self._sessions.values()):
            await self.end(session)
        self._listener.close()
        await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        except (ConnectionError, TimeoutError):
            # The client is gone, or does not read its answer.
            raise
        except Exception as error:
            answer = self._api_error(request, error)
            if answer is None:
                raise
            return answer.response(is_anthropic=request.path.startswith("/v1/messages"))
        finally:
            self._busy.discard(request.protocol)

    def _api_error(self, request: web.Request, error: Exception) -> ApiError | None:
        """Return what the client is told, or None if the error belongs to no attempt. Others may end their attempt."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, web.RequestPayloadError):
            return ApiError(400, f"The request's body is broken: {error}.", code="invalid_body")
        if isinstance(error, web.HTTPException):
            paths = "/models, /chat/completions, /completions, /responses, /messages and /messages/count_tokens"
            text = f"{request.method} {request.path}: {error.reason}. Below the base URL, there are only {paths}."
            return ApiError(error.status, text, code="unknown_url")
        session = self._find(request)
        if session is None:
            return None
        session.fail(error)
        if isinstance(error, PrefixError):
            return ApiError(400, str(error), param="messages", code="history_rewritten")
        return ApiError(500, f"{session.where}: the attempt has failed: {error}", code="attempt_failed")

    def _find(self, request: web.Request) -> LiveSession | None:
        headers = request.headers
        # OpenAI's clients send the key as a bearer, and those of Anthropic in either way.
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        forwarded = f"{headers.get(FORWARDED_KEY, '')} {headers.get(FORWARDED_NAME, '')}"
        keys = (headers.get("x-api-key", ""), bearer if scheme == "Bearer" else "", forwarded)
        return next((self._sessions[key] for key in keys if key in self._sessions), None)

    def _session(self, request: web.Request) -> LiveSession:
        session = self._find(request)
        if session is None:
            raise _invalid_key()
        if len(session.calls) >= _MOST_CALLS:
            raise ApiError(
                429,
                f"{session.where}: the attempt has {_MOST_CALLS} requests under way. Wait until some have ended.",
                code="too_many_requests",
            )
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": MODEL_NAME, "object": "model", "created": int(time.time()), "owned_by": "spurline"}
        return web.json_response({"object": "list", "data": [model]})

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Answer with the length of a prompt, which is no turn."""
        session = self._session(request)
        # An agent may count as often as it likes, so this is never done on the event loop.
        reading = asyncio.ensure_future(self._read(request, session, self._messages.count_tokens, SMALL_BYTES + 1))
        return web.json_response({"input_tokens": await self._in_session(session, reading)})

    async def _read(
        self, request: web.Request, session: LiveSession, read: Callable[[LiveSession, bytes], T], num_bytes: int = 0
    ) -> T:
        """Receive the body and read it, as if it had at least `num_bytes`."""
        # The body is read in a separate function, so that `raw` is freed before the model generates.
        async with session.bodies:
            raw = await _receive(request, self._config.max_body_bytes)
            return await session.work(max(len(raw), num_bytes), lambda: read(session, raw))

    async def _answer(self, request: web.Request, dialect: Dialect[Any]) -> web.StreamResponse:
        """Generate the answer to a request and send it. The turns count as soon as all but the last part are sent."""
        session = self._session(request)

        async def work() -> tuple[bool, list[Choice], list[bytes]]:
            body, generate = await self._read(request, session, dialect.read)
            choices = await generate()

            def parts() -> list[bytes]:
                answer = dialect.write(session, body, choices)
                return dialect.stream(body, answer) if body.stream else [json.dumps(answer).encode()]

            size = sum(len(choice.result.token_ids) for choice in choices) * _BYTES_PER_TOKEN
            return body.stream, choices, await session.work(size, parts)

        is_stream, choices, parts = await self._in_session(session, asyncio.ensure_future(work()))
        if is_stream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        else:
            response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
            response.content_length = sum(map(len, parts))
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await response.prepare(request)
                for part in parts[:-1]:
                    await response.write(part)
                session.policy.deliver(choice.result for choice in choices)
                await response.write(parts[-1])
                await response.write_eof()
        except TimeoutError:
            # Otherwise the unread rest of the answer would stay in memory.
            if request.transport is not None:
                request.transport.abort()
            raise
        return response

    async def _in_session(self, session: LiveSession, call: asyncio.Future[T]) -> T:
        """Return the result of `call`. Cancel it if its client disconnects, its session ends or its time is up."""
        session.calls.add(call)
        try:
            await asyncio.wait([call], timeout=self._config.request_timeout_s)
            if not call.done():
                raise ApiError(
                    504,
                    f"{session.where}: the model's turn took longer than {self._config.request_timeout_s:g} s "
                    "(environment.request_timeout_s).",
                    code="timeout",
                )
            if call.cancelled():
                raise _invalid_key()
            return call.result()
        finally:
            session.calls.discard(call)
            await end_tasks([call], f"{session.where}: a request of the agent", CANCEL_TIMEOUT_S)


class _Refusal(asyncio.Protocol):
    """A protocol that answers a connection beyond the limit with status 503, and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n")
        transport.close()


async def _receive(request: web.Request, limit: int) -> bytes:
    """Return the body of the request. Raises ApiError if it is compressed, too large or too slow."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "The request is compressed. Send it uncompressed.", code="unsupported_encoding")
    too_large = ApiError(
        413, f"The request is larger than {limit} bytes (environment.max_body_bytes).", code="body_too_large"
    )
    if (request.content_length or 0) > limit:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            # `request.read` would keep a copy of the body until the request ends.
            while chunk := await request.content.readany():
                data += chunk
                if len(data) > limit:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"The request did not arrive within {_READ_TIMEOUT_S:g} s.") from error
    return bytes(data)


def _invalid_key() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong, or its attempt has ended: send the session's api_key as `Authorization: "
        "Bearer ...` or `x-api-key: ...`.",
        code="invalid_api_key",
    )
