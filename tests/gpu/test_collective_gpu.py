"""Broadcasts of weights by NCCL between processes with a GPU each, without an engine: the cases that pass on CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
from broadcast_receivers import Receiver, Weights

from spurline_async_rl.weights.buckets import pack, unpack
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BUCKET_BYTES = 8 << 20


def make_sync() -> CollectiveSync:
    """Return a sync that chooses gloo or NCCL by the machine, as a run does without a config."""
    sync = CollectiveSync(CollectiveSyncConfig())
    sync.max_bucket_bytes = BUCKET_BYTES
    return sync


def needs_gpus(count: int) -> pytest.MarkDecorator:
    few = torch.cuda.device_count() < count
    return pytest.mark.skipif(few, reason=f"needs {count} GPUs: NCCL wants one per process")


async def publish(sync: CollectiveSync, version: int, weights: Weights, receivers: Sequence[Receiver]) -> Any:
    async with asyncio.timeout(120):
        return await sync.publish(version, _backend(weights), receivers)


def _backend(weights: Weights, items: Any = None) -> Any:
    """items: called instead of `weights` for the first publish."""
    left = [items] if items is not None else []

    class Backend:
        def named_weights(self) -> Any:
            yield from (left.pop()() if left else weights.tensors.items())

    return Backend()


@needs_gpus(2)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_arrive_bit_for_bit_in_two_buckets_of_memory(dtype: str | None) -> None:
    places = [f"cuda:{number}" for number in range(1, min(torch.cuda.device_count(), 3))]
    first, second = (Weights("cuda:0", 5 * BUCKET_BYTES, 20, seed) for seed in range(2))
    receivers = [Receiver(number, place, dtype) for number, place in enumerate(places)]
    sync = make_sync()
    try:
        for version, weights in enumerate((first, second, first), 1):
            wanted = torch.float32 if dtype is None else getattr(torch, dtype)
            expected = {name: tensor.to(wanted) for name, tensor in weights.tensors.items()}
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            report = asyncio.run(publish(sync, version, weights, receivers))
            assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
            assert torch.cuda.max_memory_allocated() - before <= 2.125 * BUCKET_BYTES
            for receiver in receivers:
                taken, peak = receiver.taken()
                assert taken.keys() == expected.keys()
                assert all(torch.equal(taken[name], tensor.cpu()) for name, tensor in expected.items())
                assert peak <= 2.125 * BUCKET_BYTES
    finally:
        sync.close()
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(["cuda:1", "cuda:2"], marks=needs_gpus(3), id="another goes on"),
        pytest.param(["cuda:1"], marks=needs_gpus(2), id="it was alone"),
    ],
)
def test_others_get_the_weights_when_a_receiver_is_killed_while_a_broadcast_waits_for_it(places: list[str]) -> None:
    """The first receiver stands still when a bucket comes, and is killed then; a new one takes its place."""
    old, new = (Weights("cuda:0", 5 * BUCKET_BYTES, 20, seed) for seed in range(2))
    receivers = [Receiver(number, place) for number, place in enumerate(places)]
    sync = make_sync()

    async def main() -> None:
        async with asyncio.timeout(300):
            await sync.publish(1, _backend(old), receivers)
            victim = psutil.Process(receivers[0].process.pid)

            def stop_then_yield() -> Any:
                victim.suspend()
                return new.tensors.items()

            publishing = asyncio.ensure_future(sync.publish(2, _backend(new, stop_then_yield), receivers))
            while "to load bucket" not in sync.waits_for:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)
            assert not publishing.done()
            victim.kill()
            await publishing
            receivers[0].close()
            receivers[0] = Receiver(len(places), places[0])
            await sync.publish(2, _backend(new), receivers[:1])
            await sync.publish(3, _backend(old), receivers)

    try:
        asyncio.run(main())
        for receiver in receivers:
            taken, _ = receiver.taken()
            assert all(torch.equal(taken[name], tensor.cpu()) for name, tensor in old.tensors.items())
    finally:
        sync.close()
        for receiver in receivers:
            receiver.close()


def test_packing_lays_weights_out_as_on_the_cpu() -> None:
    weights = [(f"w{number}", torch.randn(1000 + number).to(torch.bfloat16)) for number in range(7)]
    _, places = pack(weights, None, torch.device("cpu"))
    there, places_there = pack([(name, tensor.cuda()) for name, tensor in weights], None, torch.device("cuda"))
    assert places == places_there
    for (name, tensor), (name_there, back) in zip(weights, unpack(there, places), strict=True):
        assert name == name_there
        assert torch.equal(tensor, back.cpu())
