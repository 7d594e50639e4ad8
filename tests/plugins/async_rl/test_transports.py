"""Weights arrive bit for bit, within their time, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from weight_takers import Taker, Weights, weights

from spurline.errors import ConfigError, RunFailedError
from spurline.plugins.host import PluginHost
from spurline.plugins.registry import resolve
from spurline.protocols.ranks import RankRequest
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.source.publishing import Publisher, choose_sync
from spurline_async_rl.timeline.records import Timeline
from spurline_async_rl.weights.buckets import BucketSync, InProcessSync, cut, weights_on_gpu
from spurline_async_rl.weights.configs import (
    CudaIpcSyncConfig,
    DiskSyncConfig,
    InProcessSyncConfig,
    SharedMemorySyncConfig,
)
from spurline_async_rl.weights.cuda_ipc import CudaIpcSync
from spurline_async_rl.weights.disk import DiskSync, FileMaker
from spurline_async_rl.weights.shared_memory import MemoryMaker, MemoryReader, SharedMemorySync
from spurline_models.weight_buckets import MakerChoice, WeightBucket
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.protocols.weight_sync import SyncReport


class Hanging(Taker):
    """A part of its updates never ends."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    async def begin_update(self, version: int) -> None:
        await self._maybe_hang("begin_update")

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._maybe_hang("load_bucket")

    async def finish_update(self, version: int) -> None:
        await self._maybe_hang("finish_update")

    async def _maybe_hang(self, part: str) -> None:
        if part == self._part:
            await asyncio.Event().wait()


def publish(sync: BucketSync, backend: Any, takers: Sequence[Taker], version: int = 3) -> SyncReport:
    return asyncio.run(sync.publish(version, backend, takers))


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("kind", ["in_process", "shared_memory"])
def test_weights_arrive_bit_for_bit_at_every_engine_again_and_again(kind: str, bucket_bytes: int) -> None:
    sync: BucketSync = (
        InProcessSync(InProcessSyncConfig()) if kind == "in_process" else SharedMemorySync(SharedMemorySyncConfig())
    )
    sync.max_bucket_bytes = bucket_bytes
    takers = [Taker(), Taker()]
    try:
        for version, sign in ((1, 1), (2, -1)):
            expected = weights(sign)
            backend = Weights(expected)
            report = publish(sync, backend, takers, version)
            for taker in takers:
                assert taker.version == version
                assert list(taker.taken) == list(expected)
                for name, tensor in expected.items():
                    assert taker.taken[name].dtype == tensor.dtype
                    assert torch.equal(taker.taken[name], tensor), name
            assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
            assert threading.main_thread() not in backend.threads
    finally:
        sync.close()
    for bucket in takers[0].buckets:
        size = sum(expected[place.name].nbytes for place in bucket.places)
        assert size <= bucket_bytes or len(bucket.places) == 1


def test_one_memory_serves_all_buckets_and_publishes_and_grows_with_the_largest() -> None:
    sync = SharedMemorySync(SharedMemorySyncConfig())
    sync.max_bucket_bytes = 1024
    taker = Taker()
    try:
        for _ in range(2):
            publish(sync, Weights({str(number): torch.zeros(100) for number in range(9)}), [taker])
        publish(sync, Weights({"large": torch.arange(500_000.0)}), [taker])
        assert torch.equal(taker.taken["large"], torch.arange(500_000.0))
        publish(sync, Weights({"small": torch.ones(1)}), [taker])
        assert len({(bucket.where["path"], bucket.where["file"]) for bucket in taker.buckets}) == 1
    finally:
        sync.close()
        sync.close()
    with pytest.raises(RunFailedError, match=r"cannot open the shared memory.*one machine.*weight_sync: disk"):
        MemoryReader().read(taker.buckets[-1])


def test_a_bucket_that_outgrows_the_memory_is_read_as_it_was() -> None:
    maker = MemoryMaker(size=64)
    try:
        given = [("first", torch.arange(10.0)), ("large", torch.arange(400_000.0)), ("last", torch.ones(3))]
        read = MemoryReader().read(maker.make(1, 1, given))
        assert [name for name, _ in read] == ["first", "large", "last"]
        assert all(torch.equal(tensor, expected) for (_, tensor), (_, expected) in zip(read, given, strict=True))
    finally:
        maker.close()


@pytest.mark.parametrize("part", ["begin_update", "load_bucket", "finish_update"])
def test_a_publish_that_takes_too_long_says_what_it_waited_for(part: str) -> None:
    sync = SharedMemorySync(SharedMemorySyncConfig(timeout_s=0.2))
    waited_for = {"begin_update": "begin an update", "load_bucket": "load bucket 1", "finish_update": "finish"}[part]
    try:
        with pytest.raises(RunFailedError, match=rf"version 3.*0.2 s.*the engine to {waited_for}.*timeout_s"):
            publish(sync, Weights(weights()), [Taker(), Hanging(part)])
    finally:
        sync.close()


def test_a_backend_that_gives_no_weights_is_what_a_publish_says_it_waited_for() -> None:
    never = threading.Event()

    class Stuck:
        def named_weights(self) -> Iterator[tuple[str, Tensor]]:
            never.wait(30)
            yield "late", torch.zeros(1)

    sync = InProcessSync(InProcessSyncConfig(timeout_s=0.2))
    with pytest.raises(RunFailedError, match="the backend's first weights"):
        publish(sync, Stuck(), [Taker()])
    never.set()


CREATE = """
import sys, torch
from spurline_async_rl.weights.shared_memory import MemoryMaker
bucket = MemoryMaker(size=1 << 20).make(1, 1, [("w", torch.full((1000,), 2.0))])
import json
print(json.dumps(bucket.to_plain()), flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_memory_of_another_process_is_read_until_that_is_killed_and_has_no_name_that_could_stay() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", CREATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        assert owner.stdout is not None
        bucket = WeightBucket.from_plain(json.loads(owner.stdout.readline()))
        ((_, tensor),) = MemoryReader().read(bucket)
        assert tensor.sum() == 2000
        # The folder itself is everybody's: what comes and goes there need not be the owner's.
        assert Path(bucket.where["path"]).stat().st_nlink == 0
        assert "/dev/shm/" not in Path(f"/proc/{owner.pid}/maps").read_text()
    finally:
        # All that it has started too: nobody is left who could tidy up.
        os.killpg(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=30)
    with pytest.raises(RunFailedError, match="cannot open"):
        MemoryReader().read(bucket)


def test_the_memory_of_another_process_with_the_number_of_one_that_ended_is_not_taken_for_its_own() -> None:
    maker, other = (MemoryMaker(size=4096) for _ in range(2))
    try:
        bucket, wrong = (each.make(1, 1, [("w", torch.ones(3))]) for each in (maker, other))
        mixed = WeightBucket("shared_memory", bucket.places, {**bucket.where, "file": wrong.where["file"]})
        with pytest.raises(RunFailedError, match="another file"):
            MemoryReader().read(mixed)
    finally:
        maker.close()
        other.close()


def test_links_among_files_of_weights_are_removed_and_what_they_point_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("spurline-weights-1-1.tmp", "spurline-weights-1-1.safetensors"):
        (weights / name).symlink_to(tmp_path / "precious")
    (weights / "spurline-weights-folder").mkdir()
    FileMaker(str(weights)).make(1, 1, [("a", torch.ones(2))])
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["thesis.txt"]
    assert [path.is_symlink() for path in weights.iterdir()] == [False]


class Ranks:
    """A backend whose weights are elsewhere, as far as a publish goes. made: how its buckets were to be made."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.made: list[tuple[int, MakerChoice]] = []
        self.makers: list[Any] = []

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the weights came to the controller")

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        assert first == 1
        self.made.append((version, choice))
        plain = json.loads(json.dumps(choice.settings))
        maker = resolve(choice.maker, "a maker")(**plain)
        self.makers.append(maker)
        for number, held in enumerate(cut(self._weights.items(), choice.max_bytes), 1):
            # What a pipe carries.
            yield WeightBucket.from_plain(json.loads(json.dumps(maker.make(version, number, iter(held)).to_plain())))
            maker.taken()


@pytest.mark.parametrize("kind", ["shared_memory", "disk"])
def test_buckets_are_made_where_the_weights_are(kind: str, tmp_path: Path) -> None:
    sync = (
        SharedMemorySync(SharedMemorySyncConfig())
        if kind == "shared_memory"
        else DiskSync(DiskSyncConfig(folder=str(tmp_path / "weights")))
    )
    sync.max_bucket_bytes = 600
    backend, taker = Ranks(weights()), Taker()
    publish(sync, backend, [taker], version=7)
    assert [version for version, _ in backend.made] == [7]
    assert len(taker.buckets) > 1
    assert all(torch.equal(taker.taken[name], tensor) for name, tensor in weights().items())
    assert list(taker.taken) == list(weights())
    if kind == "disk":
        (tmp_path / "weights" / "spurline-weights-7-9.safetensors").write_text("left by a killed rank")
    sync.close()
    assert kind != "disk" or list((tmp_path / "weights").iterdir()) == []
    for maker in backend.makers:
        maker.close()


class BackendAt:
    """Settings of a backend with ranks."""

    name = "many"

    def __init__(self, device: str) -> None:
        self._device = device

    def rank_request(self) -> RankRequest:
        return RankRequest(2, cast("Any", self._device))


def test_where_the_weights_are_is_what_the_backend_says_and_not_what_this_machine_has() -> None:
    on_gpu, on_cpu = (cast("Any", SimpleNamespace(backend=BackendAt(device))) for device in ("cuda", "cpu"))
    assert [weights_on_gpu(on_gpu), weights_on_gpu(on_cpu)] == [True, False]
    with pytest.raises(ConfigError, match=r"is cuda_ipc.*backend 'many' has its weights on CPUs.*shared_memory"):
        CudaIpcSync(CudaIpcSyncConfig(), on_cpu)


def test_the_transport_is_the_engines_best_or_the_configs_if_the_engine_knows_it() -> None:
    registry = PluginHost.load(["async_rl"]).registry
    engine = Taker()
    assert choose_sync(None, engine, registry, False).name == "shared_memory"
    given = InProcessSyncConfig(timeout_s=5)
    assert choose_sync(given, engine, registry, False) is given
    engine.transports = ("disk",)
    with pytest.raises(ConfigError, match=r"source\.weight_sync\.name is in_process.*supports only disk"):
        choose_sync(given, engine, registry, False)
    engine.transports = ("carrier_pigeon",)
    with pytest.raises(ConfigError, match=r"source\.engine\.name.*carrier_pigeon"):
        choose_sync(None, engine, registry, False)
    engine.transports = ("cuda_ipc", "collective", "shared_memory")
    assert [choose_sync(None, engine, registry, gpu).name for gpu in (False, True)] == ["collective", "cuda_ipc"]
    engine.transports = ("cuda_ipc",)
    with pytest.raises(ConfigError, match="cuda_ipc"):
        choose_sync(None, engine, registry, False)


class Fleet(Taker):
    """An engine of a plugin with a member that it has started anew."""

    longest_start_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.member = Taker()
        self.events: list[str] = []

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        return [self.member]

    async def start(self) -> None:
        self.events.append("start")

    async def wait_for_one(self) -> None:
        self.events.append("wait for one")


@pytest.mark.parametrize("make", [Taker, Fleet])
def test_any_engine_that_takes_weights_is_started_and_its_members_are_served(make: type[Taker], tmp_path: Path) -> None:
    engine, loop, told = make(), LoopThread("publishing"), threading.Event()
    config: Any = SimpleNamespace(engine=SimpleNamespace(name="own"), weight_sync=None, watchdog_s=60.0)
    run, backend, rollout_engine = cast("Any", None), cast("Any", Weights(weights())), cast("Any", engine)
    registry = PluginHost.load(["async_rl"]).registry
    timeline = Timeline(tmp_path / "timeline.jsonl")
    publisher = Publisher(rollout_engine, config, run, registry, loop, timeline, None, told.set)
    try:
        publisher.start_engines()
        publisher.publish(1, backend)
        publisher.publish(2, backend, engine.awaiting_weights)
        assert engine.on_awaiting_weights is not None
        engine.on_awaiting_weights()
    finally:
        publisher.close()
        loop.close()
    assert told.is_set()
    assert engine.version == 1
    if isinstance(engine, Fleet):
        assert (engine.events, engine.member.version) == (["start", "wait for one"], 2)
