"""Weights of ranks reach engines without ever coming to the controller."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from spurline.config.loading import LoadedConfig
from spurline.errors import RankFailedError, RunFailedError
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.rollout_engine import TakesWeights, WeightBucket
from spurline.protocols.weight_sync import MakerChoice
from spurline.ranks.machine import this_machine
from spurline.testing.backend_cases import assert_weights_equal, minibatch, weights_of
from spurline.testing.backend_runs import backend_run, opened
from spurline_async_rl.weights.configs import DiskSyncConfig, SharedMemorySyncConfig
from spurline_async_rl.weights.disk import DiskSync, read_file
from spurline_async_rl.weights.shared_memory import MemoryReader, SharedMemorySync

pytestmark = pytest.mark.processes


class Taker(TakesWeights):
    """An engine that keeps copies of what comes."""

    transports: Sequence[str] = ("shared_memory", "disk")

    def __init__(self) -> None:
        self.taken: dict[str, Tensor] = {}
        self.buckets: list[WeightBucket] = []
        self._readers = {"shared_memory": MemoryReader().read, "disk": read_file}

    async def begin_update(self, version: int) -> None:
        self.taken = {}

    async def load_bucket(self, bucket: WeightBucket) -> None:
        self.buckets.append(bucket)
        self.taken |= {name: tensor.clone() for name, tensor in self._readers[bucket.transport](bucket)}

    async def finish_update(self, version: int) -> None:
        pass


class KillsTheOwner(Taker):
    """Kills the process that made the first bucket, once it has it."""

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await super().load_bucket(bucket)
        os.kill(int(bucket.where["path"].split("/")[2]), signal.SIGKILL)


Opened = tuple[Any, ParallelLayout]


def run_of(model: Path) -> LoadedConfig:
    backend = {"name": "fsdp", "ranks": 2, "device": "cpu", "num_threads": 1}
    return backend_run(model, backend, ("fsdp_backend",))


@pytest.fixture(scope="module")
def ranks(spurline_tiny_model: Path) -> Iterator[Opened]:
    with opened(run_of(spurline_tiny_model)) as lent:
        yield lent


def make_sync(transport: str, folder: Path) -> Any:
    if transport == "disk":
        sync: Any = DiskSync(DiskSyncConfig(folder=str(folder / "weights"), checksum=True))
    else:
        sync = SharedMemorySync(SharedMemorySyncConfig(checksum=True))
    sync.max_bucket_bytes = 50_000
    return sync


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_engines_get_the_weights_of_now_again_and_again_and_the_controller_none_of_them(
    ranks: Opened, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, layout = ranks
    sync, taker = make_sync(transport, tmp_path), Taker()
    with closing(sync):
        for version in (1, 2):
            backend.update(*minibatch("packed", layout, version))
            expected = weights_of(backend)
            with monkeypatch.context() as patch:
                patch.setattr(type(backend), "named_weights", None)
                report = asyncio.run(sync.publish(version, backend, [taker]))
            assert_weights_equal(taker.taken, expected)
            assert report.bytes_sent == sum(value.nbytes for value in expected.values())
    sizes = [[math.prod(place.shape) * 4 for place in bucket.places] for bucket in taker.buckets]
    assert len(sizes) > 4
    assert all(sum(size) <= sync.max_bucket_bytes or len(size) == 1 for size in sizes)
    if transport == "disk":
        assert list((tmp_path / "weights").iterdir()) == []
    else:
        assert {bucket.machine for bucket in taker.buckets} == {this_machine()}
        children = {process.pid for process in psutil.Process().children(recursive=True)}
        owners = {int(bucket.where["path"].split("/")[2]) for bucket in taker.buckets}
        assert len(owners) == 1
        assert owners <= children


def test_a_publish_that_stops_in_the_middle_leaves_the_ranks_ready_for_the_next_call(ranks: Opened) -> None:
    backend, layout = ranks
    choice = MakerChoice(SharedMemorySync.maker, {"size": 1000, "checksum": False}, 1000)
    buckets = backend.weight_buckets(5, choice)
    assert next(buckets).places != next(buckets).places
    buckets.close()
    assert backend.update(*minibatch("packed", layout))["grad_norm"] > 0


def test_a_maker_that_fails_says_so_in_the_controller_with_its_rank(spurline_tiny_model: Path, tmp_path: Path) -> None:
    sync = make_sync("disk", tmp_path)
    (tmp_path / "weights").write_text("a file where a folder should be")
    with (
        opened(run_of(spurline_tiny_model)) as (backend, _),
        pytest.raises(RunFailedError, match="the weights cannot be written") as raised,
    ):
        asyncio.run(sync.publish(1, backend, [Taker()]))
    assert "rank 0" in str(raised.value.__notes__).lower()


def test_a_rank_that_is_killed_between_two_buckets_ends_the_publish_and_its_memory(spurline_tiny_model: Path) -> None:
    sync, taker = make_sync("shared_memory", Path()), KillsTheOwner()
    with opened(run_of(spurline_tiny_model)) as (backend, _), closing(sync):
        with pytest.raises(RankFailedError, match=r"Rank 0.*SIGKILL"):
            asyncio.run(sync.publish(1, backend, [taker]))
        with pytest.raises(RunFailedError, match="cannot be opened"):
            MemoryReader().read(taker.buckets[0])
