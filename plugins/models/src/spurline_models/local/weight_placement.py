"""Load the models of a run and place their weights as the settings of the local backend ask.

Matrices may be in half precision, with fp32 masters. Weights under adapters may be rounded or quantized. The optimizer
may step in host memory. The reference is placed as the policy was before training.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.config.run_config import RunConfig
from spurline_models.computing import change_computing
from spurline_models.device_profile import DeviceProfile
from spurline_models.freezing import freeze_parameters
from spurline_models.loading import HeldDtypes, load_model
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.local.trained_model import TrainedModel
from spurline_models.optimizers.optimization import OptimizationRecipe
from spurline_models.placement.master_parameters import MasterParameters
from spurline_models.placement.narrow_weights import (
    base_dtype,
    narrow_dtypes,
    narrow_trained_weights,
    narrow_weights,
    quantize_weights,
    round_weights,
)
from spurline_models.streams.stream_model import StreamModel
from spurline_models.weights import check_initial_weights, weights_digest

Masters = dict[str, Tensor]
"""The fp32 values of trained weights that a model holds in bf16, by name."""


class WeightPlacement:
    """Loads models, with their weights on the devices and in the dtypes that the config asks for."""

    def __init__(self, config: LocalBackendConfig, run: RunConfig, profile: DeviceProfile) -> None:
        self._config = config
        self._run = run
        self._profile = profile

    def load_trainable(self) -> tuple[PreTrainedModel, Masters]:
        """Load the model of the config, with adapters or frozen parts if it asks for them, and the masters."""
        masters: Masters = {}
        lora = self._config.lora
        causal = load_model(
            self._run.model,
            self._profile,
            self._run.seed,
            partial(self._make_trainable, masters=masters),
            held_dtypes=None if self._config.narrow_weights else self._held_dtypes(),
            # Weights are quantized on the host, and masters may stay there.
            on_host=self._config.narrow_weights or (lora is not None and lora.is_quantized),
        )
        return causal, masters

    def load_reference(self, initial_weights: str) -> StreamModel:
        """Load a frozen model with the weights that the run started from. Runs with adapters need none.

        Raises:
            CheckpointError: If their digest is not `initial_weights`.
        """
        model, dtype = self._run.model, self._profile.weight_dtype
        with self._profile.keeping_generators():
            causal = load_model(
                model, self._profile, self._run.seed, self._make_reference, held_dtypes=self._held_dtypes()
            )
        check_initial_weights(weights_digest(causal, dtype), initial_weights, model.path)
        return StreamModel(causal.requires_grad_(False).eval(), self._config.logits_chunk_tokens)

    def train(self, model: StreamModel, optimization: OptimizationRecipe, masters: Masters) -> TrainedModel:
        """Join a model that `load_trainable` returned with its optimizer."""
        config = self._config
        if config.activation_checkpointing:
            model.checkpoint_activations(self._profile.checkpoint_options())
        if config.offload_activations:
            model.offload_activations(self._profile)
        if config.compile:
            model.compile()
        parameters = {name: value for name, value in model.causal.named_parameters() if value.requires_grad}
        stepped = MasterParameters(
            parameters, self._profile, masters, on_host=config.offload_optimizer, apart=optimization.config.steps_apart
        )
        return TrainedModel(model, parameters, stepped, optimization(stepped.parameters), self._profile.weight_dtype)

    def _held_dtypes(self) -> HeldDtypes | None:
        dtype = torch.bfloat16 if self._config.narrow_weights else self._base_dtype()
        return None if dtype is None else partial(narrow_dtypes, dtype=dtype)

    def _base_dtype(self) -> torch.dtype | None:
        """Return the dtype of the weights under adapters if it is narrower than the dtype of computation."""
        if self._config.lora is None:
            return None
        dtype = base_dtype(self._config.lora, self._run.model)
        return dtype if dtype.itemsize < self._profile.weight_dtype.itemsize else None

    def _make_trainable(self, causal: PreTrainedModel, masters: Masters) -> None:
        self._change_computing(causal)
        freeze_parameters(causal, self._run.model.freeze)
        wide, lora = self._profile.weight_dtype, self._config.lora
        if self._config.narrow_weights:
            masters.update(narrow_trained_weights(causal, torch.bfloat16, wide))
        if lora is None:
            return
        from spurline_models.adapters.lora import add_adapters

        dtype = self._base_dtype()
        if dtype is not None:
            # Before adapters are added, which are not rounded.
            round_weights(causal, dtype)
        if lora.is_quantized:
            # Before adapters wrap the layers.
            quantize_weights(causal, wide)
        add_adapters(causal, lora, self._run.seed)
        if dtype is not None:
            narrow_weights(causal, dtype, wide)

    def _make_reference(self, causal: PreTrainedModel) -> None:
        self._change_computing(causal)
        if self._config.narrow_weights:
            narrow_trained_weights(causal, torch.bfloat16, self._profile.weight_dtype)

    def _change_computing(self, causal: PreTrainedModel) -> None:
        change_computing(causal, self._run.model, self._config.kernels, self._config.fp8, self._profile)
