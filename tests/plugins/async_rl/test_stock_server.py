"""Stock vLLM servers, without our worker extension: claims, updates, and sends of which one hangs."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import threading
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from spurline.errors import ConfigError, RunFailedError
from spurline_async_rl.engines.vllm import lease
from spurline_async_rl.engines.vllm.lease import ClaimLostError, ServerLease
from spurline_async_rl.engines.vllm.stock import StockWorkers
from spurline_async_rl.weights import vllm_native
from spurline_async_rl.weights.configs import VllmNativeSyncConfig
from spurline_async_rl.weights.exchange import Meeting
from spurline_async_rl.weights.vllm_native import GROUPS, NativeSync, TransferMaker
from spurline_models.weight_buckets import TensorPlace, WeightBucket

START, JOIN, UPDATE, FINISH = (
    f"/{name}"
    for name in ("start_weight_update", "init_weight_transfer_engine", "update_weights", "finish_weight_update")
)


class Server:
    """The state of a stock server. calls: the endpoints for updates that were called with success."""

    def __init__(self) -> None:
        self.version, self.is_updating = "default", False
        self.calls: list[str] = []

    async def ask(self, verb: str, path: str, body: Any, key: str) -> Any:
        await asyncio.sleep(0)
        if path == "/weight_info":
            return self.version
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return True
        if path in (START, FINISH):
            if self.is_updating == (path == START):
                raise RunFailedError(f"{path} at the wrong time")
            self.is_updating = path == START
        self.calls.append(path)
        return "done"

    def claim(self, owner: str) -> ServerLease:
        return ServerLease(StockWorkers(self.ask).call, "http://a", owner)


def test_a_claim_keeps_other_runs_from_a_stock_server_and_a_loss_of_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "_ASK_AGAIN_S", 0.02)

    async def main() -> None:
        server = Server()
        first = server.claim("a")
        await first.begin()
        keeping = asyncio.create_task(first.keep())
        with pytest.raises(ConfigError, match="belongs to run a, which goes on"):
            await server.claim("b").begin()
        await server.claim("a").begin()
        await first.call()
        keeping.cancel()
        monkeypatch.setattr(lease, "LEASE_S", 0.2)
        await server.claim("b").begin()
        with pytest.raises(ClaimLostError, match="belongs to run b by now"):
            await first.call()
        await StockWorkers(server.ask).call("spurline_end_claim", "b")
        with pytest.raises(ClaimLostError, match="belonged to another run meanwhile"):
            await first.call()
        await first.begin()
        server.version = "default"
        with pytest.raises(ClaimLostError, match="was started again"):
            await first.call()

    asyncio.run(main())


def test_a_load_balancer_before_stock_servers_is_refused() -> None:
    servers = itertools.cycle([Server(), Server()])
    workers = StockWorkers(lambda *arguments: next(servers).ask(*arguments))
    with pytest.raises(ConfigError, match="as the URL of a load balancer does"):
        asyncio.run(ServerLease(workers.call, "http://a", "run").begin())


@pytest.mark.parametrize("was_killed", [False, True])
def test_an_update_begins_after_half_an_update_has_ended_and_joins_a_group_once(was_killed: bool) -> None:
    server = Server()
    server.is_updating = was_killed
    workers = StockWorkers(server.ask)

    async def main() -> None:
        # The second update goes on without the server.
        for port, finishes in ((1, True), (1, False), (2, True), (2, True)):
            where = {GROUPS: {"server": {"master_port": port}}}
            bucket = WeightBucket("vllm_native", (TensorPlace("a", "bfloat16", (2, 3)),), where, receiver="server")
            await workers.call("spurline_begin_update")
            await workers.call("spurline_load_bucket", bucket.to_plain())
            if finishes:
                await workers.call("spurline_finish_update")

    asyncio.run(main())
    ended = [FINISH] if was_killed else [START, FINISH]
    first, second = [START, JOIN, UPDATE, FINISH], [START, UPDATE, FINISH]
    assert server.calls == [*ended, *first, *second, *first, *second]


def test_a_server_that_hangs_or_cannot_be_sent_a_bucket_does_not_hold_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only vLLM's parts are replaced. The groups of a, b and c have 2, 3 and 4 members."""
    arrived: list[list[int]] = []
    destroyed: list[int] = []
    hangs = threading.Event()

    def join(host: str, port: int, rank: int, size: int, listen_socket: socket.socket) -> int:
        assert listen_socket.getsockname() == (host, port)
        if size == 3:
            hangs.wait()
        if size == 4:
            raise RuntimeError("no NCCL")
        return size

    def communicator(size: int, _: torch.device) -> Any:
        return SimpleNamespace(
            broadcast=lambda buffer, **_: arrived.append(buffer.tolist()), destroy=lambda: destroyed.append(size)
        )

    for name, part in (
        ("device_communicators.pynccl", SimpleNamespace(PyNcclCommunicator=communicator)),
        ("utils", SimpleNamespace(StatelessProcessGroup=SimpleNamespace(create=join))),
    ):
        monkeypatch.setitem(sys.modules, f"vllm.distributed.{name}", cast("ModuleType", part))
    monkeypatch.setattr(VllmNativeSyncConfig, "needs_gpu", False)
    sync = NativeSync(VllmNativeSyncConfig())
    sync.prepare({"a": 1, "b": 2, "c": 3}, is_lost=False)
    settings = sync.maker_settings()
    maker = TransferMaker(**settings)
    late = maker._groups["b"]
    narrow, wide = torch.ones(3, dtype=torch.bfloat16), torch.full((2, 2), 0.5)
    groups = maker.make(1, 1, [("narrow", narrow), ("wide", wide)]).where[GROUPS]
    # In the next publish, the others keep their groups.
    sync.prepare({"a": 1, "c": 3}, is_lost=False)
    assert sync.maker_settings() == settings
    bucket = maker.make(2, 1, [("narrow", narrow), ("wide", wide)])
    assert bucket.where[GROUPS] == {"a": groups["a"]}
    assert capsys.readouterr().err == "c gets no more weights, because sending failed: RuntimeError: no NCCL\n"
    assert [place.name for place in bucket.places] == ["wide", "narrow"]
    maker.taken()
    hangs.set()
    late.sent.result()
    assert destroyed == [3]
    packed = torch.cat([wide.view(-1).view(torch.uint8), narrow.view(torch.uint8)])
    assert arrived == [packed.tolist()] * 2
    # A server that ended after it got all weights is left too.
    sync.note_receivers({})
    maker.taken()
    assert destroyed == [3, 2]
    sync.prepare({"a": 1, "b": 2}, is_lost=False)
    assert sync.maker_settings() != settings
    # The store may be gone.
    monkeypatch.setattr(sync, "_store", object())
    sync.note_receivers({})
    sync.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "node0"])
def test_a_name_that_is_on_the_loopback_here_is_what_servers_elsewhere_get(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_native, "address_towards", lambda _: "127.0.0.1")
    monkeypatch.setattr(vllm_native, "TCPStore", lambda *_, **__: None)
    meeting = Meeting(host, 1, "", {"a": 1, "b": 1}, "cpu", 1.0)
    maker = TransferMaker(asdict(meeting))
    here = [group._listener.getsockname() for group in maker._groups.values()]
    assert {group.init_info["master_address"] for group in maker._groups.values()} == {host}
    assert {address for address, _ in here} == {"0.0.0.0" if host == "node0" else host}
    assert here[0] != here[1]
    maker.close()
