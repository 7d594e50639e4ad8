"""Keep a decoder's activations for the backward pass in the memory of the host, instead of on the device.

Hooks copy each tensor that autograd saves to the host, in parallel with the computation. When the backward pass reaches
a layer, the tensors of the layer before it are copied back, as in torchtune's `OffloadActivations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from spurline_models.architecture import decoder_layers
from spurline_models.device_profile import DeviceProfile

SMALLEST_BYTES = 1 << 20
"""Smallest size of a tensor that is worth copying."""

_LAYERS_KEPT = 2
"""Layers whose tensors the device still has when the forward pass comes to the next: their copies may be under way."""


class ActivationOffloading:
    """Offloads the activations of one model from the device of a profile."""

    def __init__(self, causal: PreTrainedModel, profile: DeviceProfile) -> None:
        self._causal = causal
        self._device = profile.device
        self._stream = torch.cuda.Stream(profile.device) if profile.device.type == "cuda" else None
        self._pass: _Pass | None = None
        for layer in decoder_layers(causal):
            layer.register_forward_pre_hook(self._begin_layer)

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Offload the tensors that one forward pass of the decoder saves in the context. Layers must run in order."""
        if not torch.is_grad_enabled():
            yield
            return
        self._pass = _Pass(self._device, self._stream, self._is_worth_it())
        try:
            with saved_tensors_hooks(self._pass.pack, self._pass.unpack):
                yield
        finally:
            # Layers may run again in the backward pass, to recompute activations. They begin no new layer then.
            self._pass = None

    def _begin_layer(self, *_: Any) -> None:
        if self._pass is not None:
            self._pass.begin_layer()

    def _is_worth_it(self) -> Callable[[Tensor], bool]:
        parameters = [*self._causal.parameters(), *self._causal.buffers()]
        own = {_key(tensor.untyped_storage()) for tensor in parameters if not isinstance(tensor, DTensor)}
        shapes = {tuple(tensor.shape) for tensor in parameters}

        def is_worth_it(tensor: Tensor) -> bool:
            # Parameters and sharded tensors have other types.
            if type(tensor) is not Tensor or tensor.device.type != self._device.type:
                return False
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST_BYTES or _key(storage) in own:
                return False
            # Parameters gathered from shards are not in the model's own list, and linear layers save views of them.
            if isinstance(tensor._base, nn.Parameter):
                return False
            # Linear layers also save transposed copies of weights that autocast rounds.
            is_rounded_weight = tensor.dim() == 2 and tensor.stride(0) == 1 and tuple(tensor.t().shape) in shapes
            return not is_rounded_weight

        return is_worth_it


@dataclass
class _Moved:
    """Memory that saved tensors share, as uint8 [size] on the host, and also on the device while a layer needs it."""

    layer: int
    """The first layer that saved a tensor in this memory."""
    host: Tensor
    device: Tensor | None = None


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saved in a layer, with its dtype and layout as in `Tensor.as_strided`."""

    moved: _Moved
    layer: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Pass:
    """The saved tensors of one forward pass of a decoder, by layer."""

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream | None, is_worth_it: Callable[[Tensor], bool]
    ) -> None:
        self._device, self._stream, self._is_worth_it = device, stream, is_worth_it
        self.layers: list[list[_Moved]] = [[]]
        self._ends: list[torch.cuda.Event | None] = []
        """The end of the copies of each layer that the forward pass has left."""
        self._nearest: int | None = None
        """The layer that the backward pass has reached."""
        self._known: dict[int, tuple[StorageWeakRef, int, _Moved]] = {}
        """Moved storages by id: a reference to the storage, the version of its values, and where they were moved."""

    def begin_layer(self) -> None:
        """Begin a layer of the forward pass, and free the device of an earlier one whose copies have had their time."""
        self._ends.append(None if self._stream is None else cast("torch.cuda.Event", self._stream.record_event()))
        self.layers.append([])
        left = len(self.layers) - 1 - _LAYERS_KEPT
        if left >= 0:
            self._leave(left, self._ends[left])

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        if not self._is_worth_it(tensor):
            return tensor
        moved, layer = self._moved(tensor), len(self.layers) - 1
        self.layers[layer].append(moved)
        return _Saved(moved, layer, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self._nearest is None or saved.layer < self._nearest:
            self._go_back_to(saved.layer)
        if saved.moved.device is None:
            self._fetch([saved.moved])
            self._wait()
        device = saved.moved.device
        assert device is not None
        whole = torch.empty(0, dtype=saved.dtype, device=device.device)
        return whole.set_(device.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _moved(self, tensor: Tensor) -> _Moved:
        storage = tensor.untyped_storage()
        known = self._known.get(_key(storage))
        if known is not None:
            reference, version, moved = known
            if not reference.expired() and version == tensor._version:
                return moved
        values = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        values.set_(storage, 0, (storage.nbytes(),), (1,))
        moved = _Moved(len(self.layers) - 1, self._to_host(values), values)
        self._known[_key(storage)] = StorageWeakRef(storage), tensor._version, moved
        return moved

    def _go_back_to(self, layer: int) -> None:
        """Bring the tensors of this layer to the device, and begin to bring those of the layer before it."""
        self._nearest = layer
        self._wait()
        while len(self.layers) - 1 > layer:
            self._leave(len(self.layers) - 1)
            self.layers.pop()
        self._fetch(self.layers[layer])
        self._wait()
        if layer > 0:
            self._fetch(self.layers[layer - 1])

    def _leave(self, number: int, end: torch.cuda.Event | None = None) -> None:
        """Free the memory on the device that this layer saved first; computations wait for `end` before they reuse it.

        With `record_stream` the memory would be reused only when the device has come that far, and the host, which runs
        ahead of it, would take new memory for every layer.
        """
        if end is not None:
            torch.cuda.current_stream(self._device).wait_event(end)
        for moved in self.layers[number]:
            if moved.layer == number:
                moved.device = None

    def _fetch(self, wanted: list[_Moved]) -> None:
        for moved in wanted:
            if moved.device is None:
                moved.device = self._to_device(moved.host)

    def _to_host(self, values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=torch.uint8, pin_memory=self._stream is not None)
        return self._copied(values, host)

    def _to_device(self, host: Tensor) -> Tensor:
        return self._copied(host, torch.empty(host.shape, dtype=torch.uint8, device=self._device))

    def _copied(self, source: Tensor, target: Tensor) -> Tensor:
        """Copy in parallel with the computation, after everything that was computed so far."""
        if self._stream is None:
            return target.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return target

    def _wait(self) -> None:
        """Let the computation wait for all copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _key(storage: UntypedStorage) -> int:
    """Return a key that is the same for all Python objects of one storage."""
    return cast(Any, storage)._cdata
