"""Give the memory of a device to others between two updates, and bring its content back.

Memory is moved away under the tensors, storage by storage. Parameters, shards and views of flat buffers stay the
objects that optimizers and wrappers know. On CPU both memories are the host's.
"""

from __future__ import annotations

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
    """The tensors on a device between two updates, with every tensor that shares memory with another one.

    Attributes:
        weights: Weights of all models.
        state: State of optimizers.
        scratch: Memory that is written again before it is read, such as flat buffers of gradients.
    """

    weights: Sequence[Tensor]
    state: Sequence[Tensor] = ()
    scratch: Sequence[Tensor] = ()


@dataclass
class _Absent:
    """A freed storage. `host` is uint8 [size] with its content, or None for scratch."""

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
        """True if `give` was called and no `take` has succeeded since."""

    def give(self, tensors: DeviceTensors, *, keep_weights: bool) -> None:
        """Free the memory of these tensors, after copying all but scratch to the host. It may be called again.

        Args:
            tensors: The tensors on the device.
            keep_weights: Whether weights stay there.

        Raises:
            RunFailedError: If the host's memory is too small. A part is given then, and `take` brings it back.
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
        """Bring everything back, bit for bit, and scratch with any values.

        Raises:
            RunFailedError: If the device's memory is too small. A part is back then, and it may be called again.
        """
        for key, absent in list(self._absent.items()):
            try:
                absent.storage.resize_(absent.size)
            except RuntimeError as error:
                left = sum(one.size for one in self._absent.values())
                raise RunFailedError(
                    f"{left:,} bytes of {self._profile.device} that were given to engines cannot be taken back "
                    f"({error}). Do the engines sleep, and does another process use the device?"
                ) from error
            if absent.host is not None and not absent.is_scratch:
                _bytes_of(absent.storage).copy_(absent.host)
            # Freed before the next one comes, so that there is never a second copy of everything.
            del self._absent[key]
        self.is_given = False

    def read(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or while its memory is given away an equal one on the host.

        A DTensor stays one. For scratch the memory begins at 0 and is gone with `take`.
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
        """Raise RunFailedError if the memory is given away, so that the model cannot be `what`, such as `trained`."""
        if self.is_given:
            refuse(what)

    def _free(self, storage: UntypedStorage, *, is_scratch: bool) -> _Absent:
        size, host = storage.nbytes(), None
        if not is_scratch:
            try:
                host = self._profile.pinned((size,), torch.uint8)
            except RuntimeError as error:
                raise RunFailedError(
                    f"{size:,} bytes more of {self._profile.device} do not fit into the host's memory ({error}). Keep "
                    "weights on the device, use fewer ranks on this machine, or give engines GPUs of their own."
                ) from error
            host.copy_(_bytes_of(storage))
        storage.resize_(0)
        return _Absent(storage, size, host, is_scratch)

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, UntypedStorage]]:
        """Yield (key, storage) of memory on the device; the same storage may come again."""
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            is_here = storage.device.type == self._profile.device.type and storage.nbytes() > 0
            # Memory that another process or numpy owns too cannot be freed here.
            if is_here and storage.resizable():
                yield _key(storage), storage


def refuse(what: str) -> NoReturn:
    """Raise RunFailedError, since the memory of the device is given away; see `DeviceMemory.check_here`."""
    raise RunFailedError(
        f"The model cannot be {what} while engines have the memory of its device (yield_device). Let them sleep and "
        "call take_device first."
    )


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield all tensors in the values of nested mappings, lists and tuples, such as an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in cast(Mapping[Any, object], value).values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in cast(Sequence[object], value):
            yield from tensors_in(part)


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor that this process holds; `to_local` would make another tensor on its memory."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(storage: UntypedStorage) -> int:
    """Return a key that is the same for all objects that stand for one storage."""
    return cast(Any, storage)._cdata


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
