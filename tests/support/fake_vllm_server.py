"""A server that speaks vLLM's HTTP interface and whose tokens tell where they belong."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.engines.vllm.launch import WORKER_EXTENSION
from spurline_async_rl.engines.vllm.lease import WorkerClaim
from spurline_text.tokenizer import load_tokenizer


class FakeVllmServer:
    """tokens_given: by all requests so far. calls: paths of the calls that change anything, in order.

    extension, transfer: the worker extension and the backend of weight transfer it says it has. key: what a proxy
    before it asks for at all paths. strangers: what that does with those who have none: `refuse` them, send them to
    `log in`, or `hang up`. has_lora: whether it was started with `--enable-lora`. num_replicas: servers behind a load
    balancer, which answer by turns. claims: of each.
    """

    def __init__(
        self,
        *,
        logprobs_mode: str = "processed_logprobs",
        max_logprobs: int = 20,
        has_dev_endpoints: bool = True,
        extension: str = WORKER_EXTENSION,
        transfer: str | None = None,
        has_lora: bool = False,
        key: str | None = None,
        strangers: str = "refuse",
        num_replicas: int = 1,
    ) -> None:
        self.url = ""
        self.tokens_given = 0
        self.calls: list[str] = []
        self.missing: list[str] = []
        self.is_broken = self.says_nonsense = False
        self._extension, self._transfer = extension, transfer
        self._key = key
        self._strangers = strangers
        self._has_lora = has_lora
        self._logprobs_mode = logprobs_mode
        self._max_logprobs = max_logprobs
        self._has_dev_endpoints = has_dev_endpoints
        self._version = 0
        self._answered_by = itertools.cycle(range(num_replicas))
        self.claims = [WorkerClaim() for _ in range(num_replicas)]
        self._running = asyncio.Event()
        self._running.set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Its base URL. port: 0 for a free one."""
        app = web.Application(client_max_size=1 << 24, middlewares=[self._ask_for_key])
        app.router.add_get("/v1/models", self._models)
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
        self.url = f"http://{host}:{port}"
        return self.url

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
            "model_config": {
                "logprobs_mode": self._logprobs_mode,
                "dtype": "torch.bfloat16",
                "max_logprobs": self._max_logprobs,
            },
            "parallel_config": {
                "worker_extension_cls": self._extension,
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1,
            },
            "weight_transfer_config": None if self._transfer is None else {"backend": self._transfer},
            "lora_config": {"max_lora_rank": 16} if self._has_lora else None,
        }
        return web.json_response({"vllm_config": config})

    async def _pause(self, _: web.Request) -> web.Response:
        self.calls.append("pause")
        self._running.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.calls.append("resume")
        self._running.set()
        return web.json_response({"status": "resumed"})

    async def _call_workers(self, request: web.Request) -> web.Response:
        if self.says_nonsense:
            return web.Response(text="<html>", content_type="text/html")
        if self.is_broken:
            return web.json_response({"error": "out of order"}, status=503)
        body = await request.json()
        claim = self.claims[next(self._answered_by)]
        if body["method"] == "spurline_end_claim":
            claim.end(*body["args"])
            return web.json_response({"results": [None]})
        owner, lease_s, method, *_ = body["args"]
        answer: dict[str, Any] = {"answer": None, **claim.extend(owner, lease_s)}
        if method and "claim" in answer:
            assert not self._running.is_set(), "weights changed while requests run"
            self.calls.append(method)
            if method == "spurline_finish_update":
                self._version += 1
                answer["answer"] = self.missing
        return web.json_response({"results": [answer]})

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
            reason = "stop" if ends else "length" if last else None
            await response.write(_event(position, -self._version, reason, body["logprobs"]))
            self.tokens_given += 1
            if ends:
                break
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(token: int, logprob: float, reason: str | None, told: int) -> bytes:
    """Return an event. Sampling has kept the token and the next one. told: number of the likeliest tokens told."""
    likeliest = {f"token_id:{token + index}": logprob if index < 2 else -9999.0 for index in range(told)}
    logprobs = {"token_logprobs": [logprob], "top_logprobs": [likeliest]}
    choice: dict[str, Any] = {"token_ids": [token], "logprobs": logprobs, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def server_engine(url: str, model: Path, *, run_dir: str = "runs/this", **settings: Any) -> VllmEngine:
    """The engine of the run in `run_dir` on a server."""
    config = VllmEngineConfig(mode="server", urls=(url,), **{"max_restarts": 0, **settings})
    model_config = ModelConfig(path=str(model))
    run = run_config(model, model=model_config, run_dir=Path(run_dir))
    return VllmEngine(config, run=run, tokenizer=load_tokenizer(model_config))
