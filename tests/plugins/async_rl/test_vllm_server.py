"""Engine vllm in mode server, against a server whose tokens tell where they belong; the slow test uses vLLM's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from fake_vllm_server import FakeVllmServer, server_engine
from listening import free_port
from vllm_engines import disk

from spurline.errors import ConfigError, DataError, RunFailedError
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm import server as server_module
from spurline_async_rl.engines.vllm.server import API_KEY, ServerApi, await_servers
from spurline_rl.testing.engine_update_contract import WeightsOf
from spurline_rl.testing.rollout_engine_contract import request
from spurline_text.testing.inputs import tiny_tokenizer


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


def test_responses_go_on_across_an_update_without_a_token_lost_or_of_the_wrong_version(
    drive: Callable[..., Any],
) -> None:
    async def use(engine: Any, server: FakeVllmServer, publish: Callable[[int], Awaitable[Any]]) -> Any:
        asked = [
            request([5] * length, seed=length, max_new_tokens=400, support_width=width)
            for length, width in ((270, 0), (280, 3), (290, 1))
        ]
        writing = asyncio.gather(*map(engine.generate, asked))
        for version in (2, 3):
            given = server.tokens_given
            while server.tokens_given < given + 150:
                await asyncio.sleep(0)
            await publish(version)
        (receivers,) = (each.receivers.values() for each in engine._engines)
        assert (engine.transports, engine.weights_dtype, *receivers) == (("collective", "disk"), "bfloat16", 2)
        return asked, await writing, server.calls

    asked, results, calls = drive(use)
    for wanted, result in zip(asked, results, strict=True):
        start = len(wanted.prompt_ids)
        assert result.token_ids.tolist() == list(range(start, 512))
        assert result.finish_reason == "length"
        assert result.logprobs.tolist() == (-result.versions).tolist()
        assert set(result.versions.tolist()) == {1, 2, 3}
        # The server has kept each token and the next one.
        kept = {3: [[token, token + 1, -1] for token in range(start, 512)], 1: [[-1]] * (512 - start)}
        support = None if result.support is None else result.support.tolist()
        assert support == kept.get(wanted.sampling.support_width)
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
    monkeypatch.setenv(API_KEY, "of the proxy")
    monkeypatch.setattr(ServerApi, "is_here", False)

    async def use(engine: Any, *_: Any) -> Any:
        assert "--scheduling-policy" not in (err := capsys.readouterr().err)
        assert ("change its weights" in err) == (key is None)
        asked = replace(request([5] * 3, max_new_tokens=2), is_urgent=True)
        return [await engine.generate(asked) for _ in range(2)]

    server_module._tell_once.cache_clear()
    assert [len(result.token_ids) for result in drive(use, key=key, strangers=strangers)] == [2, 2]
    assert capsys.readouterr().err.count("without --scheduling-policy priority") == 1


def test_nothing_is_said_of_a_server_that_is_reached_over_the_loopback() -> None:
    def is_here(url: str) -> bool:
        is_here_of: Any = ServerApi.is_here.fget
        return is_here_of(SimpleNamespace(url=url))

    assert all(map(is_here, ("http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:8000/base")))
    assert not any(map(is_here, ("http://192.0.2.7:8000", "http://node1:8000")))


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, r"urls.*raw_logprobs.*--logprobs-mode processed_logprobs"),
        ({"extension": ""}, r"urls.*has worker extension ''.*--worker-extension-cls"),
        ({"extension": "theirs.Extension"}, r"urls.*theirs\.Extension.*--worker-extension-cls"),
        ({"has_dev_endpoints": False}, r"urls.*no endpoint.*VLLM_SERVER_DEV_MODE=1"),
        ({"has_lora": True}, r"urls.*--enable-lora"),
        ({"extension": "", "transfer": "nccl"}, r"urls.*--worker-extension-cls.*weight_sync: vllm_native\."),
        ({"is_stock": True}, r"urls.*weight transfer 'None'.*--weight-transfer-config '{"),
        ({"is_stock": True, "transfer": "ipc"}, r"urls.*weight transfer 'ipc', not nccl"),
        ({"is_stock": True, "transfer": "nccl"}, r"urls.*no endpoint /weight_info.*vLLM 0\.30 or newer"),
    ],
)
def test_a_server_that_was_started_otherwise_is_an_error_that_says_how(
    drive: Callable[..., Any], fake: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(*_: Any) -> None: ...

    is_stock = fake.pop("is_stock", False)
    monkeypatch.setattr(VllmEngineConfig, "uses_stock_servers", lambda *_: is_stock)
    with pytest.raises((ConfigError, RunFailedError), match=message):
        drive(use, **fake)


def test_servers_that_are_not_there_are_named_before_anything_starts() -> None:
    said: list[str] = []
    urls = (f"http://127.0.0.1:{free_port()}", "http://name.invalid:8000")
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


def test_a_server_that_still_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(server_module, "_ASK_AGAIN_S", 0.02)
    config = VllmEngineConfig(mode="server", urls=(f"http://127.0.0.1:{port}",))

    async def main() -> None:
        server, said = FakeVllmServer(), threading.Event()
        waiting = asyncio.create_task(asyncio.to_thread(await_servers, config, lambda _: said.set()))
        async with asyncio.timeout(60):
            await asyncio.to_thread(said.wait, 60)
            assert not waiting.done()
            await server.start(port)
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
