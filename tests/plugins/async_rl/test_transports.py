"""Weights arrive bit for bit, within their time, and leave nothing behind."""

from __future__ import annotations

import asyncio
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

from spurline.errors import ConfigError, RunFailedError
from spurline.plugins.host import PluginHost
from spurline.protocols.rollout_engine import TakesWeights, WeightBucket
from spurline.protocols.weight_sync import SyncReport
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.source.publishing import Publisher, choose_sync
from spurline_async_rl.timeline.recorder import Timeline
from spurline_async_rl.weights.buckets import BucketSync, InProcessSync, cut
from spurline_async_rl.weights.configs import InProcessSyncConfig, SharedMemorySyncConfig
from spurline_async_rl.weights.shared_memory import SegmentReader, SharedMemorySync

SHM = Path("/dev/shm")


class Weights:
    """A backend, as far as a publish goes. threads: on which its weights were asked for."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.threads: set[threading.Thread] = set()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._weights.items():
            self.threads.add(threading.current_thread())
            yield item


class Taker(TakesWeights):
    """An engine that keeps copies of what comes. hang_in: a part of the update that never ends."""

    transports: Sequence[str] = ("shared_memory", "in_process")

    def __init__(self, hang_in: str = "", damage: int | None = None) -> None:
        self.taken: dict[str, Tensor] = {}
        self.buckets: list[WeightBucket] = []
        self.version = -1
        self._reader = SegmentReader()
        self._hang_in = hang_in
        self._damage = damage

    async def begin_update(self, version: int) -> None:
        await self._maybe_hang("begin_update")
        self.taken = {}

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._maybe_hang("load_bucket")
        self.buckets.append(bucket)
        if self._damage is not None:
            with (SHM / bucket.where["segment"]).open("r+b") as segment:
                segment.seek(self._damage)
                segment.write(b"\x55")
        names = [place.name for place in bucket.places]
        weights = zip(names, bucket.tensors, strict=True) if bucket.tensors else self._reader.read(bucket)
        self.taken |= {name: tensor.clone() for name, tensor in weights}

    async def finish_update(self, version: int) -> None:
        await self._maybe_hang("finish_update")
        self.version = version

    async def _maybe_hang(self, where: str) -> None:
        if where == self._hang_in:
            await asyncio.Event().wait()


def publish(sync: BucketSync, backend: Any, takers: Sequence[Taker], version: int = 3) -> SyncReport:
    return asyncio.run(sync.publish(version, backend, takers))


def weights() -> dict[str, Tensor]:
    """Of every kind: sizes that no alignment divides, half precision, no dimension, no element, not contiguous."""
    random = torch.Generator().manual_seed(0)
    return {
        "fp32": torch.randn(7, 11, generator=random),
        "bf16": torch.randn(33, generator=random).bfloat16(),
        "fp16": torch.randn(3, 5, 7, generator=random).half(),
        "turned": torch.randn(6, 9, generator=random).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "large": torch.randn(3000, generator=random),
        "fp64": torch.randn(5, dtype=torch.float64, generator=random),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("kind", ["in_process", "shared_memory"])
def test_weights_arrive_bit_for_bit_at_every_engine_again_and_again(
    kind: str, checksum: bool, bucket_bytes: int
) -> None:
    sync: BucketSync = (
        InProcessSync(InProcessSyncConfig(checksum=checksum))
        if kind == "in_process"
        else SharedMemorySync(SharedMemorySyncConfig(checksum=checksum))
    )
    sync.max_bucket_bytes = bucket_bytes
    takers = [Taker(), Taker()]
    try:
        for version, sign in ((1, 1), (2, -1)):
            expected = {name: tensor * sign if name != "flags" else tensor for name, tensor in weights().items()}
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


def test_buckets_hold_as_much_as_fits_in_order() -> None:
    tensors = [(str(number), torch.zeros(number, dtype=torch.uint8)) for number in (3, 4, 5, 100, 1, 9)]
    assert [[name for name, _ in held] for held in cut(tensors, 10)] == [["3", "4"], ["5"], ["100"], ["1", "9"]]


def test_one_segment_serves_all_buckets_and_publishes_until_one_is_larger() -> None:
    sync = SharedMemorySync(SharedMemorySyncConfig())
    sync.max_bucket_bytes = 1024
    taker = Taker()
    try:
        for _ in range(2):
            publish(sync, Weights({str(number): torch.zeros(100) for number in range(9)}), [taker])
        assert len({bucket.where["segment"] for bucket in taker.buckets}) == 1
        publish(sync, Weights({"large": torch.zeros(10_000)}), [taker])
        names = dict.fromkeys(bucket.where["segment"] for bucket in taker.buckets)
        assert [(SHM / name).exists() for name in names] == [False, True]
    finally:
        sync.close()
        sync.close()
    assert not any((SHM / name).exists() for name in names)


def test_a_changed_byte_is_noticed_by_its_checksum() -> None:
    for checksum in (True, False):
        sync = SharedMemorySync(SharedMemorySyncConfig(checksum=checksum))
        try:
            if checksum:
                with pytest.raises(RunFailedError, match=r"fp32 to fp64.*checksum.*changed on the way"):
                    publish(sync, Weights(weights()), [Taker(), Taker(damage=5)])
            else:
                taker = Taker(damage=5)
                publish(sync, Weights(weights()), [taker])
                assert not torch.equal(taker.taken["fp32"], weights()["fp32"])
        finally:
            sync.close()


@pytest.mark.parametrize("part", ["begin_update", "load_bucket", "finish_update"])
def test_a_publish_that_takes_too_long_says_what_it_waited_for(part: str) -> None:
    sync = SharedMemorySync(SharedMemorySyncConfig(timeout_s=0.2))
    waited_for = {"begin_update": "begin an update", "load_bucket": "load bucket 1", "finish_update": "finish"}[part]
    try:
        with pytest.raises(RunFailedError, match=rf"version 3.*0.2 s.*2 engine\(s\) to {waited_for}.*timeout_s"):
            publish(sync, Weights(weights()), [Taker(), Taker(hang_in=part)])
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


def test_what_the_backend_raises_reaches_whoever_publishes() -> None:
    class Broken:
        def named_weights(self) -> Iterator[tuple[str, Tensor]]:
            yield "first", torch.zeros(1)
            raise ValueError("no memory left on the moon")

    with pytest.raises(ValueError, match="moon"):
        publish(InProcessSync(InProcessSyncConfig()), Broken(), [Taker()])


CREATE = """
import sys, torch
from spurline_async_rl.weights.configs import SharedMemorySyncConfig
from spurline_async_rl.weights.shared_memory import SharedMemorySync
sync = SharedMemorySync(SharedMemorySyncConfig())
(bucket,) = sync.make_buckets(1, iter([("w", torch.zeros(1000))]))
print(bucket.where["segment"], flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_killed_trainer_leaves_no_segment() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", CREATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stderr is not None
    segment = SHM / owner.stdout.readline().strip()
    assert segment.exists()
    owner.send_signal(signal.SIGKILL)
    # The tracker, which unlinks it, holds the other end of stderr until it has done so.
    owner.stderr.read()
    owner.wait(30)
    for stream in (owner.stdin, owner.stdout, owner.stderr):
        stream.close()  # pyright: ignore[reportOptionalMemberAccess]
    assert not segment.exists()


READ = """
import sys
from spurline.protocols.rollout_engine import TensorPlace, WeightBucket
from spurline_async_rl.weights.shared_memory import SegmentReader
reader = SegmentReader()
place = TensorPlace("w", "float32", (1000,))
print(float(reader.read(WeightBucket("shared_memory", (place,), {"segment": sys.argv[1]}))[0][1].sum()), flush=True)
"""


@pytest.mark.processes
def test_a_reader_that_ends_leaves_the_segment_to_its_owner() -> None:
    sync = SharedMemorySync(SharedMemorySyncConfig())
    try:
        (bucket,) = sync.make_buckets(1, iter([("w", torch.full((1000,), 2.0))]))
        for _ in range(2):
            read = subprocess.run(
                [sys.executable, "-c", READ, bucket.where["segment"]], capture_output=True, text=True, timeout=120
            )
            assert (read.stdout.strip(), read.stderr) == ("2000.0", "")
        assert (SHM / bucket.where["segment"]).exists()
    finally:
        sync.close()


def test_the_transport_is_the_engines_best_or_the_configs_if_the_engine_knows_it() -> None:
    registry = PluginHost.load(["async_rl"]).registry
    engine = Taker()
    assert choose_sync(None, engine, registry).name == "shared_memory"
    given = InProcessSyncConfig(timeout_s=5)
    assert choose_sync(given, engine, registry) is given
    engine.transports = ("disk",)
    with pytest.raises(ConfigError, match=r"source\.weight_sync\.name is in_process.*takes weights by disk"):
        choose_sync(given, engine, registry)
    engine.transports = ("carrier_pigeon",)
    with pytest.raises(ConfigError, match=r"source.engine.name.*carrier_pigeon.*shared_memory"):
        choose_sync(None, engine, registry)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_transport_that_needs_one_is_chosen() -> None:
    engine = Taker()
    engine.transports = ("cuda_ipc", "nccl", "shared_memory")
    assert choose_sync(None, engine, PluginHost.load(["async_rl"]).registry).name == "shared_memory"


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
    publisher = Publisher(rollout_engine, config, run, registry, loop, timeline, told.set)
    try:
        publisher.start_engines()
        publisher.publish(1, backend)
        publisher.publish(2, backend, publisher.awaiting_weights)
        assert engine.on_awaiting_weights is not None
        engine.on_awaiting_weights()
    finally:
        publisher.close()
        loop.close()
    assert told.is_set()
    assert engine.version == 1
    if isinstance(engine, Fleet):
        assert (engine.events, engine.member.version) == (["start", "wait for one"], 2)
