"""Join a model with its optimizer. The local backend has one such pair for the policy and one for the critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Parameter

from spurline.errors import ModelError, suggestion
from spurline_models.optimizers.optimization import Optimization
from spurline_models.placement.master_parameters import MasterParameters
from spurline_models.placement.offloading import DeviceTensors, tensors_in
from spurline_models.streams.stream_model import StreamModel
from spurline_models.weights import frozen_digest, weights_digest


class TrainedModel:
    """A model whose parameters that ask for gradients are trained.

    Args:
        model: The model.
        parameters: Its trained parameters by name.
        masters: The tensors that the optimizer steps on in their place.
        optimization: The optimizer of `masters`.
        weight_dtype: The dtype of computation and of digests, however weights are held.
    """

    def __init__(
        self,
        model: StreamModel,
        parameters: Mapping[str, Parameter],
        masters: MasterParameters,
        optimization: Optimization,
        weight_dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.optimization = optimization
        self.initial_weights = weights_digest(model.causal, weight_dtype)
        """Digest of the weights that the whole run started from, also after a resume."""
        self.updates = 0
        self._weight_dtype = weight_dtype
        self._masters = masters
        self._sums: dict[str, Tensor] = {}
        for name, value in parameters.items():
            if self._is_narrow(value):
                value.register_post_accumulate_grad_hook(partial(self._sum_wide, name))

    def _sum_wide(self, name: str, parameter: Tensor) -> None:
        """Take the gradient of a narrow parameter away after each micro-batch, so that sums of gradients are wide."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        sums = self._sums.get(name)
        # The first gradient stays narrow: a step of one micro-batch needs no sum.
        self._sums[name] = gradient if sums is None else sums.to(self._weight_dtype).add_(gradient)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients that exist by name, in the dtype of the parameter or wide."""
        found = {name: self._sums.get(name, value.grad) for name, value in self.parameters.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Return (name, gradient) for each parameter, on CPU, in `weight_dtype`."""
        found = self._gradients()
        return [
            (name, torch.zeros(value.shape, dtype=self._weight_dtype))
            if name not in found
            else (name, found[name].to("cpu", self._weight_dtype))
            for name, value in self.parameters.items()
        ]

    def gradient_norm(self) -> Tensor:
        """Return the norm over all parameters."""
        gradients = list(self._gradients().values())
        if all(gradient.dtype == self._weight_dtype for gradient in gradients):
            return torch.nn.utils.get_total_norm(gradients).to(self.model.causal.device)
        # In half precision the norm would have three digits.
        norms = [torch.linalg.vector_norm(gradient, dtype=self._weight_dtype) for gradient in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))

    def step(self, norm: Tensor, grad_norm: float) -> dict[str, float]:
        """Clip, update the weights, and return the learning rates as metrics.

        Args:
            norm: The gradient norm, on the device.
            grad_norm: The same on the host.
        """
        limit = self.optimization.max_grad_norm
        if limit is not None and grad_norm <= limit:
            limit = None
        if self._masters.are_the_parameters:
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, norm)
            rates = self.optimization.step(self.updates + 1)
        else:
            gradients = self._gradients()
            # `gradients` holds the only references now, and each goes when it has been used.
            self.drop_gradients()
            # The factor by which torch clips.
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit is not None else None
            rates = self.optimization.set_rates(self.updates + 1)
            self._masters.step(self.optimization.optimizer.step, gradients, factor)
        self.updates += 1
        return rates

    @property
    def values(self) -> dict[str, Tensor]:
        """The trained parameters by name, or their masters; not copies."""
        return self._masters.values

    @property
    def narrow_names(self) -> list[str]:
        """Names of all weights in half precision, if trained weights are among them; empty otherwise."""
        names = [name for name, value in self.model.causal.named_parameters() if self._is_narrow(value)]
        return names if any(map(self._is_narrow, self.parameters.values())) else []

    def _is_narrow(self, value: Tensor) -> bool:
        return value.dtype.itemsize < self._weight_dtype.itemsize

    def publish(self) -> None:
        """Let the model compute with the changed content of `values`."""
        self._masters.publish(self.parameters)

    def tensors(self) -> DeviceTensors:
        """Return the tensors that lie on the device between two updates."""
        causal = self.model.causal
        state = list(tensors_in(self.optimization.optimizer.state))
        return DeviceTensors([*causal.parameters(), *causal.buffers()], [*self._masters.kept(), *state])

    def drop_gradients(self) -> None:
        self._sums.clear()
        for value in self.parameters.values():
            value.grad = None

    @contextmanager
    def swapped(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Swap values as `LendsParameters` says. Engines and compiled code hold the tensors, so these stay the same."""
        for name, value in values.items():
            if name not in self.parameters:
                raise ModelError(
                    f"The model has no trained parameter '{name}'.{suggestion(name, self.parameters)} It has "
                    f"{len(self.parameters)}, such as {', '.join(list(self.parameters)[:3])}."
                )
            shape = self.parameters[name].shape
            if value.shape != shape:
                raise ModelError(f"'{name}' has shape {list(shape)}, and its new values have {list(value.shape)}.")
        held = self.values
        kept = {name: held[name].clone() for name in values}
        try:
            self._write(values)
            yield
        finally:
            self._write(kept)

    def _write(self, values: Mapping[str, Tensor]) -> None:
        held = self.values
        with torch.no_grad():
            for name, value in values.items():
                held[name].copy_(value)
        self._masters.publish(values)

    @cached_property
    def frozen_weights(self) -> str:
        """Digest of the weights that a checkpoint does not hold. They never change."""
        return frozen_digest(self.model.causal, self._weight_dtype)
