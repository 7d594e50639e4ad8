"""Weight sync `cuda_ipc`: send handles of GPU memory to engines on the trainer's GPUs.

Each rank packs a bucket into a buffer on its GPU. A worker on the same GPU opens the buffer by its handle, and copies
from it. This needs memory for one bucket; vLLM's own transfer of handles needs memory for all weights.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from spurline.errors import RunFailedError, listing
from spurline_async_rl.weights.buckets import BucketSync, pack, unpack
from spurline_models.machine import this_machine
from spurline_models.weight_buckets import WeightBucket

_HANDLES = "handles"
"""Key of a bucket's `where`. Its value maps the name of each GPU to the handle of the buffer on that GPU."""
_PARTS = ("memory", "bytes", "offset", "counter", "counter_offset", "event", "has_event")
"""Names of the values in a handle. torch takes them in this order, after the number of the GPU."""
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)True", re.IGNORECASE)

Handle = Mapping[str, Any]
"""Plain values with which another process can open a buffer."""


class CurrentGpu:
    """The current GPU of this process. Its `name` is the same in all processes."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_properties(index).uuid)

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which allocated memory can be exported."""
        return fixed_segments()

    def export(self, buffer: Tensor) -> Handle:
        """Wait for all writes to a buffer, uint8 [bytes], and return its handle."""
        torch.cuda.synchronize(self.device)
        _, *parts = buffer.untyped_storage()._share_cuda_()  # pyright: ignore[reportPrivateUsage]
        return {name: _as_text(value) for name, value in zip(_PARTS, parts, strict=True)}

    def open(self, handle: Handle) -> Tensor:
        """Return the buffer of the other process, uint8 [bytes], without a copy."""
        parts = [_from_text(handle[name]) for name in _PARTS]
        # The other process may number the GPUs differently.
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *parts)  # pyright: ignore[reportPrivateUsage]
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def release(self, handle: Handle) -> None:
        """Let torch free the buffer, even if no other process has opened it."""
        # Otherwise torch would keep a buffer that no process has opened, for example on a GPU without an engine.
        counter, offset = (_from_text(handle[name]) for name in ("counter", "counter_offset"))
        torch.UntypedStorage._release_ipc_counter(counter, offset, device=self.device)  # pyright: ignore[reportPrivateUsage]
        torch.cuda.ipc_collect()


class CudaIpcSync(BucketSync):
    """A `WeightSync` for engine `vllm` in mode `engine` on this machine."""

    transport = "cuda_ipc"
    maker = f"{__name__}:HandleMaker"
    # An engine may be on the GPU of any rank.
    made_by = "all"


class HandleMaker:
    """A `BucketMaker` with one buffer, on the current GPU."""

    def __init__(self, sender: int = 0, senders: int = 1, gpu: CurrentGpu | None = None) -> None:
        self._gpu = gpu or CurrentGpu()
        # This reference keeps the buffer alive until the engines have copied it, because a handle would not.
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
    """Return the weights, as views of the trainer's memory. The trainer frees it when the engine has loaded the bucket.

    Raises:
        RunFailedError: If no rank has the weights on this GPU.
    """
    gpu = gpu or CurrentGpu()
    by_gpu: Mapping[str, Handle] = bucket.where[_HANDLES]
    handle = by_gpu.get(gpu.name)
    if handle is None:
        raise RunFailedError(
            f"This worker is on GPU {gpu.name}, but the weights are on {listing(sorted(by_gpu))}. cuda_ipc needs both "
            "on the same GPU. Set source.weight_sync: collective."
        )
    return unpack(gpu.open(handle), bucket.places)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Turn off expandable segments of GPU memory within this context.

    Such segments cannot be exported in most containers, because processes in these containers cannot pass file
    descriptors to each other.
    """
    before = _allocator_settings()
    fixed = _EXPANDABLE.sub(r"\1False", before)
    if fixed == before:
        yield
        return
    # The call gets all settings, because it may reset a setting that is missing.
    torch._C._accelerator_setAllocatorSettings(fixed)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)  # pyright: ignore[reportPrivateUsage]


def _allocator_settings() -> str:
    read: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    # Torch 2.11 cannot tell its settings, so these are the ones that it started with.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return read() if read else next((os.environ[name] for name in names if os.environ.get(name)), "")


def _as_text(value: bytes | int) -> str | int:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _from_text(value: str | int) -> bytes | int:
    return base64.b64decode(value) if isinstance(value, str) else value
