"""The HTTP server of a run: who may ask what, how much and how long; what goes wrong as OpenAI's API says it.

Place on the way: HTTP request -> session, body -> `Answering` -> JSON or a stream. One server serves all attempts, on
the event loop that the environment runs on; each has an address of its own: `/sessions/ID/v1`.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from transformers import PreTrainedTokenizerBase

from spurline.errors import ConfigError
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.bodies import ApiError, Body, BodyT
from spurline_agents.configs import HarnessConfig
from spurline_agents.connections import Buffered, Connections, Incoming
from spurline_agents.responses import Answering, Choice, ResponseWriter, chunks
from spurline_agents.sessions import LiveSession
from spurline_agents.work import NUM_THREADS, WorkQueue
from spurline_rl.chat_front import PrefixError
from spurline_rl.concurrency import end_tasks
from spurline_rl.protocols.environment import PolicyHandle

T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_READ_TIMEOUT_S = 60.0
"""Seconds a client may take to send a request."""
_WRITE_TIMEOUT_S = 60.0
"""Seconds a client may take to receive a stream."""
_STOP_TIMEOUT_S = 10.0
"""Seconds that open connections may take to end."""
# A source that trains between two steps leaves its loop alone for long; connections must outlive that.
_KEEPALIVE_S = 3600.0
_BACKLOG = 1024
# aiohttp's own number of bytes that it reads ahead of the handler is four times this.
_READ_AHEAD_BYTES = 2**16
_SHARE = 8
"""One session may have this part of the bytes that are held of requests."""
_SPARE_REQUESTS = 16
"""Requests that one session may have on their way beside its turns."""


class HarnessServer:
    """Serves sessions between `start` and `stop`. api_key: of all sessions; None gives each a key of its own."""

    def __init__(self, config: HarnessConfig, tokenizer: PreTrainedTokenizerBase, api_key: str | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._api_key = api_key
        # A session's key follows from its name, so that those of sessions that have ended, or that never were, are as
        # wrong as any other for who has another session's.
        self._secret = secrets.token_bytes(32)
        self._answering = Answering(tokenizer, config)
        self._writer = ResponseWriter(tokenizer, config.model_name)
        self._sessions: dict[str, LiveSession] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="harness-request")
        self._buffered = Buffered(config.max_buffered_bytes)
        self._connections: Connections | None = None
        self._listener: asyncio.Server | None = None
        self._num_requests = 0
        self._is_closing = False
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address is taken or not this machine's."""
        config = self._config
        app = web.Application(middlewares=[self._answer_errors])
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{session}/v1/completions", self._complete)
        self._runner = web.AppRunner(
            app,
            logger=_logger(),
            access_log=None,
            # A client that hangs up ends what it asked for.
            handler_cancellation=True,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=_STOP_TIMEOUT_S,
            read_bufsize=_READ_AHEAD_BYTES,
            auto_decompress=False,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(
            min(config.max_connections, _most_files() // 2), self._buffered, self._runner.server
        )
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._connections, config.host, config.port, backlog=_BACKLOG
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError.at(
                "source.environment.port",
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. Set port: 0 for a free one, "
                "and a host of this machine.",
            ) from error
        port = self._listener.sockets[0].getsockname()[1]
        shown_host = f"[{config.host}]" if ":" in config.host else config.host
        self._url = (config.public_url or f"http://{shown_host}:{port}").rstrip("/")

    def make_session(self, policy: PolicyHandle, where: str) -> LiveSession:
        """The state of one attempt, to be opened."""
        config = self._config
        share = max(config.max_buffered_bytes // _SHARE, config.max_body_bytes)
        return LiveSession(
            policy,
            self._tokenizer,
            history=config.history,
            max_turns=config.max_turns,
            where=where,
            work=WorkQueue(self._threads),
            buffered=Buffered(share, self._buffered),
        )

    def open(self, session: LiveSession) -> tuple[str, str, str]:
        """Serve this session; returns its name, and for its agent the base URL and the key."""
        name = secrets.token_urlsafe(18)
        self._sessions[name] = session
        return name, f"{self._url}/sessions/{name}/v1", self._key_of(name)

    def _key_of(self, name: str) -> str:
        if self._api_key is not None:
            return self._api_key
        digest = hmac.digest(self._secret, name.encode(errors="replace"), "sha256")
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    async def end(self, name: str) -> None:
        """Serve this session no more; what it still has under way ends, and is not recorded."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        session.is_over = True
        await end_tasks(session.calls, f"{session.where}: a request of the agent", CANCEL_TIMEOUT_S)

    async def stop(self) -> None:
        """End all sessions, connections and the server."""
        self._is_closing = True
        for name in list(self._sessions):
            await self.end(name)
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        assert self._connections is not None
        with self._connections.serving(request):
            try:
                self._authorize(request)
                return await handler(request)
            except ApiError as error:
                return error.response()
            except web.RequestPayloadError as error:
                return ApiError(400, f"The request's body is broken: {error}.", code="invalid_body").response()
            except (ConnectionError, TimeoutError):
                # The client is gone, or does not read; there is nobody to tell.
                raise
            except web.HTTPException as error:
                text = f"{request.method} {request.path}: {error.reason}. There are /v1/models, /v1/chat/completions"
                return ApiError(
                    error.status, f"{text} and /v1/completions, below the session's base URL.", code="unknown_url"
                ).response()
            except Exception as error:
                session = self._sessions.get(request.match_info.get("session", ""))
                if session is None:
                    raise
                return _fail(session, error).response()

    def _authorize(self, request: web.Request) -> None:
        """Raise ApiError for a wrong key, whether there is such a session or not."""
        base, _, path = request.path.lstrip("/").partition("/")
        if base != "sessions":
            # There is nothing to be opened there.
            return
        shown, key = request.headers.get("Authorization", ""), self._key_of(path.partition("/")[0])
        if not hmac.compare_digest(shown.encode(errors="replace"), f"Bearer {key}".encode()):
            raise ApiError(
                401,
                "The API key is missing or wrong: send the session's api_key as `Authorization: Bearer ...`.",
                code="invalid_api_key",
            )

    def _session(self, request: web.Request) -> LiveSession:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise self._refusal()
        return session

    def _refusal(self) -> ApiError:
        """Why a session is not served."""
        if self._is_closing:
            return ApiError(503, "The run is closing.", code="closing")
        return ApiError(404, "There is no such session: its attempt has ended.", code="unknown_session")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(self._writer.models())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._answering.chat, self._writer.chat)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._answering.complete, self._writer.completion)

    async def _answer(
        self,
        request: web.Request,
        ask: Callable[[LiveSession, Incoming], Coroutine[Any, Any, tuple[BodyT, list[Choice]]]],
        write: Callable[[BodyT, list[Choice]], dict[str, Any]],
    ) -> web.StreamResponse:
        """Send what the model answers; once it is sent, its turns count as received."""
        session = self._session(request)
        incoming = Incoming(session.buffered)

        async def work() -> tuple[Body, list[Choice], list[bytes]]:
            body, choices = await ask(session, incoming)
            size = sum(len(choice.result.token_ids) for choice in choices) * _BYTES_PER_TOKEN
            return body, choices, await session.work.run(size, lambda: _parts(body, write(body, choices)))

        try:
            await self._receive(request, session, incoming)
            body, choices, parts = await self._in_session(session, work())
        finally:
            incoming.release()
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
            # What is still to be sent would be kept for as long as the client likes.
            if request.transport is not None:
                request.transport.abort()
            raise
        return response

    async def _receive(self, request: web.Request, session: LiveSession, incoming: Incoming) -> None:
        """Read the body. Raises ApiError when it is too large, comes too slowly or finds no room."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "Compressed requests are not read. Send it as it is.", code="unsupported_encoding")
        limit = self._config.max_body_bytes
        too_large = ApiError(
            413, f"The request is larger than {limit} bytes (environment.max_body_bytes).", code="body_too_large"
        )
        if (request.content_length or 0) > limit:
            raise too_large
        if session.num_receiving >= self._config.max_turns + _SPARE_REQUESTS:
            raise ApiError(
                429,
                f"{session.where}: {session.num_receiving} requests of the attempt are on their way. Come again.",
                code="too_many_requests",
                retry=True,
            )
        session.num_receiving += 1
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                async for part in request.content.iter_any():
                    if len(incoming.raw) + len(part) > limit:
                        raise too_large
                    if not incoming.add(part):
                        raise ApiError(
                            503,
                            "The requests that are on their way are too large together "
                            "(environment.max_buffered_bytes). Come again.",
                            code="too_many_bytes",
                            retry=True,
                        )
        except TimeoutError as error:
            raise ApiError(408, f"The request did not arrive within {_READ_TIMEOUT_S:g} s.", retry=True) from error
        finally:
            session.num_receiving -= 1

    async def _in_session(self, session: LiveSession, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, or raises; it ends with its client, its session and its time."""
        limit = self._config.max_concurrent_requests
        if session.is_over:
            # While the request was on its way.
            work.close()
            raise self._refusal()
        if self._num_requests >= limit:
            work.close()
            raise ApiError(
                429,
                f"{limit} requests are under way (environment.max_concurrent_requests). Come again.",
                code="too_many_requests",
                retry=True,
            )
        call = asyncio.ensure_future(work)
        session.calls.add(call)
        self._num_requests += 1
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
                raise self._refusal()
            return call.result()
        finally:
            self._num_requests -= 1
            session.calls.discard(call)
            await end_tasks([call], f"{session.where}: a request of the agent", CANCEL_TIMEOUT_S)


_BYTES_PER_TOKEN = 32
"""Roughly what it takes as long to write a token of an answer as to read of a request."""


def _parts(body: Body, answer: dict[str, Any]) -> list[bytes]:
    """The answer as it is sent."""
    if not body.stream:
        return [json.dumps(answer).encode()]
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks(body, answer)), b"data: [DONE]\n\n"]


def _most_files() -> int:
    """Files and sockets that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _logger() -> logging.Logger:
    """aiohttp's, but for what a client sends that is no HTTP: the client is told, and could fill a log with it."""
    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _fail(session: LiveSession, error: Exception) -> ApiError:
    """End the attempt with an error that the request is not to blame for; returns what the client is told."""
    session.fail(error)
    if isinstance(error, PrefixError):
        return ApiError(400, str(error), param="messages", code="history_rewritten")
    return ApiError(500, f"{session.where}: the attempt has failed: {error}", code="attempt_failed")
