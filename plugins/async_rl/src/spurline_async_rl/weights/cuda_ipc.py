"""Weight sync `cuda_ipc`: handles of GPU memory, to engines on the GPUs where the weights are.

Place on the way: weights on the trainer's GPUs -> one packed buffer on each -> its handle -> `read_handles` in a worker
on that very GPU, which copies from there. vLLM's own transfer of handles keeps the memory of the whole model until the
end of the update; this one keeps the memory of one bucket.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from spurline.errors import RunFailedError, listing
from spurline_async_rl.weights.buckets import BucketSync
from spurline_async_rl.weights.packing import pack, unpack
from spurline_models.machine import this_machine
from spurline_models.weight_buckets import WeightBucket

_HANDLES = "handles"
"""Key of a bucket's `where`: the handle of the buffer on each GPU, by the GPU's name."""
_PARTS = ("memory", "bytes", "offset", "counter", "counter_offset", "event", "has_event")
"""Names for the values with which torch opens the storage of another process, in its order, after the GPU's number."""
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)True", re.IGNORECASE)

Handle = Mapping[str, Any]
"""The data that opens a buffer in another process, as JSON can hold it."""


class CurrentGpu:
    """The GPU that torch computes on in this process. Its `name` is the same in all processes."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_properties(index).uuid)

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context, within which memory is allocated that can be exported."""
        return fixed_segments()

    def export(self, buffer: Tensor) -> Handle:
        """Return the handle of a buffer, uint8 [bytes], when all writes to it have ended."""
        torch.cuda.synchronize(self.device)
        _, *parts = buffer.untyped_storage()._share_cuda_()  # pyright: ignore[reportPrivateUsage]
        return {name: _as_text(value) for name, value in zip(_PARTS, parts, strict=True)}

    def open(self, handle: Handle) -> Tensor:
        """Return the very memory of the other process's buffer, uint8 [bytes]."""
        parts = [_from_text(handle[name]) for name in _PARTS]
        # The other process may number the GPUs differently.
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *parts)  # pyright: ignore[reportPrivateUsage]
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def release(self, handle: Handle) -> None:
        """Free the memory with the buffer, whether other processes have opened it or not."""
        # torch would keep the memory of a storage that no process has opened, as on a GPU without an engine, forever.
        counter, offset = (_from_text(handle[name]) for name in ("counter", "counter_offset"))
        torch.UntypedStorage._release_ipc_counter(counter, offset, device=self.device)  # pyright: ignore[reportPrivateUsage]
        torch.cuda.ipc_collect()


class CudaIpcSync(BucketSync):
    """A `WeightSync` for engine `vllm` in mode `engine` on this machine."""

    transport = "cuda_ipc"
    maker = f"{__name__}:HandleMaker"
    # An engine reads from its own GPU, which may be any rank's.
    made_by = "all"


class HandleMaker:
    """A `BucketMaker`: one buffer on this process's GPU, by default the current one."""

    def __init__(self, sender: int = 0, senders: int = 1, gpu: CurrentGpu | None = None) -> None:
        self._gpu = gpu or CurrentGpu()
        # The buffer must live until every engine has copied it: a handle does not keep its memory.
        self._buffer: Tensor | None = None
        self._handle: Handle | None = None

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        self.taken()
        with self._gpu.allocating():
            self._buffer, places = pack(weights, None, self._gpu.device)
        self._handle = self._gpu.export(self._buffer)
        where = {_HANDLES: {self._gpu.name: self._handle}}
        return WeightBucket(CudaIpcSync.transport, places, where, machine=this_machine())

    def taken(self) -> None:
        handle, self._handle, self._buffer = self._handle, None, None
        if handle is not None:
            self._gpu.release(handle)

    close = taken


def read_handles(bucket: WeightBucket, gpu: CurrentGpu | None = None) -> list[tuple[str, Tensor]]:
    """Return the weights, in the trainer's memory, to be copied before the bucket is answered.

    Raises:
        RunFailedError: If no rank has a copy on this GPU, by default the current one.
    """
    gpu = gpu or CurrentGpu()
    by_gpu: Mapping[str, Handle] = bucket.where[_HANDLES]
    handle = by_gpu.get(gpu.name)
    if handle is None:
        raise RunFailedError(
            f"The weights are on {len(by_gpu)} GPU(s), {listing(sorted(by_gpu))}, and this worker is on GPU "
            f"{gpu.name}. cuda_ipc needs both on one GPU. Set source.weight_sync: collective."
        )
    return unpack(gpu.open(handle), bucket.places)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Allocate segments of memory that cannot expand.

    Expandable segments cannot be exported everywhere, as most containers let no process take file descriptors of
    another one.
    """
    before: str = torch._C._accelerator_getAllocatorSettings()  # pyright: ignore[reportPrivateUsage]
    fixed = _EXPANDABLE.sub(r"\1False", before)
    if fixed == before:
        yield
        return
    # Name all settings again: settings that are not named may be reset.
    torch._C._accelerator_setAllocatorSettings(fixed)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)  # pyright: ignore[reportPrivateUsage]


def _as_text(value: bytes | int) -> str | int:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _from_text(value: str | int) -> bytes | int:
    return base64.b64decode(value) if isinstance(value, str) else value
