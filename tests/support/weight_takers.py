"""What stands for engines and their weight syncs where weights of ranks are published."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from spurline.protocols.collator import ParallelLayout
from spurline_async_rl.weights.buckets import BucketSync, InProcessSync
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import (
    CollectiveSyncConfig,
    DiskSyncConfig,
    InProcessSyncConfig,
    SharedMemorySyncConfig,
)
from spurline_async_rl.weights.disk import DiskSync
from spurline_async_rl.weights.reading import BucketReader
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_models.machine import this_machine
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.testing.backend_cases import assert_weights_equal, minibatch, weights_of


class Weights:
    """A backend for a publish. threads: the threads that asked for its weights."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.threads: set[threading.Thread] = set()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._weights.items():
            self.threads.add(threading.current_thread())
            yield item


def weights(sign: float = 1.0) -> dict[str, Tensor]:
    """Return tensors of every kind: odd sizes, half precision, no dimension, no element, not contiguous."""
    random = torch.Generator().manual_seed(0)
    made = {
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
    return {name: tensor if tensor.dtype == torch.bool else tensor * sign for name, tensor in made.items()}


class Taker(TakesWeights):
    """An engine that keeps copies of what comes, by any transport, and how it came."""

    transports: Sequence[str] = ("shared_memory", "disk", "collective", "in_process")

    def __init__(self, name: str = "the engine", *, takes_adapters: bool = False, dtype: str | None = None) -> None:
        self.name = name
        self.takes_adapters = takes_adapters
        self.began: list[tuple[str, int]] = []
        self.adapter: Mapping[str, Any] = {}
        self.taken: dict[str, Tensor] = {}
        self.buckets: list[WeightBucket] = []
        self.version = -1
        self._dtype = dtype
        self.reader = BucketReader()

    @property
    def receivers(self) -> Mapping[str, int]:
        return {self.name: 1}

    @property
    def weights_dtype(self) -> str | None:
        return self._dtype

    async def begin_update(self, version: int) -> None:
        self._begin("model", version)

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        self.adapter = adapter
        self._begin("adapter", version)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        self.buckets.append(bucket)
        names = [place.name for place in bucket.places]
        read = list(zip(names, bucket.tensors, strict=True)) if bucket.tensors else None
        if read is None:
            sent = WeightBucket.from_plain({**bucket.to_plain(), "receiver": self.name})
            read = await asyncio.to_thread(lambda: list(self.reader.read(sent)))
        assert not self.taken.keys() & {name for name, _ in read}, "a tensor came twice"
        self.taken |= {name: tensor.clone() for name, tensor in read}

    async def finish_update(self, version: int) -> None:
        self.reader.end_update()
        self.version = version

    def _begin(self, part: str, version: int) -> None:
        self.began.append((part, version))
        self.taken = {}


def make_sync(transport: str, folder: Path, bucket_bytes: int = 50_000, **settings: Any) -> Any:
    """Return a sync whose buckets are so small that a tiny model takes several."""
    made: dict[str, Callable[[], BucketSync]] = {
        "shared_memory": lambda: SharedMemorySync(SharedMemorySyncConfig(**settings)),
        "disk": lambda: DiskSync(DiskSyncConfig(folder=str(folder / "weights"), **settings)),
        "collective": lambda: CollectiveSync(CollectiveSyncConfig(**settings)),
        "in_process": lambda: InProcessSync(InProcessSyncConfig(**settings)),
    }
    sync = made[transport]()
    sync.max_bucket_bytes = bucket_bytes
    return sync


def update_and_publish(
    backend: Any, layout: ParallelLayout, sync: Any, taker: Taker, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train a step and publish. All weights must arrive, and none through the controller."""
    backend.update(*minibatch("packed", layout, version))
    expected = weights_of(backend)
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "named_weights", None)
        report = asyncio.run(sync.publish(version, backend, [taker]))
    assert_weights_equal(taker.taken, expected)
    assert report.bytes_sent == sum(value.nbytes for value in expected.values())


def assert_published_again_and_again(
    ranks: tuple[Any, ParallelLayout], transport: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that engines get the newest weights in buckets from one rank, which leaves nothing behind."""
    backend, layout = ranks
    sync, taker = make_sync(transport, folder), Taker()
    with closing(sync):
        for version in (1, 2):
            update_and_publish(backend, layout, sync, taker, version, monkeypatch)
    sizes = [[math.prod(place.shape) * 4 for place in bucket.places] for bucket in taker.buckets]
    assert len(sizes) > 4
    assert all(sum(size) <= sync.max_bucket_bytes or len(size) == 1 for size in sizes)
    if transport == "disk":
        assert list((folder / "weights").iterdir()) == []
        return
    assert {bucket.machine for bucket in taker.buckets} == {this_machine()}
    owners = {int(bucket.where["path"].split("/")[2]) for bucket in taker.buckets}
    assert len(owners) == 1
    assert owners <= {process.pid for process in psutil.Process().children(recursive=True)}
