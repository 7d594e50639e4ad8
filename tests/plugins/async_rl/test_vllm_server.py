"""Engine vllm in mode server, against a server whose tokens tell where they belong; the slow test uses vLLM's own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from backend_batches import run_config
from vllm_engines import disk

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, DataError, RunFailedError
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm import server as server_module
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.engines.vllm.launch import WORKER_EXTENSION
from spurline_async_rl.engines.vllm.server import ServerApi, await_servers
from spurline_rl.testing.engine_update_contract import WeightsOf
from spurline_rl.testing.rollout_engine_contract import request
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenizer import load_tokenizer


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


Result = TypeVar("Result")


@pytest.fixture
def drive(spurline_tiny_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """What `use` does with an engine on a fake server, after a first publish unless `is_new`."""

    def run(
        use: Callable[[Any, FakeVllmServer, Callable[[int], Awaitable[Any]]], Awaitable[Any]],
        *,
        is_new: bool = False,
        **fake: Any,
    ) -> Any:
        async def main() -> Any:
            server = FakeVllmServer(**fake)
            engine = server_engine(await server.start(), spurline_tiny_model)

            async def publish(version: int) -> Any:
                backend: Any = WeightsOf(spurline_tiny_model)
                return await disk(tmp_path).publish(version, backend, [engine])

            try:
                async with asyncio.timeout(60):
                    if not is_new:
                        await publish(1)
                    return await use(engine, server, publish)
            finally:
                await engine.close()
                await server.stop()

        return asyncio.run(main())

    return run


def server_engine(url: str, model: Path, **settings: Any) -> VllmEngine:
    config = VllmEngineConfig(mode="server", urls=(url,), max_restarts=0, **settings)
    model_config = ModelConfig(path=str(model))
    return VllmEngine(config, run=run_config(model, model=model_config), tokenizer=load_tokenizer(model_config))


def test_responses_go_on_across_an_update_without_a_token_lost_or_of_the_wrong_version(
    drive: Callable[..., Any],
) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Callable[[int], Awaitable[Any]]) -> Any:
        asked = [request([5] * length, seed=length, max_new_tokens=400) for length in (270, 280, 290)]
        writing = asyncio.gather(*map(engine.generate, asked))
        for version in (2, 3):
            given = server.tokens_given
            while server.tokens_given < given + 150:
                await asyncio.sleep(0)
            await publish(version)
        return asked, await writing, server.calls

    asked, results, calls = drive(use)
    for wanted, result in zip(asked, results, strict=True):
        start = len(wanted.prompt_ids)
        assert result.token_ids.tolist() == list(range(start, 512))
        assert result.finish_reason == "length"
        assert result.logprobs.tolist() == (-result.versions).tolist()
        assert set(result.versions.tolist()) == {1, 2, 3}
    update = calls[calls.index("pause") :][: calls[calls.index("pause") :].index("resume") + 1]
    assert update[:2] == ["pause", "spurline_begin_update"]
    assert set(update[2:-2]) == {"spurline_load_bucket"}
    assert len(update[2:-2]) > 1
    assert update[-2:] == ["spurline_finish_update", "resume"]


def test_a_response_ends_with_the_token_that_completes_a_stop_text(drive: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer()
    stop = tokenizer.decode([60, 61])

    async def use(engine: Any, server: FakeVllmServer, publish: Any) -> Any:
        return await engine.generate(request([5] * 40, stop=(stop,), max_new_tokens=100))

    result = drive(use)
    assert result.token_ids.tolist() == list(range(40, 62))
    assert result.finish_reason == "stop"


def test_nothing_is_generated_during_a_pause(drive: Callable[..., Any]) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Any) -> Any:
        writing = asyncio.ensure_future(engine.generate(request([5] * 10, max_new_tokens=450)))
        while server.tokens_given < 50:
            await asyncio.sleep(0)
        await engine.pause()
        given = server.tokens_given
        late = asyncio.ensure_future(engine.generate(request([5] * 10, max_new_tokens=2)))
        done, _ = await asyncio.wait({writing, late}, timeout=0.2)
        assert not done
        assert server.tokens_given == given
        await engine.resume()
        return await writing, await late

    first, late = drive(use)
    assert first.token_ids.tolist() == list(range(10, 460))
    assert late.token_ids.tolist() == [10, 11]


def test_a_request_the_server_refuses_is_an_error_that_names_it(drive: Callable[..., Any]) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Any) -> Any:
        with pytest.raises(DataError, match=r"asked by a test.*no such luck"):
            await engine.generate(request([5], seed=666))
        with pytest.raises(DataError, match=r"asked by a test.*512"):
            await engine.generate(request([5] * 512))
        return await engine.generate(request([5], max_new_tokens=1))

    assert drive(use).token_ids.tolist() == [1]


def test_a_server_that_goes_away_is_noticed(drive: Callable[..., Any]) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Any) -> None:
        await server.stop()
        with pytest.raises(RunFailedError, match=r"asked by a test.*cannot be reached"):
            await engine.generate(request([5]))

    drive(use)


def test_weights_that_are_not_all_there_end_the_run(drive: Callable[..., Any]) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Callable[[int], Awaitable[Any]]) -> None:
        server.missing = ["model.layers.0.mlp"]
        with pytest.raises(RunFailedError, match=r"model\.layers\.0\.mlp"):
            await publish(2)

    drive(use)


def test_a_server_tells_its_workers_and_its_dtype(drive: Callable[..., Any]) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Any) -> Any:
        (receivers,) = (each.receivers for each in engine._engines)
        return engine.transports, engine.weights_dtype, receivers

    transports, dtype, receivers = drive(use)
    assert transports == ("collective", "disk")
    assert dtype == "bfloat16"
    assert list(receivers.values()) == [2]


@pytest.mark.parametrize(
    ("key", "strangers"),
    [(None, "refuse"), ("of the proxy", "refuse"), ("of the proxy", "log in"), ("of the proxy", "hang up")],
)
def test_a_server_elsewhere_that_obeys_strangers_is_told_of_and_one_behind_a_key_gets_it_with_every_call(
    drive: Callable[..., Any],
    key: str | None,
    strangers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VllmEngineConfig().api_key_env, "of the proxy")
    monkeypatch.setattr(ServerApi, "is_here", False)

    async def use(engine: Any, *_: Any) -> Any:
        return await engine.generate(request([5] * 3, max_new_tokens=2))

    assert len(drive(use, key=key, strangers=strangers).token_ids) == 2
    assert ("change its weights" in capsys.readouterr().err) == (key is None)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost:8000/base", True),
        ("http://192.0.2.7:8000", False),
        ("http://node1:8000", False),
    ],
)
def test_nothing_is_said_of_a_server_that_is_reached_over_the_loopback(url: str, is_here: bool) -> None:
    async def main() -> bool:
        api = ServerApi(url, None, 1.0)
        await api.close()
        return api.is_here

    assert asyncio.run(main()) == is_here


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, r"urls.*raw_logprobs.*--logprobs-mode processed_logprobs"),
        ({"extension": ""}, r"urls.*has worker extension ''.*--worker-extension-cls"),
        ({"extension": "theirs.Extension"}, r"urls.*theirs\.Extension.*--worker-extension-cls"),
        ({"has_dev_endpoints": False}, r"urls.*no endpoint.*VLLM_SERVER_DEV_MODE=1"),
        ({"has_lora": True}, r"urls.*--enable-lora"),
    ],
)
def test_a_server_that_was_started_otherwise_is_an_error_that_says_how(
    drive: Callable[..., Any], fake: dict[str, Any], message: str
) -> None:
    async def use(*_: Any) -> None: ...

    with pytest.raises((ConfigError, RunFailedError), match=message):
        drive(use, **fake)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_servers_that_are_not_there_are_named_before_anything_starts(free_port: int) -> None:
    said: list[str] = []
    urls = (f"http://127.0.0.1:{free_port}", "http://name.invalid:8000")
    config = VllmEngineConfig(mode="server", urls=urls, start_timeout_s=0.1)
    with pytest.raises(
        ConfigError, match=r"source\.engine\.urls.*within 0\.1 s \(source\.engine\.start_timeout_s\)"
    ) as error:
        await_servers(config, said.append)
    assert len(said) == 1
    for text in (said[0], str(error.value)):
        assert all(url in text for url in urls)
        assert "ConnectionRefusedError" in text
        assert "VLLM_SERVER_DEV_MODE=1" in text


def test_a_server_that_still_loads_is_waited_for(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_ASK_AGAIN_S", 0.02)
    config = VllmEngineConfig(mode="server", urls=(f"http://127.0.0.1:{free_port}",))

    async def main() -> None:
        server, said = FakeVllmServer(), threading.Event()
        waiting = asyncio.create_task(asyncio.to_thread(await_servers, config, lambda _: said.set()))
        async with asyncio.timeout(60):
            await asyncio.to_thread(said.wait, 60)
            assert not waiting.done()
            await server.start(free_port)
            await waiting
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "text"), [(200, "hello"), (404, "hello"), (200, "[1]"), (200, '{"data": [1], "vllm_config": "text"}')]
)
def test_something_else_at_the_url_is_told_at_once(status: int, text: str) -> None:
    """Nothing is said to be waited for."""

    async def main() -> None:
        async def answer(_: web.BaseRequest) -> web.Response:
            return web.Response(status=status, text=text, content_type="application/json")

        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        config = VllmEngineConfig(mode="server", urls=(f"http://{host}:{port}",))
        try:
            with pytest.raises(ConfigError, match=rf"urls.*{port}.*VLLM_SERVER_DEV_MODE=1"):
                await asyncio.to_thread(await_servers, config, pytest.fail)
        finally:
            await runner.cleanup()

    asyncio.run(main())
