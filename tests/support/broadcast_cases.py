"""What must hold of broadcast weights between processes, whatever device they are on: the same on CPUs and on GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from broadcast_receivers import Receiver, Weights

from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig

BUCKET_BYTES = 8 << 20


def sync_for(weights: Weights) -> CollectiveSync:
    """Return a sync that chooses gloo or NCCL by the machine, as a run does without a config."""
    sync = CollectiveSync(CollectiveSyncConfig(exchange_timeout_s=60))
    sync.max_bucket_bytes = BUCKET_BYTES
    return sync


def check_that_weights_arrive_bit_for_bit(device: str, places: Sequence[str], dtype: str | None) -> None:
    """places: device of each receiver."""
    first, second = (Weights(device, 5 * BUCKET_BYTES, 20, seed) for seed in range(2))
    receivers = [Receiver(number, place, dtype) for number, place in enumerate(places)]
    sync = sync_for(first)
    try:
        for version, weights in enumerate((first, second, first), 1):
            wanted = torch.float32 if dtype is None else getattr(torch, dtype)
            expected = {name: tensor.to(wanted) for name, tensor in weights.tensors.items()}
            before = torch.cuda.memory_allocated() if device != "cpu" else 0
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            report = asyncio.run(publish(sync, version, weights, receivers))
            assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
            if device != "cpu":
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


def check_that_others_get_the_weights_when_one_is_killed(device: str, places: Sequence[str]) -> None:
    """One receiver stands still when a bucket comes, and is killed while the broadcast waits for it; then a new one
    takes its place. places: device of each receiver, the first of which is killed."""
    old, new = (Weights(device, 5 * BUCKET_BYTES, 20, seed) for seed in range(2))
    receivers = [Receiver(number, place) for number, place in enumerate(places)]
    sync = sync_for(old)

    async def main() -> None:
        import psutil

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
