"""Copies of tensors in the memory of the host, of how they are at one moment while training goes on.

Place on the way: weights and optimizer state at a step -> copies -> a checkpoint that is written on another thread. The
memory is taken once and used again for the next copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spurline.errors import RunFailedError
from spurline_models.device_profile import DeviceProfile
from spurline_models.optimizers.state import describe


class HostCopies:
    """Memory of the host for the tensors on the device of this profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of the tensors as they are when this returns, under the same names.

        group: what the names are of. The next call with this group overwrites the copies.
        Raises RunFailedError when the host's memory is too small.
        """
        copies = {name: self._buffer(group, name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor.detach(), non_blocking=True)
        self._profile.synchronize()
        return copies

    def _buffer(self, group: str, name: str, like: Tensor) -> Tensor:
        found = self._buffers.get((group, name))
        if found is None or describe(found) != describe(like):
            try:
                found = self._buffers[group, name] = self._profile.pinned(like.shape, like.dtype)
            except RuntimeError as error:
                raise RunFailedError(
                    f"The host's memory has no room for the copy of {name} ({like.nbytes:,} bytes) that a checkpoint "
                    f"is written from ({error}). Set checkpoint.async: false, which copies nothing."
                ) from error
        return found
