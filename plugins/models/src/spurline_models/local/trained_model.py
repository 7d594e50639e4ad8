"""Load the models of a run in the dtypes and on the devices of the config, and combine them with optimizers.

Matrices may be in half precision, with fp32 masters. Weights under adapters may be rounded or quantized. The optimizer
may step in host memory. The reference model has the policy's initial weights, in the same dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ModelError, suggestion
from spurline.protocols.backend import Role
from spurline_models.architecture import model_of
from spurline_models.device_profile import DeviceProfile
from spurline_models.exact_sums import ExactSum, largest_of, norm_of, sum_of_squares
from spurline_models.frozen import naming_frozen
from spurline_models.kernels import change_computing
from spurline_models.loading import load_model
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.groups import freeze_parameters
from spurline_models.optimizers.optimization import Optimization, OptimizationRecipe
from spurline_models.placement.master_parameters import MasterParameters
from spurline_models.placement.narrow_weights import base_dtype, narrow_weights, quantize_weights, round_weights
from spurline_models.placement.offloading import DeviceTensors, tensors_in
from spurline_models.probe import check_exactness, choose_reading
from spurline_models.streams.stream_model import StreamModel, stream_model
from spurline_models.weights import PinnedWeights, weights_digest

Masters = dict[str, Tensor]
"""The fp32 values of trained weights that a model holds in bf16, by name."""


class TrainedModel:
    """A model with the optimizer of its trained `parameters`. The optimizer steps on the tensors of `masters`.

    Sums of gradients, and weights in digests, have the dtype `weight_dtype`. The model may hold narrower weights. If
    `exact`, sums of gradients do not depend on the order of micro-batches.
    """

    def __init__(
        self,
        model: StreamModel,
        parameters: Mapping[str, Parameter],
        masters: MasterParameters,
        optimization: Optimization,
        weight_dtype: torch.dtype,
        *,
        exact: bool = False,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.optimization = optimization
        self.pinned = PinnedWeights(weights_digest(model.causal, weight_dtype))
        self.updates = 0
        self._weight_dtype = weight_dtype
        self._masters = masters
        self._sums: dict[str, Tensor] = {}
        self._exact_sums: dict[str, ExactSum] = {}
        self._is_exact = exact
        for name, value in parameters.items():
            if exact:
                value.register_post_accumulate_grad_hook(partial(self._sum_exactly, name))
            elif self._is_narrow(value):
                value.register_post_accumulate_grad_hook(partial(self._sum_wide, name))

    def _sum_wide(self, name: str, parameter: Tensor) -> None:
        """After a micro-batch, move the gradient of a narrow parameter to `_sums`, so that sums have the wide dtype."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        sums = self._sums.get(name)
        # The first gradient stays narrow: a step of one micro-batch needs no sum.
        self._sums[name] = gradient if sums is None else sums.to(self._weight_dtype).add_(gradient)

    def _sum_exactly(self, name: str, parameter: Tensor) -> None:
        """After a micro-batch, add the gradient to the exact sum."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._exact_sums.setdefault(name, ExactSum()).add(gradient)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the existing gradients by name, in the parameter's dtype or in `weight_dtype`."""
        while self._exact_sums:
            name, exact = self._exact_sums.popitem()
            self.parameters[name].grad = exact.total().view_as(self.parameters[name])
        for value in self.parameters.values() if self._is_exact else ():
            # Ranks without loss run a dummy, which gives zeros. Optimizers then decay weights. They skip None.
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        found = {name: self._sums.get(name, value.grad) for name, value in self.parameters.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Return (name, gradient in `weight_dtype` on CPU) of each parameter."""
        found, dtype = self._gradients(), self._weight_dtype
        return [
            (name, found[name].to("cpu", dtype) if name in found else torch.zeros(value.shape, dtype=dtype))
            for name, value in self.parameters.items()
        ]

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        if self._is_exact:
            gradients = self._gradients().values()
            largest = largest_of(gradients)
            norm = norm_of(sum_of_squares(gradients, largest), largest)
            return torch.tensor(norm, dtype=torch.float64, device=self.model.causal.device)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self._gradients().values():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        # A norm in half precision would have only three correct digits.
        norms: list[Tensor] = []
        for gradients in by_dtype.values():
            norms += torch._foreach_norm(gradients, 2, self._weight_dtype)  # pyright: ignore
        return torch.nn.utils.get_total_norm(norms).to(self.model.causal.device)

    def step(self, norm: Tensor, grad_norm: float) -> dict[str, float]:
        """Clip gradients, update the weights, and return the learning rates as metrics.

        `norm` is the gradient norm on the device, and `grad_norm` is its value on the host.
        """
        limit = self.optimization.max_grad_norm
        if limit is not None and grad_norm <= limit:
            limit = None
        if not self._masters.kept():
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, norm)
            rates = self.optimization.step(self.updates + 1)
        else:
            gradients = self._gradients()
            # Let only `gradients` refer to the gradients, so that each is freed when it has been used.
            self.drop_gradients()
            # This is the factor of torch's `clip_grads_with_norm_`.
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit is not None else None
            rates = self.optimization.set_rates(self.updates + 1)
            self._masters.step(self.optimization.optimizer.step, gradients, factor)
        self.updates += 1
        return rates

    @property
    def values(self) -> dict[str, Tensor]:
        """The tensors that the optimizer steps on, parameters or masters, by name. They are not copies."""
        return self._masters.values

    @property
    def narrow_names(self) -> list[str]:
        """Names of all weights in half precision, or [] if no trained weight is in half precision."""
        names = [name for name, value in self.model.causal.named_parameters() if self._is_narrow(value)]
        return names if any(map(self._is_narrow, self.parameters.values())) else []

    def _is_narrow(self, value: Tensor) -> bool:
        return value.dtype.itemsize < self._weight_dtype.itemsize

    def publish(self) -> None:
        """Copy `values` into the model after they have changed."""
        self._masters.publish(self.parameters)

    def tensors(self) -> DeviceTensors:
        """Return the tensors that occupy the device between two updates."""
        causal = self.model.causal
        state = list(tensors_in(self.optimization.optimizer.state))
        return DeviceTensors([*causal.parameters(), *causal.buffers()], [*self._masters.kept(), *state])

    def drop_gradients(self) -> None:
        self._sums.clear()
        self._exact_sums.clear()
        for value in self.parameters.values():
            value.grad = None

    @contextmanager
    def swapped(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Copy other values into parameters in the context. Engines refer to the tensors, so these are not replaced."""
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
        """Digest of the frozen weights, which are not saved in a checkpoint."""
        return weights_digest(self.model.causal, self._weight_dtype, only_frozen=True)


class WeightPlacement:
    """A loader of models that puts weights on the devices and in the dtypes of the config."""

    def __init__(self, config: LocalBackendConfig, run: RunConfig, profile: DeviceProfile) -> None:
        self._config = config
        self._run = run
        self._profile = profile

    def load_trainable(self) -> tuple[PreTrainedModel, Masters]:
        """Load the model, add adapters, freeze parts, and return the model and its masters."""
        masters: Masters = {}
        lora = self._config.lora
        causal = load_model(
            self._run.model,
            self._profile,
            self._run.seed,
            partial(self._make_trainable, masters=masters),
            narrow=self._base_dtype(),
            # Weights are quantized on the host, and masters may stay there.
            on_host=self._config.narrow_weights or (lora is not None and lora.is_quantized),
        )
        return causal, masters

    def load_frozen(self, role: Role, policy: TrainedModel) -> StreamModel:
        """Load the model of a role that is not trained.

        Raises:
            CheckpointError: If its weights are not those that the run used before.
            ModelError: If it cannot be loaded, or fails in the probe.
        """
        model, config, profile = model_of(self._run.model, role), self._config, self._profile
        with naming_frozen(self._run.model, role), profile.keeping_generators():
            narrow = config.narrow_weights or (role in self._run.model.frozen and profile.autocast_dtype is not None)
            change = partial(self._make_frozen, model=model, narrow=narrow)
            causal = load_model(model, profile, self._run.seed, change, narrow=torch.bfloat16 if narrow else None)
            policy.pinned.check(role, weights_digest(causal, profile.weight_dtype), self._run.model)
            causal.requires_grad_(False).eval()
            frozen = stream_model(model, causal, config.chunk_tokens, config.fuses_logprobs)
            frozen.replays = role not in self._run.model.frozen
            if role not in self._run.model.frozen:
                frozen.read_as(policy.model.reading)
            elif config.probe:
                check_exactness(frozen, profile, model.path)
            else:
                choose_reading(frozen, profile)
        return frozen

    def train(self, model: StreamModel, optimization: OptimizationRecipe, masters: Masters) -> TrainedModel:
        """Combine a model from `load_trainable` with an optimizer."""
        config = self._config
        if config.activation_checkpointing:
            model.checkpoint_activations(self._profile.checkpoint_options(), config.activation_checkpointing)
        if config.offload_activations:
            model.offload_activations()
        if config.compile:
            model.compile()
        parameters = {name: value for name, value in model.causal.named_parameters() if value.requires_grad}
        stepped = MasterParameters(
            parameters, self._profile, masters, on_host=config.offload_optimizer, apart=optimization.config.steps_apart
        )
        exact = config.is_reproducible
        made = optimization(stepped.parameters, reproducible=exact)
        return TrainedModel(model, parameters, stepped, made, self._profile.weight_dtype, exact=exact)

    def _base_dtype(self) -> torch.dtype | None:
        """Return the dtype of the weights under adapters if it is narrower than the dtype of computation."""
        if self._config.lora is None:
            return None
        dtype = base_dtype(self._config.lora, self._run.model)
        return dtype if dtype.itemsize < self._profile.weight_dtype.itemsize else None

    def _make_trainable(self, causal: PreTrainedModel, masters: Masters) -> None:
        self._change_computing(causal, self._run.model)
        freeze_parameters(causal, self._run.model.freeze)
        wide, lora = self._profile.weight_dtype, self._config.lora
        if self._config.narrow_weights:
            masters.update(narrow_weights(causal, torch.bfloat16, wide, also_trained=True))
        if lora is None:
            return
        from spurline_models.adapters.lora import add_adapters, leave_inputs_to_autocast

        dtype = self._base_dtype()
        if dtype is not None:
            # Round before adapters are added, since adapters must not be rounded.
            round_weights(causal, dtype)
        if lora.is_quantized:
            # Quantize before adapters wrap the layers.
            quantize_weights(causal, wide)
        add_adapters(causal, lora, self._run.seed)
        if self._profile.autocast_dtype is not None:
            leave_inputs_to_autocast(causal)
        if dtype is not None:
            narrow_weights(causal, dtype, wide)

    def _make_frozen(self, causal: PreTrainedModel, model: ModelConfig, narrow: bool) -> None:
        self._change_computing(causal, model)
        if narrow:
            narrow_weights(causal, torch.bfloat16, self._profile.weight_dtype, also_trained=True)

    def _change_computing(self, causal: PreTrainedModel, model: ModelConfig) -> None:
        change_computing(causal, model, self._config.kernels, self._config.fp8, self._profile)
