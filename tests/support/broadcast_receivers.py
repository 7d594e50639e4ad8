"""Receivers of broadcast weights in processes of their own, on CPUs or on a GPU each, without a model."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from spurline.errors import BucketLostError
from spurline_async_rl.weights.collective import BroadcastReader
from spurline_concurrency.calls import in_thread
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import TakesWeights


class Weights:
    """A backend, as far as a publish needs one. device: where its weights are."""

    def __init__(self, device: str, num_bytes: int, num_tensors: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = num_bytes // num_tensors // 4
        self.tensors = {
            f"weight {number}": torch.randn(count, generator=generator).to(device) for number in range(num_tensors)
        }

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


class Receiver(TakesWeights):
    """An engine in another process, which keeps copies of the weights on the CPU. device: such as `cuda:1`."""

    transports: Sequence[str] = ("collective",)

    def __init__(self, number: int, device: str, dtype: str | None = None) -> None:
        self._name, self._dtype = f"receiver {number}", dtype
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_receive, args=(other, device), daemon=True)
        self.process.start()
        other.close()

    @property
    def receivers(self) -> Mapping[str, int]:
        return {self._name: 1} if self.process.is_alive() else {}

    @property
    def weights_dtype(self) -> str | None:
        return self._dtype

    async def begin_update(self, version: int) -> None:
        await self._ask("begin")

    async def load_bucket(self, bucket: WeightBucket) -> None:
        lost = await self._ask("read", replace(bucket, receiver=self._name).to_plain())
        if lost is not None:
            raise BucketLostError(lost)

    async def finish_update(self, version: int) -> None:
        await self._ask("finish")

    def taken(self) -> tuple[dict[str, Tensor], int]:
        """Return the weights of the last update, and the peak of GPU memory in bytes."""
        self._connection.send(("taken", None))
        return self._connection.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join(30)
        self._connection.close()

    async def _ask(self, what: str, argument: Any = None) -> Any:
        """Return the answer of the process, or None if it has died."""

        def ask() -> Any:
            try:
                self._connection.send((what, argument))
                return self._connection.recv()
            except (EOFError, OSError):
                self.process.join(30)
                return None

        async with asyncio.timeout(120):
            return await in_thread(ask)


def _receive(connection: Connection, device: str) -> None:
    """Answer requests in the process of a receiver until the connection closes."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    reader = BroadcastReader(0, place)
    taken: dict[str, Tensor] = {}
    while True:
        try:
            what, argument = connection.recv()
        except EOFError:
            return
        answer: Any = None
        if what == "begin":
            taken = {}
            if place.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        elif what == "read":
            try:
                taken |= {name: tensor.cpu().clone() for name, tensor in reader.read(WeightBucket.from_plain(argument))}
            except BucketLostError as error:
                answer = str(error)
        elif what == "finish":
            reader.end_update()
        else:
            answer = taken, torch.cuda.max_memory_allocated() if place.type == "cuda" else 0
        connection.send(answer)
