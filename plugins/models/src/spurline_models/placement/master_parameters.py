"""The tensors that an optimizer steps on: a model's trained parameters, or copies in full precision ("masters").

A parameter in full precision on the optimizer's device needs no master. A parameter in half precision needs one. If the
optimizer steps on the host, all parameters need masters. The optimizer steps on one bucket of parameters at a time, so
that only a few gradients are converted, or moved to the host, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.nn import Parameter

from spurline_models.device_profile import DeviceProfile

VALUES_AT_ONCE = 1 << 25
"""Limit on the values of all parameters in a bucket. A larger parameter has its own bucket."""


class MasterParameters:
    """The tensors that an optimizer steps on instead of a model's trained parameters.

    Args:
        parameters: The model's trained parameters by name.
        profile: The device and dtype of the model.
        masters: The fp32 values of parameters in half precision. They are removed from the mapping.
        on_host: Whether the optimizer steps in host memory.
        apart: Whether the optimizer may step on only some parameters at a time.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        profile: DeviceProfile,
        masters: MutableMapping[str, Tensor],
        *,
        on_host: bool = False,
        apart: bool = True,
    ) -> None:
        self._model = parameters
        self._profile = profile
        self._device = torch.device("cpu") if on_host else profile.device
        self.parameters: dict[str, Parameter] = {}
        """The tensors of the optimizer, by the names of the parameters."""
        for name, parameter in parameters.items():
            # A critic's head is wide. It replaced a narrow weight of the same name. Do not use the old weight's master.
            is_narrow = parameter.dtype.itemsize < profile.weight_dtype.itemsize
            values = masters.pop(name, parameter) if is_narrow else parameter
            self.parameters[name] = self._new(parameter, values) if on_host or is_narrow else parameter
        self._buckets = step_buckets({name: value.numel() for name, value in parameters.items()}, apart=apart)

    @property
    def values(self) -> dict[str, Tensor]:
        """The values of the optimizer's tensors by name, as a checkpoint saves them."""
        return {name: value.detach() for name, value in self.parameters.items()}

    def publish(self, names: Iterable[str]) -> None:
        """Copy the values with these names into the model's parameters, rounded to the dtype of the parameters."""
        with torch.no_grad():
            for name in names:
                if self.parameters[name] is not self._model[name]:
                    self._model[name].copy_(self.parameters[name].to(self._model[name].dtype))

    def kept(self) -> list[Tensor]:
        """Return the masters. Parameters that have no master are left out."""
        return [value for name, value in self.parameters.items() if value is not self._model[name]]

    def step(
        self, step: Callable[[], object], gradients: MutableMapping[str, Tensor], factor: Tensor | None = None
    ) -> None:
        """Step on all parameters that have a gradient, and copy the new values into the model.

        `step` is the optimizer's step. Each of the `gradients`, which are on the device, is multiplied by `factor`, and
        removed from the mapping when it has been used.
        """
        with torch.no_grad():
            for bucket in self._buckets:
                names = [name for name in bucket if name in gradients]
                for name in names:
                    master = self.parameters[name]
                    wide = self._profile.fetch(gradients.pop(name), self._device).to(master.dtype)
                    master.grad = wide if factor is None else wide * factor.to(self._device, wide.dtype)
                step()
                for name in names:
                    self.parameters[name].grad = None
                self.publish(names)

    def _new(self, parameter: Parameter, values: Tensor) -> Parameter:
        values, dtype = values.detach(), self._profile.weight_dtype
        if self._device.type != self._profile.device.type:
            return Parameter(self._profile.pinned_exactly(values.shape, dtype).copy_(values))
        # Values that already have this device and dtype are not copied, unless the parameter has the same memory.
        is_own = values.data_ptr() == parameter.data_ptr()
        return Parameter(values.to(self._device, dtype, copy=is_own))


def step_buckets(sizes: Mapping[str, int], *, apart: bool) -> list[list[str]]:
    """Return buckets of names. If `apart` is false, all names are in one bucket."""
    if not apart:
        return [list(sizes)]
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not buckets:
            buckets.append([])
            room = VALUES_AT_ONCE
        buckets[-1].append(name)
        room -= size
    return buckets
