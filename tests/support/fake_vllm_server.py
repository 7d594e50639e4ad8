"""An HTTP server with as much of vLLM's API as ours is used to; its tokens tell where they belong.

A token is the number of tokens before it, prompt included; its logprob is minus the version of the weights.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from spurline_async_rl.engines.vllm.launch import WORKER_EXTENSION


class FakeVllmServer:
    """tokens_given: by all requests so far. calls: paths of the calls that change anything, in order.

    extension: the worker extension it says it runs. key: what a proxy before it asks for at all paths. strangers: what
    that does with those who have none: `refuse` them, send them to `log in`, or `hang up`. has_lora: whether it was
    started with `--enable-lora`.
    """

    def __init__(
        self,
        *,
        logprobs_mode: str = "processed_logprobs",
        has_dev_endpoints: bool = True,
        extension: str = WORKER_EXTENSION,
        has_lora: bool = False,
        key: str | None = None,
        strangers: str = "refuse",
    ) -> None:
        self.tokens_given = 0
        self.calls: list[str] = []
        self.missing: list[str] = []
        self._extension = extension
        self._key = key
        self._strangers = strangers
        self._has_lora = has_lora
        self._logprobs_mode = logprobs_mode
        self._has_dev_endpoints = has_dev_endpoints
        self._version = 0
        self._running = asyncio.Event()
        self._running.set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Its base URL. port: 0 for a free one."""
        app = web.Application(client_max_size=1 << 24, middlewares=[self._ask_for_key])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._done)
        app.router.add_post("/v1/completions", self._complete)
        if self._has_dev_endpoints:
            app.router.add_get("/server_info", self._info)
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_post("/collective_rpc", self._call_workers)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _ask_for_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            if self._strangers == "hang up":
                assert request.transport is not None
                request.transport.close()
            if self._strangers == "log in" and request.path != "/login":
                raise web.HTTPFound("/login")
            return web.json_response({}, status=200 if self._strangers == "log in" else 401)
        return await handler(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 512}]})

    async def _info(self, _: web.Request) -> web.Response:
        config = {
            "model_config": {"logprobs_mode": self._logprobs_mode, "dtype": "torch.bfloat16"},
            "parallel_config": {
                "worker_extension_cls": self._extension,
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1,
            },
            "lora_config": {"max_lora_rank": 16} if self._has_lora else None,
        }
        return web.json_response({"vllm_config": config})

    async def _done(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _pause(self, _: web.Request) -> web.Response:
        self.calls.append("pause")
        self._running.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.calls.append("resume")
        self._running.set()
        return web.json_response({"status": "resumed"})

    async def _call_workers(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self._running.is_set(), "weights changed while requests run"
        self.calls.append(body["method"])
        if body["method"] == "spurline_finish_update":
            self._version += 1
            return web.json_response({"results": [self.missing]})
        return web.json_response({"results": [None]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["seed"] == 666:
            return web.json_response({"error": "no such luck"}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        before = len(body["prompt"])
        for position in range(before, before + body["max_tokens"]):
            await self._running.wait()
            ends = position in body["stop_token_ids"]
            last = position == before + body["max_tokens"] - 1
            await response.write(_event(position, -self._version, "stop" if ends else "length" if last else None))
            self.tokens_given += 1
            if ends:
                break
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(token: int, logprob: float, reason: str | None) -> bytes:
    choice: dict[str, Any] = {"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
