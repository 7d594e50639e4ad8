"""Estimate the memory of training for `spurline plan`, without loading weights.

The size of the weights is exact, since it comes from the model on the meta device. For activations, a rule of thumb
is used: a decoder layer keeps about 2.5 values for each output value of its linear layers. This includes the values of
norms, gates and attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.protocols.backend import Role
from spurline.protocols.optimizer import num_values
from spurline_models.adapters.adapter_targets import is_target, unadaptable
from spurline_models.architecture import (
    SCORE,
    build_without_memory,
    decoder_layers,
    load_model_config,
    model_of,
    output_layer,
    vocabulary_size,
)
from spurline_models.configs import Checkpointing, LoraConfig, num_checkpointed
from spurline_models.frozen import naming_frozen
from spurline_models.optimizers.groups import frozen_names
from spurline_models.placement.narrow_weights import narrowable_modules, quantizable_modules

COMPUTED_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
"""Bytes of an activation value, keyed by precision."""

_KEPT_OF_OUTPUTS = 2.5
"""Values that a layer keeps for its backward pass, for each output value of its linear layers."""

_RESIDUALS = 8
"""Number of tensors that a layer keeps in the hidden size and the precision of the residual stream."""

_LAYERS_ON_DEVICE = 2
"""Layers whose activations stay on the device while the others are offloaded."""

ShapeByName = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model that its memory depends on.

    Attributes:
        parameters: Number of all parameters, adapters included.
        trained: Shapes of the trained parameters, by name.
        frozen: Shapes of the other parameters, by name.
        narrowable: Names of weights that may be held in half precision.
        quantizable: Names of weights that may be quantized.
        blocks: Names of the decoder's layers.
        hidden: Size of the hidden states.
        vocabulary: Rows of the output layer.
        outputs: Values that linear layers and used experts compute for one token, except in the output layer.
        cached: Values in the key-value cache for one token.
    """

    parameters: int
    trained: ShapeByName
    frozen: ShapeByName
    narrowable: frozenset[str]
    quantizable: frozenset[str]
    blocks: tuple[str, ...]
    hidden: int
    vocabulary: int
    outputs: int
    cached: int

    def num_whole(self, share: Checkpointing) -> int:
        """Return how many layers have all their activations at once, if this share of the layers is checkpointed."""
        # The last layers run first in the backward pass. When one of the others is recomputed, theirs are freed.
        return max(1, len(self.blocks) - num_checkpointed(share, len(self.blocks)))

    def activation_bytes(
        self, tokens: int, computed_bytes: int, residual_bytes: int, *, share: Checkpointing, offloading: bool
    ) -> tuple[int, int]:
        """Return the bytes that the backward pass needs for these tokens, on the device and on the host.

        Args:
            tokens: Tokens of a micro-batch.
            computed_bytes: Bytes of an output value of a linear layer.
            residual_bytes: Bytes of a value of the residual stream.
            share: The share of layers of which only the inputs are kept. They are recomputed one at a time.
            offloading: Whether the kept values of all but two layers are moved to host memory.
        """
        layers = len(self.blocks)
        residuals = _RESIDUALS * self.hidden
        values = int(_KEPT_OF_OUTPUTS * self.outputs / layers)
        whole = max(0, values - residuals) * computed_bytes + residuals * residual_bytes
        inputs = num_checkpointed(share, layers)
        here = min(inputs, _LAYERS_ON_DEVICE) if offloading else inputs
        kept = self.hidden * residual_bytes
        whole *= self.num_whole(share)
        return tokens * (here * kept + whole), (inputs - here) * pinned_bytes(tokens * kept)


def pinned_bytes(size: int) -> int:
    """Return the host memory that torch pins for a tensor of this size. It is the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def frozen_shapes(run: RunConfig, lora: LoraConfig | None) -> dict[Role, Shapes]:
    """Return the shapes of each untrained model that the run uses and that has weights of its own.

    With adapters, the default reference is the trained model with its adapters switched off.
    """
    shared = set() if lora is None else {"reference"} - run.model.frozen.keys()
    shapes: dict[Role, Shapes] = {}
    for role in sorted(run.frozen_roles - shared):
        with naming_frozen(run.model, role):
            shapes[role] = model_shapes(model_of(run.model, role), None)
    return shapes


def model_shapes(model: ModelConfig, lora: LoraConfig | None) -> Shapes:
    """Return the shapes of `model.path`, with the adapters of `lora`. Raises ModelError."""
    # The model's config is part of the cache key, since its file may change between two calls.
    architecture = load_model_config(model).to_json_string(use_diff=False)
    return _model_shapes(architecture, model.model_dump_json(), lora and lora.model_dump_json())


@lru_cache(maxsize=16)
def _model_shapes(_architecture: str, model_json: str, lora_json: str | None) -> Shapes:
    model = ModelConfig.model_validate_json(model_json)
    lora = None if lora_json is None else LoraConfig.model_validate_json(lora_json)
    config = load_model_config(model)
    causal = build_without_memory(config, model)
    head = output_layer(causal)
    linear = {
        name: module
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    base = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
    adapters: dict[str, tuple[int, ...]] = {}
    left_out = unadaptable(causal)
    for name, module in linear.items():
        if lora is not None and isinstance(module, nn.Linear) and name not in left_out and is_target(name, lora):
            # peft uses these names.
            adapters[f"{name}.lora_A.default.weight"] = (lora.rank, module.in_features)
            adapters[f"{name}.lora_B.default.weight"] = (module.out_features, lora.rank)
    frozen = base.keys() - {SCORE} if adapters else frozen_names(base, model.freeze)
    text = config.get_text_config()
    layers = {id(layer) for layer in decoder_layers(causal)}
    outputs = sum(module.nf if isinstance(module, Conv1D) else module.out_features for module in linear.values())
    return Shapes(
        parameters=num_values(base) + num_values(adapters),
        trained=adapters | {name: shape for name, shape in base.items() if name not in frozen},
        frozen={name: shape for name, shape in base.items() if name in frozen},
        narrowable=frozenset(f"{name}.weight" for name, _ in narrowable_modules(causal)) & base.keys(),
        quantizable=frozenset(f"{name}.weight" for name, _ in quantizable_modules(causal)) & base.keys(),
        blocks=tuple(name for name, module in causal.named_modules() if id(module) in layers),
        hidden=text.hidden_size,
        vocabulary=vocabulary_size(causal),
        outputs=outputs + _outputs_of_seen_experts(base, text),
        cached=_cached_per_token(text),
    )


def _outputs_of_seen_experts(base: ShapeByName, config: PretrainedConfig) -> int:
    """Return the values that experts compute for a token, if the experts of a layer are stored as one tensor."""
    seen = int(getattr(config, "num_experts_per_tok", None) or 0)
    # For a matrix, `sum(shape[1:])` is inputs plus outputs. Experts share some of their inputs, hence three quarters.
    return seen * sum(sum(shape[1:]) for shape in base.values() if len(shape) == 3) * 3 // 4


def _cached_per_token(config: PretrainedConfig) -> int:
    """Return the values in the key-value cache for one token. Sliding windows are ignored."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(config.num_hidden_layers) * key_heads * head_size


def estimate_cache(model: ModelConfig, tokens: int, *, precision: str) -> int:
    """Return the bytes of the keys and values of `tokens` tokens. Raises ModelError."""
    return tokens * model_shapes(model, None).cached * COMPUTED_BYTES[precision]


def count_parameters(model: ModelConfig) -> int:
    """Count the parameters of `model.path` without reading its weights. Raises ModelError."""
    return model_shapes(model, None).parameters
