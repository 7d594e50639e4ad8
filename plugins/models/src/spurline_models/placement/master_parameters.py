"""The tensors that an optimizer steps on: a model's trained parameters, or masters of full precision for them.

A parameter that is wide and on the optimizer's device is its own master. Otherwise the master is kept (fp32 values of a
narrow weight, or a copy on the host), or it is filled from the weight for each step, written back with stochastic
rounding, and emptied. Parameters are stepped a bucket at a time, so that few are wide at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.nn import Parameter

from spurline_models.device_profile import DeviceProfile

VALUES_AT_ONCE = 1 << 25
"""Values of the parameters in a bucket; a parameter that has more is alone in one."""
_ROUNDED_AT_ONCE = 1 << 24
"""Values for which random bits exist at the same time."""


class MasterParameters:
    """The tensors that an optimizer steps on in the place of a model's trained parameters.

    Args:
        parameters: The model's trained parameters by name.
        profile: The device and dtype of the model.
        masters: The fp32 values of narrow parameters, which are taken out of it; if None, only narrow values are kept.
        on_host: Whether the optimizer steps in the memory of the host.
        apart: Whether the optimizer may step on some parameters at a time.
        seed: Seed of stochastic rounding.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        profile: DeviceProfile,
        *,
        masters: MutableMapping[str, Tensor] | None = None,
        on_host: bool = False,
        apart: bool = True,
        seed: int = 0,
    ) -> None:
        self._model = parameters
        self._profile = profile
        self._device = torch.device("cpu") if on_host else profile.device
        self._seed = seed
        self._filled: set[str] = set()
        self.parameters: dict[str, Parameter] = {}
        """The tensors that the optimizer is given, by the names of the parameters."""
        for name, parameter in parameters.items():
            narrow = parameter.dtype.itemsize < profile.weight_dtype.itemsize
            if not (narrow or on_host):
                self.parameters[name] = parameter
            elif narrow and masters is None:
                self.parameters[name] = self._new(parameter)
                self._filled.add(name)
                _empty(self.parameters[name])
            else:
                values = masters.pop(name, None) if narrow and masters is not None else None
                self.parameters[name] = self._new(parameter, parameter if values is None else values)
        self._buckets = step_buckets({name: value.numel() for name, value in parameters.items()}, apart=apart)

    @property
    def are_the_parameters(self) -> bool:
        """True if every parameter is its own master."""
        return all(value is self._model[name] for name, value in self.parameters.items())

    @property
    def values(self) -> dict[str, Tensor]:
        """The most precise values between two steps, by name, which a checkpoint holds."""
        return {
            name: (parameter if name in self._filled else self.parameters[name]).detach()
            for name, parameter in self._model.items()
        }

    def publish(self, names: Iterable[str]) -> None:
        """Give the model's parameters of these names the values of `values`, rounded to their dtype."""
        with torch.no_grad():
            for name in names:
                if self._is_kept(name):
                    self._model[name].copy_(self.parameters[name].to(self._model[name].dtype))

    def _is_kept(self, name: str) -> bool:
        """Return whether this master takes memory between two steps, beside the model's parameter."""
        return name not in self._filled and self.parameters[name] is not self._model[name]

    def kept(self) -> list[Tensor]:
        """Return the masters that take memory between two steps, beside the model's parameters."""
        return [value for name, value in self.parameters.items() if self._is_kept(name)]

    def step(
        self, step: Callable[[], object], gradients: MutableMapping[str, Tensor], factor: Tensor | None, number: int
    ) -> None:
        """Step on all parameters that have a gradient, and give the model the new values.

        Args:
            step: The optimizer's step.
            gradients: Gradients by name, on the device; each is taken out when it has been used.
            factor: A scalar that all gradients are multiplied by.
            number: Number of the update, which seeds the rounding.
        """
        with torch.no_grad():
            for bucket in self._buckets:
                names = [name for name in bucket if name in gradients]
                for name in names:
                    self._fill(name, gradients.pop(name), factor)
                step()
                for name in names:
                    self._write_back(name, number)

    def _new(self, parameter: Parameter, values: Tensor | None = None) -> Parameter:
        """Make a wide tensor with these values, or without any."""
        dtype = self._profile.weight_dtype
        if values is None:
            return Parameter(torch.empty_like(parameter, dtype=dtype, device=self._device))
        values = values.detach()
        if self._device.type == "cpu" and self._profile.pins_memory:
            return Parameter(self._profile.pinned(values.shape, dtype).copy_(values))
        # A master in the right place is taken over; the model's own weight never is.
        is_own = values.data_ptr() == parameter.data_ptr()
        return Parameter(values.to(self._device, dtype, copy=is_own))

    def _fill(self, name: str, gradient: Tensor, factor: Tensor | None) -> None:
        master = self.parameters[name]
        if name in self._filled:
            master.untyped_storage().resize_(master.numel() * master.element_size())
            master.copy_(self._profile.fetch(self._model[name], self._device))
        wide = self._profile.fetch(gradient, self._device).to(master.dtype)
        master.grad = wide if factor is None else wide * factor.to(self._device, wide.dtype)

    def _write_back(self, name: str, number: int) -> None:
        master, parameter = self.parameters[name], self._model[name]
        master.grad = None
        if name not in self._filled:
            self.publish([name])
            return
        parameter.copy_(round_stochastically(master, parameter.dtype, self._generator(name, number)))
        _empty(master)

    def _generator(self, name: str, number: int) -> torch.Generator:
        # A generator for each parameter and update: a resumed run draws the same bits.
        digest = hashlib.sha256(f"{self._seed}/{number}/{name}".encode()).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


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


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round fp32 values to bf16: each to the next one below or above, such that the mean is the value.

    A step smaller than half the distance between two bf16 values is then taken as often as it should be, and not lost.
    Values of bf16 stay as they are. The generator is on the device of the values.
    """
    assert (values.dtype, dtype) == (torch.float32, torch.bfloat16), f"{values.dtype} to {dtype}"
    rounded = torch.empty_like(values, dtype=dtype, memory_format=torch.contiguous_format)
    source, target = values.contiguous().view(-1), rounded.view(-1)
    for part, place in zip(source.split(_ROUNDED_AT_ONCE), target.split(_ROUNDED_AT_ONCE), strict=True):
        bits = torch.randint(1 << 16, part.shape, dtype=torch.int32, device=part.device, generator=generator)
        # Random bits make the half that bf16 cuts off carry into the kept half as often as it should.
        bits.add_(part.view(torch.int32)).bitwise_and_(-(1 << 16))
        place.copy_(bits.view(torch.float32))
    return rounded


def _empty(master: Parameter) -> None:
    """Free its memory. Its shape stays, and its identity, by which the optimizer's state knows it."""
    master.untyped_storage().resize_(0)
