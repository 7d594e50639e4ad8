"""Keep what the backward pass needs of a decoder in the memory of the host, instead of on the device.

Place on the way: what autograd saves in the forward pass -> a copy on the host, made beside the computation -> a copy
on the device again when the backward pass comes near. Two layers' tensors are on the device at any time: those of the
layer that is computed and of its neighbour, whose copies are on their way. As torchtune's `OffloadActivations` does it,
by hooks on saved tensors. It is the same on CPU, where both memories are those of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from spurline_models.architecture import decoder_layers
from spurline_models.device_profile import DeviceProfile, Transfers

SMALLEST_BYTES = 1 << 20
"""The smallest memory that is worth a copy."""

_LAYERS_KEPT = 2


class ActivationOffloading:
    """Offloads the activations of one model, on the device of this profile."""

    def __init__(self, causal: PreTrainedModel, profile: DeviceProfile) -> None:
        self._causal = causal
        self._device = profile.device.type
        self._transfers = profile.transfers()
        self._pass: _Pass | None = None
        for layer in decoder_layers(causal):
            layer.register_forward_pre_hook(self._begin_layer)

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Offload what one forward pass of the decoder in the context saves; layers run in the order of the model."""
        if not torch.is_grad_enabled():
            yield
            return
        self._pass = _Pass(self._transfers, self._is_worth_it())
        try:
            with saved_tensors_hooks(self._pass.pack, self._pass.unpack):
                yield
        finally:
            self._pass.end()
            # Layers are run again in the backward pass where activations are recomputed: then no new one begins.
            self._pass = None

    def _begin_layer(self, *_: Any) -> None:
        if self._pass is not None:
            self._pass.begin_layer()

    def _is_worth_it(self) -> Callable[[Tensor], bool]:
        parameters = [*self._causal.parameters(), *self._causal.buffers()]
        own = {_key(tensor.untyped_storage()) for tensor in parameters if not isinstance(tensor, DTensor)}
        shapes = {tuple(tensor.shape) for tensor in parameters}

        def is_worth_it(tensor: Tensor) -> bool:
            # Parameters are of another type, and so are sharded tensors.
            if type(tensor) is not Tensor or tensor.device.type != self._device:
                return False
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST_BYTES or _key(storage) in own:
                return False
            # Gathered parameters are not among the model's own, and linear layers save them transposed.
            if isinstance(tensor._base, nn.Parameter):
                return False
            # Linear layers also save transposed copies in half precision that autocast makes; nothing else tells them.
            is_rounded_weight = tensor.dim() == 2 and tensor.stride(0) == 1 and tuple(tensor.t().shape) in shapes
            return not is_rounded_weight

        return is_worth_it


@dataclass
class _Moved:
    """Memory that tensors share, as bytes uint8 [size], and the first layer that saved it.

    `device` is None while there is no copy on the device: once `_Pass` has left the layer, until it is fetched again.
    """

    layer: int
    host: Tensor
    device: Tensor | None


@dataclass(frozen=True)
class _Saved:
    """A tensor that autograd saved in a layer, with its dtype and layout as in `Tensor.as_strided`."""

    moved: _Moved
    layer: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class _Layer:
    moved: list[_Moved] = field(default_factory=list["_Moved"])
    arrived: Callable[[], None] | None = None
    """Lets the computation wait for the copies of this layer that have begun; None if it did."""

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived()
            self.arrived = None


class _Pass:
    """The saved tensors of one forward pass of a decoder, and of its backward pass."""

    def __init__(self, transfers: Transfers, is_worth_it: Callable[[Tensor], bool]) -> None:
        self._transfers = transfers
        self._is_worth_it = is_worth_it
        self._layers = [_Layer()]
        self._known: dict[int, tuple[StorageWeakRef, int, _Moved]] = {}
        """Moved storages by id: a reference to the storage, the version of its values, and where they were moved."""

    def begin_layer(self) -> None:
        """Begin the next layer of the forward pass, which saves what comes."""
        self.end()
        self._layers.append(_Layer())
        if len(self._layers) > _LAYERS_KEPT:
            self._leave(len(self._layers) - 1 - _LAYERS_KEPT)

    def end(self) -> None:
        """End the layer of the forward pass: it saves nothing more."""
        self._layers[-1].arrived = self._transfers.mark()

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        if not self._is_worth_it(tensor):
            return tensor
        moved = self._moved(tensor)
        layer = len(self._layers) - 1
        self._layers[layer].moved.append(moved)
        return _Saved(moved, layer, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.layer < len(self._layers) - 1:
            self._go_back_to(saved.layer)
        if saved.moved.device is None:
            self._fetch([saved.moved])()
        elif saved.layer < len(self._layers):
            self._layers[saved.layer].wait()
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
        moved = _Moved(len(self._layers) - 1, self._transfers.to_host(values), values)
        self._known[_key(storage)] = StorageWeakRef(storage), tensor._version, moved
        return moved

    def _go_back_to(self, layer: int) -> None:
        """Go on to this layer in the backward pass, and fetch the one before it, which comes near."""
        for number in range(len(self._layers) - 1, layer, -1):
            self._leave(number)
        del self._layers[layer + 1 :]
        if layer > 0:
            before = self._layers[layer - 1]
            before.arrived = self._fetch(before.moved)

    def _fetch(self, wanted: list[_Moved]) -> Callable[[], None]:
        """Begin to bring these to the device, and return a function that lets the computation wait for it."""
        for moved in wanted:
            if moved.device is None:
                moved.device = self._transfers.to_device(moved.host)
        return self._transfers.mark()

    def _leave(self, number: int) -> None:
        """Free the memory on the device that this layer saved first."""
        layer = self._layers[number]
        # Memory that is given back may be written to at once.
        layer.wait()
        for moved in layer.moved:
            if moved.layer == number:
                moved.device = None


def _key(storage: UntypedStorage) -> int:
    """Return a key that is the same for all objects that stand for one storage."""
    return cast(Any, storage)._cdata
