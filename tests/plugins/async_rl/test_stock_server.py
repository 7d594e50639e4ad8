"""Stock vLLM servers, without our worker extension: claims, updates, and sends of which one hangs."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from spurline.errors import ConfigError, RunFailedError
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.vllm import lease
from spurline_async_rl.engines.vllm.lease import ClaimLostError, ServerLease
from spurline_async_rl.engines.vllm.stock import StockWorkers
from spurline_async_rl.weights import vllm_native
from spurline_async_rl.weights.configs import VllmNativeSyncConfig
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
def test_an_update_begins_after_the_half_of_a_killed_run_has_ended_and_joins_a_group_once(was_killed: bool) -> None:
    server = Server()
    server.is_updating = was_killed
    workers = StockWorkers(server.ask)

    async def load(group: Any) -> None:
        where = {GROUPS: {"server": group}}
        bucket = WeightBucket("vllm_native", (TensorPlace("a", "bfloat16", (2, 3)),), where, receiver="server")
        await workers.call("spurline_load_bucket", bucket.to_plain())

    async def main() -> None:
        for port in (1, 1, 2):
            await workers.call("spurline_begin_update")
            await load({"master_port": port})
            await workers.call("spurline_finish_update")
        with pytest.raises(EngineDiedError, match="server could not be sent weights: it is gone"):
            await load("it is gone")

    asyncio.run(main())
    ended = [FINISH] if was_killed else [START, FINISH]
    assert server.calls == [*ended, START, JOIN, UPDATE, FINISH, START, UPDATE, FINISH, START, JOIN, UPDATE, FINISH]


def test_a_server_that_hangs_while_it_gets_a_bucket_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[list[int]] = []
    hangs = threading.Event()

    def send(self: Any, buffer: Tensor) -> None:
        if self.init_info["world_size"] == 3:
            hangs.wait()
        arrived.append(buffer.tolist())

    monkeypatch.setattr(vllm_native._ServerGroup, "send", send)
    monkeypatch.setattr(VllmNativeSyncConfig, "needs_gpu", False)
    sync = NativeSync(VllmNativeSyncConfig())
    sync.prepare({"a": 1, "b": 2}, is_lost=False)
    maker = TransferMaker(**sync.maker_settings())
    narrow, wide = torch.ones(3, dtype=torch.bfloat16), torch.full((2, 2), 0.5)
    groups = maker.make(1, 1, [("narrow", narrow), ("wide", wide)]).where[GROUPS]
    sync.note_receivers({"a": 1})
    bucket = maker.make(1, 2, [("narrow", narrow), ("wide", wide)])
    assert bucket.where[GROUPS] == {"a": groups["a"], "b": "b ended while weights were on their way"}
    assert [place.name for place in bucket.places] == ["wide", "narrow"]
    maker.taken()
    packed = torch.cat([wide.view(-1).view(torch.uint8), narrow.view(torch.uint8)])
    assert arrived == [packed.tolist()] * 2
    hangs.set()
    maker.close()
    settings = sync.maker_settings()
    sync.prepare({"a": 1, "b": 2}, is_lost=False)
    assert sync.maker_settings() != settings
    sync.close()
