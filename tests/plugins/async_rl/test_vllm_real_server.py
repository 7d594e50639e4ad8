"""Engine vllm in mode server against vLLM's own OpenAI-compatible server: a minute to start, so only when soaking."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from gloo_for_nccl import install, use_gloo
from listening import free_port
from living_processes import living_below
from publish_proofs import ProvenPublishes, moved_model
from sabotages import IN_FLIGHT, KINDS
from vllm_engines import LIMIT_S, START_S, HeldEngine, collective, disk, publish, vllm_engine, vllm_models

from spurline.errors import ConfigError, RunFailedError
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.launch import WORKER_EXTENSION
from spurline_async_rl.engines.vllm.server import ServerApi
from spurline_async_rl.weights.configs import VllmNativeSyncConfig
from spurline_async_rl.weights.vllm_native import NativeSync
from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.testing.engine_update_contract import ModelPair
from spurline_rl.testing.rollout_engine_contract import PROMPTS, model_logprobs, request

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts a server; SPURLINE_SOAK=1"),
]


@pytest.fixture
def models(tmp_path: Path) -> ModelPair:
    return vllm_models(tmp_path, "untied")


@pytest.fixture
def server(
    request: pytest.FixtureRequest, models: ModelPair, tmp_path: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its base URL, and its process; it may not be up yet. param: further options."""
    port = free_port()
    options = ["--model", str(models.old), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    options += ["--dtype", "float32", "--kv-cache-memory-bytes", str(2**28), "--logprobs-mode", "processed_logprobs"]
    options += ["--max-logprobs", "57", *request.param]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": install(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options],
        env=os.environ | variables,
        stdout=(tmp_path / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        _kill(process)


KEY = "of the server"
OURS = ["--worker-extension-cls", WORKER_EXTENSION, "--api-key", KEY]
STOCK = ["--weight-transfer-config", '{"backend": "nccl"}', "--load-format", "dummy", "--api-key", KEY]


@pytest.fixture
def sync(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes a sync of the transport that is the parameter. Only the communicator of `vllm_native` is not NCCL's."""
    if request.param == "vllm_native":
        use_gloo(monkeypatch.setattr)
        monkeypatch.setattr(VllmNativeSyncConfig, "needs_gpu", False)
        monkeypatch.setattr(VllmEngineConfig, "uses_stock_servers", lambda *_: True)

    def make() -> Any:
        made = NativeSync(VllmNativeSyncConfig())
        made.max_bucket_bytes = 20_000
        return made

    return {"vllm_native": make, "collective": collective, "disk": lambda: disk(tmp_path / "weights")}[request.param]


@pytest.mark.parametrize(
    ("server", "sync"),
    [(OURS, "collective"), (OURS, "disk"), (STOCK, "vllm_native")],
    indirect=True,
    ids=["collective", "disk", "vllm_native"],
)
def test_tokens_match_the_weights_of_their_version_and_the_servers_end_is_noticed(
    models: ModelPair,
    server: tuple[str, subprocess.Popen[bytes]],
    sync: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server with a key asks for it where tokens are made, and not where weights are changed."""
    url, process = server
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(ServerApi, "is_here", False)
    cuts = ({}, {"top_k": 40, "top_p": 0.9, "support_width": 56})
    asked = [
        request(prompt, seed=seed, max_new_tokens=400, **cuts[seed % 2]) for seed, prompt in enumerate(PROMPTS * 2)
    ]

    async def main() -> list[GenerationResult]:
        await _up(url, process)
        async with aiohttp.ClientSession() as session:
            # A killed run has left an update. Servers with our extension have no such endpoint.
            await session.post(f"{url}/start_weight_update")
        engine = vllm_engine(models.old, tmp_path, **_server_settings(url))
        try:
            async with asyncio.timeout(LIMIT_S):
                await publish(engine, 1, models.old, sync())
                member = engine._api_of(url)
                assert (await member.model()).is_open
                await member.close()
                other = vllm_engine(models.old, tmp_path / "other", **_server_settings(url))
                with pytest.raises((ConfigError, RunFailedError), match="belongs to run"):
                    await other.start()
                await other.close()
                writing = asyncio.gather(*map(engine.generate, asked))
                await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
                await publish(engine, 2, models.new, sync())
                results = await writing
                with pytest.raises(RunFailedError, match="cannot be reached"):
                    await publish(engine, 3, models.old, sync(), change=lambda _: _kill(process))
                with pytest.raises(RunFailedError, match="cannot be reached"):
                    await engine.generate(request(PROMPTS[0]))
                return results
        finally:
            await engine.close()

    results = asyncio.run(main())
    for wanted, result in zip(asked, results, strict=True):
        for version, model in ((1, models.old), (2, models.new)):
            expected = model_logprobs(model, wanted.prompt_ids, result.token_ids.tolist(), 1.0, result.support)
            difference = np.abs(result.logprobs - expected)[result.versions == version]
            assert difference.max(initial=0.0) <= 1e-5
        assert (result.support is not None) == (wanted.sampling.support_width > 0)
    assert any({1, 2} <= set(result.versions.tolist()) for result in results)


@pytest.mark.parametrize(
    ("server", "sync"), [(OURS, "collective"), (STOCK, "vllm_native")], indirect=True, ids=["collective", "vllm_native"]
)
def test_updates_that_a_server_confirms_and_does_not_do_are_found_out(
    models: ModelPair,
    server: tuple[str, subprocess.Popen[bytes]],
    sync: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server gets adapters merged, so that some weights move and others do not."""
    url, process = server
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    held = HeldEngine(tmp_path)

    async def start() -> None:
        await _up(url, process)
        held.engine = vllm_engine(models.old, tmp_path, **_server_settings(url))
        await held.engine.start()

    def send(engine: Any, version: int, model: Path, *, change: Any) -> Any:
        return publish(engine, version, model, sync(), change=change)

    try:
        held.run(start())
        publishes = ProvenPublishes(held, models.old, send, model_logprobs)
        for only, left_out in (("", ()), ("_proj.", ("head",))):
            moved = [moved_model(tmp_path / f"{only}{seed}", models.old, seed, only) for seed in (1, 2)]
            # Requests that an update interrupts are sent again, and have no keys and values in flight.
            for kind in KINDS:
                if kind not in (IN_FLIGHT, *left_out):
                    publishes.assert_found_out(kind, [models.old, *moved])
    finally:
        held.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its engine, which would outlive it, but not the resource tracker, which frees their shared memory."""
    if process.poll() is None:
        for part in (*living_below(process.pid, "VLLM"), process):
            part.kill()
    process.wait()


def _server_settings(url: str) -> dict[str, object]:
    return {"mode": "server", "urls": (url,), "max_restarts": 0}


async def _up(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            assert process.poll() is None, "the server ended before it was up"
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)
