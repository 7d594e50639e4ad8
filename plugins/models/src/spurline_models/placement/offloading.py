"""Give the memory of a device to others between two updates, and bring back what was in it.

Place on the way: models and optimizers -> copies in the memory of the host, while others use the device -> the same
tensors. Memory is moved from under the tensors, storage by storage: parameters, shards and views of flat buffers stay
the objects that optimizers and wrappers know. It is the same on CPU, where both memories are those of the host.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from spurline.errors import RunFailedError
from spurline_models.device_profile import DeviceProfile


@dataclass(frozen=True)
class DeviceTensors:
    """What lies on a device between two updates, with every tensor that shares memory with another one.

    weights: of all models. state: what optimizers keep. scratch: memory whose values nobody needs before they are
    written again, such as flat buffers of gradients. Memory of `weights` that is also elsewhere counts as weights.
    """

    weights: Sequence[Tensor]
    state: Sequence[Tensor] = ()
    scratch: Sequence[Tensor] = ()


@dataclass
class _Absent:
    """A storage that has been freed. host: uint8 [size], what was in it; None where that is not kept."""

    storage: UntypedStorage
    size: int
    host: Tensor | None
    is_scratch: bool


class DeviceMemory:
    """The memory of tensors on the device of this profile, which is here or given away."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._absent: dict[int, _Absent] = {}
        self.is_given = False
        """Whether `give` was called and no `take` has succeeded since."""

    def give(self, tensors: DeviceTensors, *, keep_weights: bool) -> None:
        """Free the memory of these tensors. What is not scratch is copied to the host's memory, pinned for a GPU.

        keep_weights: weights stay. May be called again: then it frees what is still there.
        Raises RunFailedError when the host's memory is too small; then a part is given, and `take` brings it back.
        """
        kept = dict(self._storages(tensors.weights)) if keep_weights else {}
        state = [*tensors.state, *(() if keep_weights else tensors.weights)]
        self.is_given = True
        for is_scratch, group in ((False, state), (True, tensors.scratch)):
            for key, storage in self._storages(group):
                if key not in kept and key not in self._absent:
                    self._absent[key] = self._free(storage, is_scratch=is_scratch)
        self._profile.release_cached_memory()

    def take(self) -> None:
        """Bring everything back, bit for bit; scratch with any values. Does nothing where nothing was given.

        Raises RunFailedError when the memory is not there; then a part is back, and it may be called again.
        """
        for key, absent in list(self._absent.items()):
            try:
                if absent.storage.nbytes() != absent.size:
                    absent.storage.resize_(absent.size)
            except RuntimeError as error:
                left = sum(one.size for one in self._absent.values())
                raise RunFailedError(
                    f"The memory of {self._profile.device} that was given to engines is not there again: {left:,} "
                    f"bytes are to be taken back ({error}). Do the engines sleep, and does another process use the "
                    "device?"
                ) from error
            if absent.host is not None and not absent.is_scratch:
                _bytes_of(absent.storage).copy_(absent.host)
            # Gone before the next one comes, so that there is never a second copy of all.
            del self._absent[key]
        self.is_given = False

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or while its memory is given away one that looks the same, on the host's copy.

        A shard of a DTensor stays one. Of scratch it is memory that starts at 0 and is gone with `take`.
        """
        if isinstance(tensor, DTensor):
            local = _local(tensor)
            found = self.read(local)
            return tensor if found is local else cast(Any, DTensor)(found, cast(Any, tensor)._spec, requires_grad=False)
        absent = self._absent.get(_key(tensor.untyped_storage()))
        if absent is None:
            return tensor
        if absent.host is None:
            absent.host = torch.zeros(absent.size, dtype=torch.uint8)
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(absent.host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def check_here(self, what: str) -> None:
        """Raise RunFailedError where the memory is given away. what: that was to be done, as in `trained`."""
        if self.is_given:
            refuse(what)

    def _free(self, storage: UntypedStorage, *, is_scratch: bool) -> _Absent:
        size = storage.nbytes()
        host = None if is_scratch else self._on_host(storage)
        if storage.resizable():
            storage.resize_(0)
        else:
            _drop_pages(storage)
        return _Absent(storage, size, host, is_scratch)

    def _on_host(self, storage: UntypedStorage) -> Tensor:
        try:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._profile.device.type == "cuda")
        except RuntimeError as error:
            raise RunFailedError(
                f"The host's memory has no room for {storage.nbytes():,} bytes more of what {self._profile.device} is "
                f"to give to engines ({error}). Keep weights on the device, train with fewer ranks on this machine, or "
                "let engines have GPUs of their own."
            ) from error
        return host.copy_(_bytes_of(storage))

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, UntypedStorage]]:
        """(key, storage) of what has memory on the device; the same storage may come again."""
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            is_here = storage.device.type == self._profile.device.type and storage.nbytes() > 0
            # Another process may have memory of a GPU that cannot be freed here.
            if is_here and (storage.resizable() or storage.device.type == "cpu"):
                yield _key(storage), storage


def _drop_pages(storage: UntypedStorage) -> None:
    """Give the pages of memory back to the machine that torch will not free, on CPU: of a file that weights were read
    from, and where numpy has seen a tensor, as it does when one is written. They are filled again in place."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        # What it says does not matter: pages that stay take memory, and are filled as all others.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)


def refuse(what: str) -> NoReturn:
    """Raise RunFailedError: the memory of the device is given away. what: that was to be done, as in `trained`."""
    raise RunFailedError(
        f"The model was to be {what} while engines have the memory of its device (yield_device). Let them sleep and "
        "call take_device first."
    )


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in the values of mappings, lists and tuples, however deep, such as in an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in cast(Mapping[Any, object], value).values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in cast(Sequence[object], value):
            yield from tensors_in(part)


def _local(tensor: Tensor) -> Tensor:
    """The very tensor that a process holds: not `to_local`, which makes another one on its memory."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(storage: UntypedStorage) -> int:
    """The same for all objects that stand for one storage."""
    return cast(Any, storage)._cdata


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8 [bytes], all of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
