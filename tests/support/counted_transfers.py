"""Transfers between device and host that count what is moved, on CPU, where both memories are one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spurline_models.device_profile import DeviceProfile, Transfers


class Counting(Transfers):
    """What goes to the host and comes back, and how much of it the device holds meanwhile."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.reset()

    def reset(self) -> None:
        self.sent: list[Tensor] = []
        self.held: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0
        self.fetched = 0

    def to_host(self, tensor: Tensor) -> Tensor:
        self._count(tensor)
        self.sent.append(super().to_host(tensor))
        return self.sent[-1]

    def to_device(self, host: Tensor) -> Tensor:
        self.fetched += 1
        copy = super().to_device(host)
        self._count(copy)
        return copy

    def _count(self, tensor: Tensor) -> None:
        self.held = [item for item in self.held if not item[0].expired()]
        self.held.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        self.peak = max(self.peak, sum(size for _, size in self.held))

    def profile(self, profile: DeviceProfile) -> DeviceProfile:
        """The same, whose transfers are counted here."""
        return _CountedProfile(profile.device, profile.weight_dtype, profile.autocast_dtype, self)


@dataclass(frozen=True)
class _CountedProfile(DeviceProfile):
    counting: Counting

    def transfers(self) -> Transfers:
        return self.counting
