"""Free the trainer's device memory for engines between two updates, and restore its content.

The storages of tensors are moved. The tensors stay the same objects, so optimizers and wrappers keep working with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from spurline.errors import RunFailedError
from spurline_models.device_profile import DeviceProfile


@dataclass(frozen=True)
class DeviceTensors:
    """The tensors on a device between two updates. If tensors share memory, all of them are listed.

    Attributes:
        weights: Weights of all models.
        state: State of optimizers.
        scratch: Tensors that are overwritten before the next use, such as flat buffers of gradients.
    """

    weights: Sequence[Tensor]
    state: Sequence[Tensor] = ()
    scratch: Sequence[Tensor] = ()


@dataclass
class _Absent:
    """A freed storage. `host` is a copy of its content, uint8 [size], or None for scratch that nobody has read."""

    storage: UntypedStorage
    size: int
    host: Tensor | None


class DeviceMemory:
    """The memory of tensors on the device of a profile. It can be given to engines and taken back."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._absent: dict[int, _Absent] = {}
        self.is_given = False
        """True between `give` and the next `take` that succeeds."""

    def give(self, tensors: DeviceTensors, *, keep_weights: bool) -> None:
        """Free the memory of these tensors, after copying all but scratch to the host. A later call can free more.

        Args:
            tensors: The tensors on the device.
            keep_weights: Whether weights stay on the device.

        Raises:
            RunFailedError: If the host's memory is too small. `take` then brings back the part that was given.
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
        """Restore all tensors bit for bit, except that the values of scratch are undefined.

        Raises:
            RunFailedError: If the device has too little free memory. Then `take` may be called again for the rest.
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
            if absent.host is not None:
                _bytes_of(absent.storage).copy_(absent.host)
            # This frees the host's copy before the next storage is moved.
            del self._absent[key]
        self.is_given = False

    def read(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or a tensor with equal values on the host while engines use its memory.

        The result for a DTensor is a DTensor. The result for scratch has zeros.
        """
        if isinstance(tensor, DTensor):
            local = _local(tensor)
            found = self.read(local)
            return tensor if found is local else cast(Any, DTensor)(found, cast(Any, tensor)._spec, requires_grad=False)
        absent = self._absent.get(_storage_key(tensor.untyped_storage()))
        if absent is None:
            return tensor
        if absent.host is None:
            absent.host = torch.zeros(absent.size, dtype=torch.uint8)
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(absent.host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def check_here(self, what: str) -> None:
        """Raise RunFailedError if engines have the memory. `what` completes "The model cannot be ..."."""
        if self.is_given:
            refuse(what)

    def _free(self, storage: UntypedStorage, *, is_scratch: bool) -> _Absent:
        size, host = storage.nbytes(), None
        if not is_scratch:
            try:
                host = self._profile.pinned((size,), torch.uint8)
            except RuntimeError as error:
                raise RunFailedError(
                    f"{size:,} more bytes of {self._profile.device} do not fit into the host's memory ({error}). Keep "
                    "weights on the device, use fewer ranks on this machine, or give engines GPUs of their own."
                ) from error
            host.copy_(_bytes_of(storage))
        storage.resize_(0)
        return _Absent(storage, size, host)

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, UntypedStorage]]:
        """Yield (key, storage) for memory on the device. A storage may be yielded several times."""
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            is_here = storage.device.type == self._profile.device.type and storage.nbytes() > 0
            # Memory that another process or numpy shares cannot be freed here.
            if is_here and storage.resizable():
                yield _storage_key(storage), storage


def refuse(what: str) -> NoReturn:
    """Raise the error of `DeviceMemory.check_here`."""
    raise RunFailedError(
        f"The model cannot be {what} while engines have the memory of its device (yield_device). Let them sleep and "
        "call take_device first."
    )


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield all tensors in the values of nested mappings, lists and tuples, such as an optimizer's state."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _local(tensor: Tensor) -> Tensor:
    """Return the local tensor itself. `to_local` would return a new tensor with the same memory."""
    return cast(Any, tensor)._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_key(storage: UntypedStorage) -> int:
    """Return a key that is the same for all Python objects of one storage."""
    return cast(Any, storage)._cdata


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
