"""Serve the sessions of a run over HTTP, and report errors as OpenAI's API does.

One server serves all attempts, on the event loop of the environment. The API key tells which attempt sends a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from spurline.errors import ConfigError
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.bodies import ApiError, Body, BodyT
from spurline_agents.configs import HarnessConfig
from spurline_agents.responses import MODEL_NAME, Answering, Choice, Generate, chunks
from spurline_agents.sessions import LiveSession
from spurline_concurrency.calls import end_tasks
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
_BYTES_PER_TOKEN = 32
"""Writing one token of an answer takes about as long as reading this many bytes of a request."""

_quiet = logging.getLogger("spurline_agents.http")
# A client that sends invalid HTTP gets an error. A log line for each of these requests could fill the disk.
_quiet.setLevel(logging.CRITICAL)


class HarnessServer:
    """An OpenAI-compatible server for all sessions. It listens at `base_url` from `start` until `stop`."""

    def __init__(self, config: HarnessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._tokenizer = tokenizer
        # The open sessions, by the header `Authorization` of their requests.
        self._sessions: dict[str, LiveSession] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="harness-request")
        # The connections with a running request.
        self._busy: set[web.RequestHandler] = set()
        app = web.Application(middlewares=[self._answer_errors])
        app.router.add_get("/v1/models", self._models)
        answering = Answering(tokenizer, config)
        chat = partial(self._answer, read=answering.read_chat, write=answering.write_chat)
        app.router.add_post("/v1/chat/completions", chat)
        complete = partial(self._answer, read=answering.read_completion, write=answering.write_completion)
        app.router.add_post("/v1/completions", complete)
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
        session = LiveSession(policy, self._tokenizer, self._config, where, self._threads)
        self._sessions[f"Bearer {session.key}"] = session
        return session

    async def end(self, session: LiveSession) -> None:
        """Stop serving this session, and cancel its running requests. Their answers are not recorded."""
        self._sessions.pop(f"Bearer {session.key}", None)
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
        except ApiError as error:
            return error.response()
        except web.RequestPayloadError as error:
            return ApiError(400, f"The request's body is broken: {error}.", code="invalid_body").response()
        except (ConnectionError, TimeoutError):
            # The client is gone, or does not read its answer.
            raise
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}. Below the base URL, there are only"
            return ApiError(
                error.status, f"{text} /models, /chat/completions and /completions.", code="unknown_url"
            ).response()
        except Exception as error:
            session = self._sessions.get(request.headers.get("Authorization", ""))
            if session is None:
                raise
            session.fail(error)
            if isinstance(error, PrefixError):
                return ApiError(400, str(error), param="messages", code="history_rewritten").response()
            text = f"{session.where}: the attempt has failed: {error}"
            return ApiError(500, text, code="attempt_failed").response()
        finally:
            self._busy.discard(request.protocol)

    def _session(self, request: web.Request) -> LiveSession:
        session = self._sessions.get(request.headers.get("Authorization", ""))
        if session is None:
            raise _invalid_key()
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": MODEL_NAME, "object": "model", "created": int(time.time()), "owned_by": "spurline"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(
        self,
        request: web.Request,
        read: Callable[[LiveSession, bytes], tuple[BodyT, Generate]],
        write: Callable[[BodyT, list[Choice]], dict[str, Any]],
    ) -> web.StreamResponse:
        """Generate the answer to a request and send it. The turns count as soon as all but the last part are sent."""
        session = self._session(request)
        if len(session.calls) >= _MOST_CALLS:
            raise ApiError(
                429,
                f"{session.where}: the attempt has {_MOST_CALLS} requests under way. Wait until some have ended.",
                code="too_many_requests",
            )

        async def prepare() -> tuple[BodyT, Generate]:
            # The body is read in a separate function, so that `raw` is freed before the model generates.
            async with session.bodies:
                raw = await _receive(request, self._config.max_body_bytes)
                return await session.work(len(raw), lambda: read(session, raw))

        async def work() -> tuple[Body, list[Choice], list[bytes]]:
            body, generate = await prepare()
            choices = await generate()
            size = sum(len(choice.result.token_ids) for choice in choices) * _BYTES_PER_TOKEN
            return body, choices, await session.work(size, lambda: _parts(body, write(body, choices)))

        body, choices, parts = await self._in_session(session, asyncio.ensure_future(work()))
        if body.stream:
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


def _parts(body: Body, answer: dict[str, Any]) -> list[bytes]:
    """Return the parts in which the answer is sent: one JSON object, or the events of a stream."""
    if not body.stream:
        return [json.dumps(answer).encode()]
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks(body, answer)), b"data: [DONE]\n\n"]


def _invalid_key() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong, or its attempt has ended: send the session's api_key as `Authorization: "
        "Bearer ...`.",
        code="invalid_api_key",
    )
