"""A model with its optimizer, of which the local backend has one for the policy and one for the critic.

Place on the way: gradients -> clipping -> optimizer -> weights. Who computes gradients, of which loss, is the backend's
work. The frozen reference model is loaded here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.config.run_config import RunConfig
from spurline.errors import ModelError, suggestion
from spurline.model.device_profile import DeviceProfile
from spurline.model.loading import load_model
from spurline.model.offloading import DeviceTensors, tensors_in
from spurline.model.stream_model import StreamModel
from spurline.model.weights import check_initial_weights, frozen_digest, weights_digest
from spurline.optimizers.optimization import MakeOptimization


class TrainedModel:
    """`model`, of which the parameters that ask for gradients are trained.

    make_optimization: for its trained parameters. weight_dtype: in which weights count, however frozen ones are held.
    """

    def __init__(self, model: StreamModel, make_optimization: MakeOptimization, weight_dtype: torch.dtype) -> None:
        self.model = model
        self._weight_dtype = weight_dtype
        self.parameters = {name: value for name, value in model.causal.named_parameters() if value.requires_grad}
        self.initial_weights = weights_digest(model.causal, weight_dtype)
        """Recognises the weights that the whole run started from, also after a resume."""
        self.updates = 0
        self.optimization = make_optimization(self.parameters)

    def gradients(self) -> list[tuple[str, Tensor]]:
        """(name, gradient) of each parameter, on CPU."""
        return [
            (name, torch.zeros_like(value, device="cpu") if value.grad is None else value.grad.cpu())
            for name, value in self.parameters.items()
        ]

    def gradient_norm(self) -> Tensor:
        """Over all parameters."""
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).to(self.model.causal.device)

    def step(self, norm: Tensor, grad_norm: float) -> dict[str, float]:
        """Clip, and update the weights; returns the learning rates that were used, as metrics.

        norm, grad_norm: the gradient norm, on the device and on the host.
        """
        limit = self.optimization.max_grad_norm
        if limit is not None and grad_norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, norm)
        rates = self.optimization.step(self.updates + 1)
        self.updates += 1
        return rates

    def tensors(self) -> DeviceTensors:
        """What lies on the device between two updates."""
        causal = self.model.causal
        state = list(tensors_in(self.optimization.optimizer.state))
        return DeviceTensors([*causal.parameters(), *causal.buffers()], state)

    def drop_gradients(self) -> None:
        for value in self.parameters.values():
            value.grad = None

    @contextmanager
    def swapped(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """See `LendsParameters`. The tensors stay the same ones: engines and compiled code hold them."""
        self._check_fit(values)
        kept = {name: self.parameters[name].detach().clone() for name in values}
        try:
            self._write(values)
            yield
        finally:
            self._write(kept)

    def _check_fit(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            if name not in self.parameters:
                raise ModelError(
                    f"'{name}' is no trained parameter.{suggestion(name, self.parameters)} "
                    f"There are {len(self.parameters)}, such as {', '.join(list(self.parameters)[:3])}."
                )
            shape = self.parameters[name].shape
            if value.shape != shape:
                raise ModelError(f"'{name}' has shape {list(shape)}, and the values given for it {list(value.shape)}.")

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    @cached_property
    def frozen_weights(self) -> str:
        """Digest of the weights that a checkpoint does not hold; they never change, so it is computed once."""
        return frozen_digest(self.model.causal, self._weight_dtype)


def load_reference(
    run: RunConfig,
    profile: DeviceProfile,
    initial_weights: str,
    logits_chunk_tokens: int,
    change: Callable[[PreTrainedModel], None],
) -> StreamModel:
    """The weights that the run started from, loaded again and frozen; runs with adapters turn those off instead.

    change: as of `load_model`; it leaves values alone. Raises CheckpointError unless they have `initial_weights`.
    """
    with profile.keeping_generators():
        causal = load_model(run.model, profile, run.seed, change)
    check_initial_weights(weights_digest(causal), initial_weights, run.model.path)
    return StreamModel(causal.requires_grad_(False).eval(), logits_chunk_tokens)
