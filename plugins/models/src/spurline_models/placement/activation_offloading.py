"""Keep the activations that a decoder saves for its backward pass in host memory instead of on the device.

When autograd saves a tensor, a hook copies it to pinned host memory. When the backward pass needs it, a hook copies it
back. The copies run on the CUDA stream of the computation, so the device memory of a tensor is free when its copy ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from spurline_models.device_profile import DeviceProfile
from spurline_models.placement.offloading import storage_key

SMALLEST_BYTES = 1 << 20
"""Smallest size of a tensor that is worth copying."""

_FETCHED_AT_ONCE = 4
"""Number of tensors that stay on the device after they are copied back. Several operations may need a tensor."""


class ActivationOffloading:
    """Offloading of one model's activations from the device to the host."""

    def __init__(self, causal: PreTrainedModel, profile: DeviceProfile) -> None:
        self._causal = causal
        self._device = profile.device

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Offload the tensors that autograd saves in the context. The context runs one forward pass of the decoder."""
        if not torch.is_grad_enabled():
            yield
            return
        one = _Pass(self._device, self._is_worth_it())
        with saved_tensors_hooks(one.pack, one.unpack):
            yield

    def _is_worth_it(self) -> Callable[[Tensor], bool]:
        parameters = [*self._causal.parameters(), *self._causal.buffers()]
        own = {storage_key(tensor.untyped_storage()) for tensor in parameters if not isinstance(tensor, DTensor)}
        shapes = {tuple(tensor.shape) for tensor in parameters}

        def is_worth_it(tensor: Tensor) -> bool:
            # The exact type excludes parameters and sharded tensors.
            if type(tensor) is not Tensor or tensor.device.type != self._device.type:
                return False
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST_BYTES or storage_key(storage) in own:
                return False
            # Linear layers save views of parameters. A parameter that was gathered from shards is not in `own`.
            if isinstance(tensor._base, nn.Parameter):
                return False
            # Linear layers also save transposed copies of weights that autocast rounds.
            is_rounded_weight = tensor.dim() == 2 and tensor.stride(0) == 1 and tuple(tensor.t().shape) in shapes
            return not is_rounded_weight

        return is_worth_it


@dataclass(eq=False)
class _Moved:
    """A storage that saved tensors share. Its bytes are on the host, and for a while also on the device."""

    host: Tensor
    device: Tensor | None = None


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saved, with its dtype and layout as in `Tensor.as_strided`."""

    moved: _Moved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Pass:
    """The saved tensors of one forward pass of a decoder."""

    def __init__(self, device: torch.device, is_worth_it: Callable[[Tensor], bool]) -> None:
        self._device, self._is_worth_it = device, is_worth_it
        self._known: dict[int, tuple[StorageWeakRef, int, ref[_Moved]]] = {}
        """Moved storages by key: a reference to the storage, the version of its values, and the moved bytes."""
        self._fetched: deque[_Moved] = deque()

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        if not self._is_worth_it(tensor):
            return tensor
        moved = self._moved(tensor)
        return _Saved(moved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        moved = saved.moved
        if moved.device is None:
            if len(self._fetched) == _FETCHED_AT_ONCE:
                self._fetched.popleft().device = None
            moved.device = self._to_device(moved.host)
            self._fetched.append(moved)
        whole = torch.empty(0, dtype=saved.dtype, device=self._device)
        return whole.set_(moved.device.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _moved(self, tensor: Tensor) -> _Moved:
        storage = tensor.untyped_storage()
        known = self._known.get(storage_key(storage))
        if known is not None:
            reference, version, place = known
            found = place()
            if found is not None and not reference.expired() and version == tensor._version:
                return found
        values = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        values.set_(storage, 0, (storage.nbytes(),), (1,))
        moved = _Moved(self._to_host(values))
        self._known[storage_key(storage)] = StorageWeakRef(storage), tensor._version, ref(moved)
        return moved

    def _to_host(self, values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return host.copy_(values, non_blocking=True)

    def _to_device(self, host: Tensor) -> Tensor:
        return torch.empty(host.shape, dtype=torch.uint8, device=self._device).copy_(host, non_blocking=True)
