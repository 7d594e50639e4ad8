"""Estimate the device memory of a run without loading a weight, for `spurline plan`.

Weights, gradients and optimizer are exact sums of shapes, read from the model on the meta device. Activations are what
autograd keeps of a token, counted on the same model, or a rule of thumb over its linear layers where that is not
possible. Not all parts are there at once: the total is that of the fullest moment of an update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.protocols.optimizer import OptimizerConfig, num_values
from spurline_models.activation_counts import TokenActivations, count_activations
from spurline_models.adapters.adapter_targets import is_target, unadaptable
from spurline_models.architecture import build_without_memory, decoder_layers, load_model_config, vocabulary_size
from spurline_models.configs import LoraConfig
from spurline_models.freezing import freeze_parameters, frozen_names
from spurline_models.optimizers.groups import check_groups
from spurline_models.placement.master_parameters import step_buckets
from spurline_models.placement.narrow_weights import base_dtype, narrowable_modules, quantizable_modules
from spurline_models.placement.quantized_weights import quantized_bytes

_ELEMENTWISE_TENSORS_PER_LAYER = 8
"""Hidden-sized tensors a layer keeps for backward besides the inputs of its matrices: norms, residuals, rotary."""

_WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}
_COMPUTED_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
"""Of weights as they are held, and of what is computed with them: bf16 computes under autocast."""


_HALF_BYTES = 2

NOT_AT_ONCE = "never there at once"
"""Of the parts of an update; taken off."""


@dataclass(frozen=True)
class WeightHolding:
    """How trained weights are held.

    narrow: matrices in half precision. keeps_masters: with fp32 copies that last. sums_gradients: whether a step has
    several micro-batches. on_host: the optimizer, and what stands for weights, are in the memory of the host.
    trains_on_host: so is everything else.
    """

    narrow: bool = False
    keeps_masters: bool = False
    sums_gradients: bool = False
    on_host: bool = False
    trains_on_host: bool = False

    @property
    def leaves_device(self) -> bool:
        """Whether the optimizer takes no memory of the device."""
        return self.on_host and not self.trains_on_host

    @property
    def wide_tensors(self) -> int:
        """Wide tensors that a weight needs for its step alone: its gradient, and a copy if it has no master."""
        return 1 if self.keeps_masters else 2


WIDE = WeightHolding()


@dataclass(frozen=True)
class Shapes:
    """What memory depends on in a model.

    parameters: all of them, adapters included. trained, frozen: shapes of those that ask for gradients and of the
    others, by name. narrowable: names of those weights that may be held in fewer bytes than is computed with, while
    they are frozen. quantizable: those that may be held quantized. blocks: names of the modules that are the decoder's
    layers.
    linear: inputs and outputs of all linear layers but the output layer, whose cost is that of the logits; of stored
    experts, those that a token sees.
    cached: elements of keys and values that generation keeps for each token. head: name of the output layer's weights.
    is_tied: whether these are the embedding's.
    """

    parameters: int
    trained: Mapping[str, tuple[int, ...]]
    frozen: Mapping[str, tuple[int, ...]]
    narrowable: frozenset[str]
    quantizable: frozenset[str]
    blocks: tuple[str, ...]
    layers: int
    hidden: int
    vocabulary: int
    linear: int
    cached: int
    head: str
    is_tied: bool

    def usual_activations(self, element_bytes: int) -> TokenActivations:
        """By rule of thumb, the same for all layers."""
        layer = self.linear // self.layers + self.hidden * _ELEMENTWISE_TENSORS_PER_LAYER
        return TokenActivations((layer * element_bytes,) * self.layers, 0, self.hidden * element_bytes)


def token_activations(
    model: ModelConfig,
    lora: LoraConfig | None,
    precision: Literal["fp32", "bf16", "fp64"],
    *,
    autocast: bool = True,
) -> TokenActivations:
    """What is kept of each token for the backward pass. Raises ModelError.

    autocast: whether bf16 is computed so, from fp32 weights; otherwise weights are bf16 as well.
    """
    return _token_activations(_described(model, lora), precision, autocast)


class _Described(NamedTuple):
    """A model and its adapters in words, under which what was found of them is kept: files may change."""

    architecture: str
    model: str
    lora: str | None

    def settings(self) -> tuple[ModelConfig, LoraConfig | None]:
        lora = None if self.lora is None else LoraConfig.model_validate_json(self.lora)
        return ModelConfig.model_validate_json(self.model), lora


def _described(model: ModelConfig, lora: LoraConfig | None) -> _Described:
    architecture = load_model_config(model).to_json_string(use_diff=False)
    return _Described(architecture, model.model_dump_json(), lora and lora.model_dump_json())


@lru_cache(maxsize=64)
def _token_activations(
    described: _Described, precision: Literal["fp32", "bf16", "fp64"], autocast: bool
) -> TokenActivations:
    model, lora = described.settings()
    autocast = autocast and precision == "bf16"
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    causal = build_without_memory(load_model_config(model), model)
    # What is held narrow is computed with as wide, and what is quantized keeps what linear layers keep.
    nn.Module.to(causal, dtype=torch.float32 if autocast else dtype)
    if lora is None:
        freeze_parameters(causal, model.freeze)
    else:
        from spurline_models.adapters.lora import add_adapters

        add_adapters(causal, lora, 0)
    counted = count_activations(causal, autocast=autocast)
    return counted or model_shapes(model, lora).usual_activations(_COMPUTED_BYTES[precision])


def model_shapes(model: ModelConfig, lora: LoraConfig | None) -> Shapes:
    """The shapes of `model.path`, with adapters if there are some. Raises ModelError."""
    return _model_shapes(_described(model, lora))


@lru_cache(maxsize=16)
def _model_shapes(described: _Described) -> Shapes:
    model, lora = described.settings()
    config = load_model_config(model)
    causal = build_without_memory(config, model)
    head = causal.get_output_embeddings()
    linear = {
        name: module for name, module in causal.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    base = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
    left_out = unadaptable(causal)
    adaptable = {name: module for name, module in linear.items() if name not in left_out}
    adapters = {} if lora is None else _adapter_shapes(adaptable, lora)
    frozen = set(base) if adapters else frozen_names(base, model.freeze)
    text = config.get_text_config()
    names = {id(parameter): name for name, parameter in causal.named_parameters()}
    output = None if head is None else getattr(head, "weight", None)
    return Shapes(
        parameters=num_values(base) + num_values(adapters),
        trained=adapters or {name: shape for name, shape in base.items() if name not in frozen},
        frozen={name: shape for name, shape in base.items() if name in frozen},
        narrowable=frozenset(f"{name}.weight" for name, _ in narrowable_modules(causal)) & base.keys(),
        quantizable=frozenset(f"{name}.weight" for name, _ in quantizable_modules(causal)) & base.keys(),
        blocks=_decoder_layers(causal),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=vocabulary_size(causal),
        linear=sum(module.in_features + module.out_features for module in linear.values()) + _seen_experts(base, text),
        cached=_cached_per_token(text),
        head=names.get(id(output), ""),
        is_tied=output is not None and output is causal.get_input_embeddings().weight,
    )


def _decoder_layers(causal: PreTrainedModel) -> tuple[str, ...]:
    layers = {id(layer) for layer in decoder_layers(causal)}
    return tuple(name for name, module in causal.named_modules() if id(module) in layers)


def _seen_experts(base: Mapping[str, tuple[int, ...]], config: PretrainedConfig) -> int:
    """Inputs and outputs of the experts that one token sees, where a layer's experts are stored as one tensor."""
    seen = int(getattr(config, "num_experts_per_tok", None) or 0)
    return seen * sum(sum(shape[1:]) for shape in base.values() if len(shape) == 3 and seen)


def _adapter_shapes(linear: Mapping[str, nn.Linear], lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapters' parameters, by the names that peft gives them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in linear.items():
        if is_target(name, lora):
            shapes[f"{name}.lora_A.default.weight"] = (lora.rank, module.in_features)
            shapes[f"{name}.lora_B.default.weight"] = (module.out_features, lora.rank)
            if lora.dora:
                shapes[f"{name}.lora_magnitude_vector.default.weight"] = (module.out_features,)
    return shapes


def _cached_per_token(config: PretrainedConfig) -> int:
    """Keys and values of all layers; more than there are where layers look back over a window only.

    0 for a model without heads of attention, which keeps none.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(config.num_hidden_layers) * key_heads * head_size


def estimate_memory(
    model: ModelConfig,
    tokens: int,
    *,
    precision: Literal["fp32", "bf16", "fp64"],
    holding: WeightHolding = WIDE,
    lora: LoraConfig | None,
    activation_checkpointing: bool,
    offload_activations: bool = False,
    logits_chunk_tokens: int,
    optimizer: OptimizerConfig,
    critic_optimizer: OptimizerConfig | None,
    reference: bool,
) -> dict[str, int]:
    """Bytes by part in one process; their sum is the peak of an update. One part is negative: `NOT_AT_ONCE`.

    tokens: non-padding tokens of one micro-batch, all of which are taken to carry loss.
    holding: how trained weights are held; what is on the host is not counted.
    critic_optimizer: of a run with a critic; adds `critic`, its weights and optimizer. All else of it is never there
        together with the policy's.
    reference: adds `reference`, the weights before training; runs with adapters have none of their own.
    Raises ModelError, and ConfigError for a group of the optimizer that fits no trained parameter.
    """
    shapes = model_shapes(model, lora)
    check_groups(optimizer, shapes.trained)
    held = _held_weights(shapes, model, precision, holding, lora)
    kept = token_activations(model, lora, precision)
    forward = tokens * kept.kept(checkpointing=activation_checkpointing, offloading=offload_activations)
    recomputed = tokens * kept.recomputed if activation_checkpointing else 0
    scored = min(tokens, logits_chunk_tokens)
    parts = {
        "weights": held.num_bytes,
        # Sums over micro-batches are wide.
        "gradients": (num_values(shapes.trained) - num_values(held.trained)) * held.wide_bytes
        + num_values(held.trained) * (held.wide_bytes if holding.sums_gradients else _HALF_BYTES),
        "optimizer": 0 if holding.leaves_device else optimizer.state_bytes(shapes.trained, held.wide_bytes),
        "activations": forward + recomputed,
        # In backward: log-softmax, the gradient of it and that of the logits, at full precision.
        "logits": scored * shapes.vocabulary * 3 * held.wide_bytes,
    }
    masters = 0 if holding.leaves_device else _master_bytes(shapes, holding, held.wide_bytes)
    if masters:
        parts["masters"] = masters
    if held.trained and not holding.leaves_device:
        # For the step, when activations and logits are gone.
        stepped = _largest_bucket(shapes.trained, apart=optimizer.steps_apart) * holding.wide_tensors * held.wide_bytes
        parts["stepping"] = stepped
    # Frozen layers drop what autocast rounded for them one by one when they are recomputed.
    layers = shapes.layers if activation_checkpointing and lora is not None else 1
    parts |= _computed_weights(held, _COMPUTED_BYTES[precision], layers)
    spared = _spared(shapes, parts, tokens, logits_chunk_tokens, recomputed, holding, held)
    if spared:
        parts[NOT_AT_ONCE] = -spared
    if reference and lora is None:
        parts["reference"] = parts["weights"]
    if critic_optimizer is not None:
        # As large as the policy but for its output layer, and its gradients are dropped before the policy has any.
        state = 0 if holding.leaves_device else critic_optimizer.state_bytes(shapes.trained, held.wide_bytes)
        parts["critic"] = parts["weights"] + masters + state
    return parts


@dataclass(frozen=True)
class _HeldWeights:
    """The parameters of a model by how many bytes a value of theirs has.

    wide: number of values that have `wide_bytes`. narrow, quantized: shapes of frozen ones that have `narrow_bytes`,
    and that are quantized. trained: of trained ones that have `narrow_bytes`.
    """

    wide_bytes: int
    narrow_bytes: int
    wide: int
    narrow: Mapping[str, tuple[int, ...]]
    quantized: Mapping[str, tuple[int, ...]]
    trained: Mapping[str, tuple[int, ...]]

    @property
    def num_bytes(self) -> int:
        halves = num_values(self.narrow) + num_values(self.trained)
        quantized = sum(quantized_bytes(math.prod(shape)) for shape in self.quantized.values())
        return self.wide * self.wide_bytes + halves * self.narrow_bytes + quantized


def _held_weights(
    shapes: Shapes,
    model: ModelConfig,
    precision: Literal["fp32", "bf16", "fp64"],
    holding: WeightHolding,
    lora: LoraConfig | None,
) -> _HeldWeights:
    wide_bytes = _WEIGHT_BYTES[precision]
    narrow_bytes = wide_bytes if lora is None else min(wide_bytes, base_dtype(lora, model).itemsize)
    if holding.narrow:
        narrow_bytes = _HALF_BYTES
    is_quantized = lora is not None and lora.is_quantized
    quantized = {name: shapes.frozen[name] for name in shapes.quantizable & shapes.frozen.keys() if is_quantized}
    narrow = {name: shapes.frozen[name] for name in shapes.narrowable & shapes.frozen.keys() - quantized.keys()}
    if narrow_bytes == wide_bytes:
        narrow = {}
    trained = _narrow_trained(shapes, holding)
    wide = shapes.parameters - num_values(narrow) - num_values(quantized) - num_values(trained)
    return _HeldWeights(wide_bytes, narrow_bytes, wide, narrow, quantized, trained)


def _computed_weights(held: _HeldWeights, computed_bytes: int, layers: int) -> dict[str, int]:
    """Bytes of what is computed with in the place of held weights. layers: of which one is there at a time."""
    parts: dict[str, int] = {}
    widened = [*held.narrow.values(), *held.quantized.values()]
    if computed_bytes < held.wide_bytes:
        # Autocast keeps what it rounded for the backward pass. Narrow weights are computed with as they are, where they
        # have the very dtype.
        rounded = held.wide + (0 if held.narrow_bytes == computed_bytes else num_values(held.narrow))
        parts["rounded weights"] = rounded * computed_bytes // layers
        widened = [*held.quantized.values()]
    if widened:
        # The matrix that is computed with, and its gradient's copy of it, are widened one at a time.
        parts["widened weights"] = max(map(math.prod, widened)) * computed_bytes
    return parts


def _spared(
    shapes: Shapes,
    parts: Mapping[str, int],
    tokens: int,
    chunk_tokens: int,
    recomputed: int,
    holding: WeightHolding,
    held: _HeldWeights,
) -> int:
    """Bytes by which the parts of an update exceed its fullest moment.

    recomputed: of the activations, those of one layer that is recomputed.
    """
    gradients, logits = parts["gradients"], parts["logits"]
    rounded, widened = parts.get("rounded weights", 0), parts.get("widened weights", 0)
    kept = parts["activations"] - recomputed + rounded
    head = math.prod(shapes.trained.get(shapes.head, (0,)))
    head *= _HALF_BYTES if shapes.head in held.trained else held.wide_bytes
    chunked = tokens > chunk_tokens
    # Those of other micro-batches stay; of a first one gradients come while activations go.
    before = gradients if holding.sums_gradients else 0
    first = 0 if holding.sums_gradients else head
    moments = {
        "loss": before + kept + logits + (first if chunked else 0),
        # A chunk's gradient of the output layer is added to that of the others.
        "output layer": before + kept + logits // 3 + head * (2 if chunked and not before else 1),
        "last layer": before + first + kept + recomputed + widened,
        "first layer": gradients + recomputed + widened + (head if shapes.is_tied else 0),
        "step": gradients + parts.get("stepping", 0),
    }
    update = ("gradients", "activations", "logits", "rounded weights", "widened weights", "stepping")
    return sum(parts.get(name, 0) for name in update) - max(moments.values())


def estimate_checkpoint_copy(
    model: ModelConfig,
    *,
    precision: Literal["fp32", "bf16", "fp64"],
    holding: WeightHolding,
    lora: LoraConfig | None,
    optimizers: Sequence[OptimizerConfig],
) -> int:
    """Bytes of what a checkpoint holds: trained weights and optimizer state of the models that these optimizers train.

    Raises ModelError.
    """
    shapes, weight_bytes = model_shapes(model, lora), _WEIGHT_BYTES[precision]
    trained = num_values(shapes.trained)
    # Masters are saved instead of what is rounded from them.
    narrow = 0 if holding.keeps_masters else num_values(_narrow_trained(shapes, holding))
    weights = (trained - narrow) * weight_bytes + narrow * _COMPUTED_BYTES["bf16"]
    return sum(weights + one.state_bytes(shapes.trained, weight_bytes) for one in optimizers)


def estimate_offloaded_activations(
    model: ModelConfig,
    tokens: int,
    *,
    precision: Literal["fp32", "bf16", "fp64"],
    lora: LoraConfig | None,
    activation_checkpointing: bool,
) -> int:
    """Bytes of activations of a micro-batch that `offload_activations` keeps on the host. Raises ModelError."""
    return tokens * token_activations(model, lora, precision).offloaded(checkpointing=activation_checkpointing)


def estimate_stepped_on_host(
    model: ModelConfig,
    *,
    precision: Literal["fp32", "bf16", "fp64"],
    holding: WeightHolding,
    lora: LoraConfig | None,
    optimizers: Sequence[OptimizerConfig],
) -> int:
    """Bytes that models with these optimizers keep on the host where `holding.leaves_device`. Raises ModelError."""
    shapes = model_shapes(model, lora)
    weight_bytes = _WEIGHT_BYTES[precision]
    kept = _master_bytes(shapes, holding, weight_bytes)
    return sum(kept + optimizer.state_bytes(shapes.trained, weight_bytes) for optimizer in optimizers)


def _narrow_trained(shapes: Shapes, holding: WeightHolding) -> dict[str, tuple[int, ...]]:
    """Trained weights that are held in half precision."""
    return {name: shape for name, shape in shapes.trained.items() if holding.narrow and name in shapes.narrowable}


def _master_bytes(shapes: Shapes, holding: WeightHolding, weight_bytes: int) -> int:
    """Of the fp32 tensors that stand for weights beside them."""
    narrow = num_values(_narrow_trained(shapes, holding))
    kept = narrow if holding.keeps_masters else 0
    # An optimizer on the host steps on copies of wide weights.
    return (kept + (num_values(shapes.trained) - narrow if holding.on_host else 0)) * weight_bytes


def _largest_bucket(trained: Mapping[str, tuple[int, ...]], *, apart: bool) -> int:
    sizes = {name: math.prod(shape) for name, shape in trained.items()}
    return max(sum(sizes[name] for name in bucket) for bucket in step_buckets(sizes, apart=apart))


def estimate_cache(model: ModelConfig, tokens: int, *, precision: Literal["fp32", "bf16", "fp64"]) -> int:
    """Bytes of keys and values of so many tokens while responses are generated. Raises ModelError."""
    return tokens * model_shapes(model, None).cached * _COMPUTED_BYTES[precision]


def count_parameters(model: ModelConfig) -> int:
    """Parameters of `model.path`, without reading its weights. Raises ModelError."""
    return model_shapes(model, None).parameters
