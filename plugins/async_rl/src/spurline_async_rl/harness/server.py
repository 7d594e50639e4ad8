"""The HTTP server of a run: who may ask what, how much and how long; what goes wrong as OpenAI's API says it.

Place on the way: HTTP request -> session, body -> `Answering` -> JSON or a stream. One server serves all attempts, on
the event loop that the environment runs on; each has an address of its own: `/sessions/ID/v1`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from spurline.errors import ConfigError
from spurline.rl.chat_front import PrefixError
from spurline.rl.concurrency import end_tasks
from spurline_async_rl.harness.agents import CANCEL_TIMEOUT_S
from spurline_async_rl.harness.bodies import ApiError, BodyT, ChatBody, CompletionBody, read_body
from spurline_async_rl.harness.configs import HarnessConfig
from spurline_async_rl.harness.responses import Answering, Choice, ResponseWriter, chunks
from spurline_async_rl.harness.sessions import LiveSession

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


class HarnessServer:
    """Serves sessions between `start` and `stop`."""

    def __init__(self, config: HarnessConfig, tokenizer: PreTrainedTokenizerBase, api_key: str) -> None:
        self._config = config
        self._api_key = api_key
        self._answering = Answering(tokenizer, ignore_sampling=config.ignore_sampling)
        self._writer = ResponseWriter(tokenizer, config.model_name)
        self._sessions: dict[str, LiveSession] = {}
        self._num_requests = 0
        self._is_closing = False
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address is taken or not this machine's."""
        config = self._config
        app = web.Application(middlewares=[self._answer_errors], client_max_size=config.max_body_bytes)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{session}/v1/completions", self._complete)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            # A client that hangs up ends what it asked for.
            handler_cancellation=True,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=_STOP_TIMEOUT_S,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, config.port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError.at(
                "source.environment.port",
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. Set port: 0 for a free one, "
                "and a host of this machine.",
            ) from error
        host, port = self._runner.addresses[0][:2]
        shown_host = f"[{host}]" if ":" in host else host
        self._url = (config.public_url or f"http://{shown_host}:{port}").rstrip("/")

    def open(self, session: LiveSession) -> tuple[str, str]:
        """Serve this session; returns its name and the base URL for its agent."""
        name = secrets.token_urlsafe(18)
        self._sessions[name] = session
        return name, f"{self._url}/sessions/{name}/v1"

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
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            self._authorize(request)
            return await handler(request)
        except ApiError as error:
            return error.response()
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_bytes
            return ApiError(
                413, f"The request is larger than {limit} bytes (environment.max_body_bytes).", code="body_too_large"
            ).response()
        except (ConnectionError, TimeoutError):
            # The client is gone, or does not read; there is nobody to tell.
            raise
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}. There are /v1/models, /v1/chat/completions and "
            return ApiError(
                error.status, f"{text}/v1/completions, below the session's base URL.", code="unknown_url"
            ).response()
        except Exception as error:
            session = self._sessions.get(request.match_info.get("session", ""))
            if session is None:
                raise
            return _fail(session, error).response()

    def _authorize(self, request: web.Request) -> None:
        shown = request.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(errors="replace"), f"Bearer {self._api_key}".encode()):
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
        return await self._answer(request, ChatBody, self._answering.chat, self._writer.chat)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionBody, self._answering.complete, self._writer.completion)

    async def _answer(
        self,
        request: web.Request,
        kind: type[BodyT],
        ask: Callable[[LiveSession, BodyT], Coroutine[Any, Any, list[Choice]]],
        write: Callable[[BodyT, list[Choice]], dict[str, Any]],
    ) -> web.StreamResponse:
        """Send what the model answers; once it is sent, its turns count as received."""
        session, body = self._session(request), await self._read(request, kind)
        choices = await self._in_session(session, ask(session, body))
        answer = write(body, choices)
        if not body.stream:
            response = web.json_response(answer)
            session.policy.deliver(choice.result for choice in choices)
            return response
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.prepare(request)
            for chunk in chunks(body, answer):
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            session.policy.deliver(choice.result for choice in choices)
            await response.write_eof()
        return response

    async def _read(self, request: web.Request, kind: type[BodyT]) -> BodyT:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                raw = await request.read()
        except TimeoutError as error:
            raise ApiError(408, f"The request did not arrive within {_READ_TIMEOUT_S:g} s.", retry=True) from error
        return read_body(raw, kind, ignore_sampling=self._config.ignore_sampling)

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


def _fail(session: LiveSession, error: Exception) -> ApiError:
    """End the attempt with an error that the request is not to blame for; returns what the client is told."""
    session.fail(error)
    if isinstance(error, PrefixError):
        return ApiError(400, str(error), param="messages", code="history_rewritten")
    return ApiError(500, f"{session.where}: the attempt has failed: {error}", code="attempt_failed")
