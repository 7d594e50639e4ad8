"""The tensors that an optimizer steps on: a model's trained parameters, or masters of full precision for them.

A parameter of full precision on the optimizer's device is its own master. For a narrow parameter, and for every
parameter if the optimizer steps on the host, a master is kept beside it. Parameters are stepped a bucket at a time, so
that few gradients are wide, or on the host, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.nn import Parameter

from spurline_models.device_profile import DeviceProfile

VALUES_AT_ONCE = 1 << 25
"""Values of the parameters in a bucket; a parameter that has more is alone in one."""


class MasterParameters:
    """The tensors that an optimizer steps on in the place of a model's trained parameters.

    Args:
        parameters: The model's trained parameters by name.
        profile: The device and dtype of the model.
        masters: The fp32 values of narrow parameters, which are taken out of it.
        on_host: Whether the optimizer steps in the memory of the host.
        apart: Whether the optimizer may step on some parameters at a time.
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
        """The tensors that the optimizer is given, by the names of the parameters."""
        for name, parameter in parameters.items():
            # A critic's head takes the place, and the name, of a narrow weight.
            is_narrow = parameter.dtype.itemsize < profile.weight_dtype.itemsize
            values = masters.pop(name, parameter) if is_narrow else parameter
            needs_master = on_host or is_narrow
            self.parameters[name] = self._new(parameter, values) if needs_master else parameter
        self._buckets = step_buckets({name: value.numel() for name, value in parameters.items()}, apart=apart)

    @property
    def values(self) -> dict[str, Tensor]:
        """The most precise values by name, which a checkpoint holds."""
        return {name: value.detach() for name, value in self.parameters.items()}

    def publish(self, names: Iterable[str]) -> None:
        """Give the model's parameters of these names the values of `values`, rounded to their dtype."""
        with torch.no_grad():
            for name in names:
                if self.parameters[name] is not self._model[name]:
                    self._model[name].copy_(self.parameters[name].to(self._model[name].dtype))

    def kept(self) -> list[Tensor]:
        """Return the masters that take memory beside the model's parameters."""
        return [value for name, value in self.parameters.items() if value is not self._model[name]]

    def step(
        self, step: Callable[[], object], gradients: MutableMapping[str, Tensor], factor: Tensor | None = None
    ) -> None:
        """Step on all parameters that have a gradient, and give the model the new values.

        Args:
            step: The optimizer's step.
            gradients: Gradients by name, on the device; each is taken out when it has been used.
            factor: A scalar that all gradients are multiplied by.
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
        if self._device.type == "cpu" and self._profile.pins_memory:
            return Parameter(self._profile.pinned(values.shape, dtype).copy_(values))
        # A master in the right place is taken over; the model's own weight never is.
        is_own = values.data_ptr() == parameter.data_ptr()
        return Parameter(values.to(self._device, dtype, copy=is_own))


def step_buckets(sizes: Mapping[str, int], *, apart: bool) -> list[list[str]]:
    """Return the names of parameters that are stepped on together: one bucket, unless some can be stepped `apart`."""
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
