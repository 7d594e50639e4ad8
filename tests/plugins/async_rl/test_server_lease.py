"""One run at a time uses a vLLM server; another run, another server under its URL and a restart are noticed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_vllm_server import FakeVllmServer, server_engine
from virtual_loop import run_virtually
from vllm_engines import disk

from spurline.errors import ConfigError, RunFailedError
from spurline_async_rl.engines.vllm import lease
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_async_rl.engines.vllm.lease import ServerLease, WorkerClaim
from spurline_async_rl.engines.vllm.worker_extension import WorkerExtension
from spurline_rl.testing.engine_update_contract import WeightsOf
from spurline_rl.testing.rollout_engine_contract import request

MAIN, OTHER = "runs/main", "runs/other"


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_ASK_AGAIN_S", 0.02)


@asynccontextmanager
async def serving(model: Path, **fake: Any) -> AsyncGenerator[tuple[FakeVllmServer, VllmEngine]]:
    """A server, and the engine of run MAIN on it."""
    server = FakeVllmServer(**fake)
    engine = server_engine(await server.start(), model, run_dir=MAIN)
    try:
        async with asyncio.timeout(60):
            yield server, engine
    finally:
        await engine.close()
        await server.stop()


async def publish(engine: VllmEngine, model: Path, folder: Path, version: int = 1) -> None:
    backend: Any = WeightsOf(model)
    await disk(folder).publish(version, backend, [engine])


def test_a_second_run_is_refused_and_neither_stops_nor_changes_the_server_until_the_first_has_ended(
    spurline_tiny_model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            await publish(engine, spurline_tiny_model, tmp_path)
            calls = [*server.calls]
            other = server_engine(server.url, spurline_tiny_model, run_dir=OTHER)
            with pytest.raises((ConfigError, RunFailedError), match=r"belongs to run .*/runs/main on .*goes on"):
                await other.start()
            await other.close()
            assert server.calls == calls
            assert len((await engine.generate(request([5] * 10, max_new_tokens=3))).token_ids) == 3
            await engine.close()
            other = server_engine(server.url, spurline_tiny_model, run_dir=OTHER)
            async with asyncio.timeout(lease.LEASE_S / 4):
                await publish(other, spurline_tiny_model, tmp_path / "other")
            await other.close()

    asyncio.run(main())


def test_a_run_that_goes_on_is_told_from_a_killed_one_although_both_ask_at_nearly_the_same_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of the claim falls a little from look to look, until the other run extends it between two looks."""
    monkeypatch.setattr(lease, "_ASK_AGAIN_S", 2.0)
    monkeypatch.setattr(lease, "_now", lambda: asyncio.get_running_loop().time())

    class Worker:
        async def workers(self, *_: Any) -> list[Any]:
            await asyncio.sleep(0.002)
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(0.001)
            return [{"owner": "another run", "rest_s": 60.0 - now % 2.0, "answer": None}]

    async def main() -> float:
        with pytest.raises(ConfigError, match="belongs to run another run, which goes on"):
            await ServerLease(Worker().workers, "http://a", "this run").begin()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) < 10


def test_a_server_is_kept_while_its_member_is_started_again(spurline_tiny_model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, _):
            engine = server_engine(server.url, spurline_tiny_model, run_dir=MAIN, max_restarts=1)
            await publish(engine, spurline_tiny_model, tmp_path)
            engine._engines[0].kill("by a test")
            while not engine.awaiting_weights:
                assert "owner" in server.claims[0].extend("another run", 60.0)
                await asyncio.sleep(0)
            await engine.close()
            assert "claim" in server.claims[0].extend("another run", 60.0)

    asyncio.run(main())


def test_one_answer_that_is_no_answer_of_vllm_ends_nothing(spurline_tiny_model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            await publish(engine, spurline_tiny_model, tmp_path)
            server.says_nonsense = True
            await asyncio.sleep(0.1)
            server.says_nonsense = False
            assert len((await engine.generate(request([5] * 10, max_new_tokens=3))).token_ids) == 3

    asyncio.run(main())


def test_a_run_does_not_resume_a_server_that_has_been_taken_over(spurline_tiny_model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            await publish(engine, spurline_tiny_model, tmp_path)
            await engine.pause()
            server.claims[0]._until = 0.0
            server.claims[0].extend("another run", 60.0)
            calls = [*server.calls]
            await engine.resume()
            await engine.close()
            assert server.calls == calls

    asyncio.run(main())


def test_a_run_waits_for_the_claim_of_a_killed_one_and_goes_on_with_its_own_at_once(
    spurline_tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            [claim] = server.claims
            claim.extend("the killed run", 0.5)
            await engine.start()
            assert not claim.extend("another run", 1.0).keys() & {"claim"}
            again = server_engine(server.url, spurline_tiny_model, run_dir=MAIN)
            async with asyncio.timeout(lease.LEASE_S / 4):
                await again.start()
            await again.close()

    asyncio.run(main())
    assert capsys.readouterr().err.count("belongs to run the killed run") == 1


def test_a_run_whose_server_was_taken_over_trains_on_no_more_of_its_tokens(
    spurline_tiny_model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            await publish(engine, spurline_tiny_model, tmp_path)
            [claim] = server.claims
            claim._until = 0.0
            claim.extend("another run", 60.0)
            with pytest.raises(RunFailedError, match="belongs to run another run by now"):
                await engine.generate(request([5] * 10, max_new_tokens=500))

    asyncio.run(main())


def test_tokens_that_come_after_the_claim_has_run_out_are_generated_again(
    spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count(1)

    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            await publish(engine, spurline_tiny_model, tmp_path)
            monkeypatch.setattr(ServerLease, "is_valid", property(lambda _: next(looks) % 40 != 0))
            result = await engine.generate(request([5] * 10, max_new_tokens=300))
            assert result.token_ids.tolist() == list(range(10, 310))
            assert server.tokens_given > 300

    asyncio.run(main())


def test_a_server_whose_workers_cannot_be_called_any_more_is_given_up_with_its_error(
    spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, engine):
            await publish(engine, spurline_tiny_model, tmp_path)
            server.is_broken = True
            monkeypatch.setattr(lease, "LEASE_S", 0.2)
            await engine._lives[0]
            with pytest.raises(RunFailedError, match=r"503 .*out of order"):
                await engine.generate(request([5] * 10, max_new_tokens=5))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("owner_meanwhile", "message"), [("", "was started again"), ("another run", "belonged to another run meanwhile")]
)
def test_a_server_that_may_have_other_weights_gets_them_before_it_generates(
    spurline_tiny_model: Path, tmp_path: Path, owner_meanwhile: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model) as (server, _):
            engine = server_engine(server.url, spurline_tiny_model, run_dir=MAIN, max_restarts=1)
            await publish(engine, spurline_tiny_model, tmp_path)
            if owner_meanwhile:
                server.claims[0]._until = 0.0
                server.claims[0].extend(owner_meanwhile, 60.0)
                server.claims[0].end(owner_meanwhile)
            else:
                server.claims = [WorkerClaim()]
            while not engine.awaiting_weights:
                await asyncio.sleep(0.01)
            await publish(engine, spurline_tiny_model, tmp_path, 2)
            assert set((await engine.generate(request([5] * 10, max_new_tokens=3))).versions) == {2}
            await engine.close()

    asyncio.run(main())
    assert message in capsys.readouterr().err


def test_a_load_balancer_before_several_servers_is_refused(spurline_tiny_model: Path) -> None:
    async def main() -> None:
        async with serving(spurline_tiny_model, num_replicas=2) as (_, engine):
            with pytest.raises((ConfigError, RunFailedError), match=r"leads to 2 servers.*List the URL of each"):
                await engine.start()

    asyncio.run(main())


def test_a_worker_obeys_only_the_run_that_it_belongs_to() -> None:
    class Extension(WorkerExtension):
        num_calls = 0

        def spurline_count(self, count: int) -> int:
            self.num_calls += count
            return self.num_calls

    extension = Extension()
    assert extension.spurline_call("run a", 60.0, "spurline_count", 2)["answer"] == 2
    refused = extension.spurline_call("run b", 60.0, "spurline_count", 3)
    assert (refused["answer"], refused["owner"], extension.num_calls) == (None, "run a", 2)
    extension.spurline_end_claim("run b")
    assert "owner" in extension.spurline_call("run b", 60.0, "")
    extension.spurline_end_claim("run a")
    assert extension.spurline_call("run b", 60.0, "spurline_count", 3)["answer"] == 5
