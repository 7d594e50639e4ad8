"""Publishes of changes: exact in every version, small where little changed, and whole for engines that need all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weight_takers import Taker, Weights, weights

from spurline.errors import BucketLostError
from spurline_async_rl.weights import changes
from spurline_async_rl.weights.buckets import BucketSync
from spurline_async_rl.weights.changes import ChangesReader
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig, DiskSyncConfig, SharedMemorySyncConfig
from spurline_async_rl.weights.disk import DiskSync
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.weight_sync import SyncReport


def memory_sync(full_every: int = 100, bucket_bytes: int = 4000) -> SharedMemorySync:
    sync = SharedMemorySync(SharedMemorySyncConfig(full_every=full_every))
    sync.max_bucket_bytes = bucket_bytes
    return sync


def publish(sync: BucketSync, given: Mapping[str, Tensor], takers: Sequence[Taker], version: int) -> SyncReport:
    report = asyncio.run(sync.publish(version, Weights(given), takers))
    for taker in takers:
        assert list(taker.taken) == list(given)
        for name, tensor in given.items():
            assert (taker.taken[name].dtype, taker.taken[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(bits(taker.taken[name]), bits(tensor)), name
    return report


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def edited(given: Mapping[str, Tensor], seed: int, share: float) -> dict[str, Tensor]:
    """Return tensors of which a share of the bytes is random, so that there are NaN and -0.0 among the values."""
    random = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, tensor in given.items():
        flat = bits(tensor).clone()
        chosen = torch.rand(len(flat), generator=random) < share
        high = 2 if tensor.dtype == torch.bool else 256
        flat[chosen] = torch.randint(high, (int(chosen.sum()),), generator=random, dtype=torch.uint8)
        made[name] = flat.view(tensor.dtype).view(tensor.shape)
    return made


def whole(given: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in given.values())


def lightly_changed(tensor: Tensor) -> Tensor:
    """Return 16-bit weights in which one value of thirty differs by its last bit."""
    flat = tensor.clone().view(torch.int16)
    flat[::30] ^= 1
    return flat.view(tensor.dtype)


@given(
    steps=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.002, 0.3])), min_size=1, max_size=6),
    full_every=st.integers(1, 4),
    block=st.sampled_from([8, 64, 1 << 22]),
)
def test_every_version_arrives_bit_for_bit(steps: list[tuple[int, float]], full_every: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch, closing(memory_sync(full_every)) as sync:
        patch.setattr(changes, "_BLOCK_BYTES", block)
        taker, given = Taker(), weights()
        publish(sync, given, [taker], 1)
        for version, (seed, share) in enumerate(steps, 2):
            given = edited(given, seed, share)
            publish(sync, given, [taker], version)


@pytest.mark.parametrize("kind", ["shared_memory", "disk", "collective"])
def test_only_what_changed_is_sent_until_the_next_publish_of_all(kind: str, tmp_path: Path) -> None:
    sync: BucketSync = {
        "shared_memory": lambda: SharedMemorySync(SharedMemorySyncConfig(full_every=4)),
        "disk": lambda: DiskSync(DiskSyncConfig(full_every=4, folder=str(tmp_path))),
        "collective": lambda: CollectiveSync(CollectiveSyncConfig(full_every=4)),
    }[kind]()
    first = {"wide": torch.randn(50_000).bfloat16(), "same": torch.randn(10_000)}
    second = {**first, "wide": lightly_changed(first["wide"])}
    with closing(sync):
        takers = [Taker("one"), Taker("two")]
        sent = [publish(sync, given, takers, n).bytes_sent for n, given in enumerate([first, second, second, first], 1)]
        assert sent[0] == whole(first)
        assert 0 < sent[1] < whole(first) / 15
        assert sent[2] == 0
        assert sent[3] == sent[1]
        assert publish(sync, second, takers, 5).bytes_sent == whole(first)


def test_an_engine_that_is_new_gets_all_weights_and_then_changes_like_the_others() -> None:
    first = {"weight": torch.randn(20_000).bfloat16()}
    second = {"weight": lightly_changed(first["weight"])}
    old, new = Taker("old"), Taker("new")
    with closing(memory_sync()) as sync:
        publish(sync, first, [old], 1)
        publish(sync, second, [old], 2)
        # The new engine gets the current version by itself.
        assert publish(sync, second, [new], 2).bytes_sent == whole(first)
        assert publish(sync, first, [old, new], 3).bytes_sent < whole(first) / 10
        # An engine without the last version gets all weights, together with the others.
        assert publish(sync, second, [old], 4).bytes_sent < whole(first) / 10
        assert publish(sync, first, [old, new], 5).bytes_sent == whole(first)


def test_an_engine_that_was_started_again_under_its_name_is_sent_all_weights() -> None:
    first = {"weight": torch.randn(20_000).bfloat16(), "other": torch.randn(20_000)}
    second = {name: tensor.flip(0) for name, tensor in first.items()}
    taker = Taker()
    with closing(memory_sync()) as sync:
        publish(sync, first, [taker], 1)
        taker.reader.changes = ChangesReader()
        publish(sync, second, [taker], 2)


@pytest.mark.parametrize("kind", [SharedMemorySync, CollectiveSync])
def test_weights_that_were_damaged_in_an_engine_are_noticed_and_sent_again(kind: type[BucketSync]) -> None:
    first = {"weight": torch.randn(20_000), "other": torch.randn(20_000)}
    config = {SharedMemorySync: SharedMemorySyncConfig, CollectiveSync: CollectiveSyncConfig}[kind]
    taker = Taker()
    with closing(kind(config(full_every=100))) as sync:
        publish(sync, first, [taker], 1)
        taker.reader.changes._held["weight"].tensor[7] += 1
        publish(sync, {name: tensor * 2 for name, tensor in first.items()}, [taker], 2)
        assert len(taker.buckets) == 3


def test_an_engine_that_has_weights_of_another_dtype_is_sent_all_weights() -> None:
    taker = Taker()
    for dtype in (torch.float32, torch.bfloat16):
        with closing(memory_sync()) as sync:
            publish(sync, {"weight": torch.randn(20_000).to(dtype)}, [taker], 1)


def test_a_lost_bucket_is_sent_again_and_the_versions_after_it_are_exact() -> None:
    class Forgetful(Taker):
        lost = 0

        async def load_bucket(self, bucket: WeightBucket) -> None:
            if len(self.buckets) == 5 and self.lost < 2:
                self.lost += 1
                raise BucketLostError("it was not there")
            await super().load_bucket(bucket)

    taker, given = Forgetful(), weights()
    with closing(memory_sync(bucket_bytes=500)) as sync:
        for version in range(1, 5):
            given = edited(given, version, 0.1)
            publish(sync, given, [taker], version)
    assert taker.lost == 2
