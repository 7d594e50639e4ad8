"""Read from the config of a Hugging Face model the sizes and switches that Megatron-core needs.

A config is refused if it sets a field that is not in these tables, because this backend would ignore the field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from spurline.errors import ModelError, listing
from spurline_models.lengths import rope_type


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal layers with rotary positions, RMS norms and gated SiLU.

    Attributes:
        key_value_heads: The number of key and value heads. Each of them serves heads / key_value_heads query heads.
        tied: Whether the output layer shares the weights of the embedding.
        qk_norm: Whether queries and keys are normalised per head.
        num_experts: The number of experts in each layer. It is 0 for a dense model.
        experts_per_token: The number of experts that compute a token.
        renormalizes: Whether the weights of the chosen experts are scaled to sum to 1.
        scores: Whether the model has a score head instead of the output layer.
        padding_token: The token whose embedding is not trained. A tied output layer still trains its row.
    """

    model_type: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    norm_epsilon: float
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    renormalizes: bool = True
    scores: bool = False
    padding_token: int | None = None


_FAMILIES: Mapping[type[PretrainedConfig], Mapping[str, Any]] = {
    LlamaConfig: {},
    Qwen2Config: {"qkv_bias": True},
    Qwen3Config: {"qk_norm": True},
    Qwen3MoeConfig: {"qk_norm": True},
}
"""The switches of `Architecture` that follow from the class of a config."""

_COPIED = {
    "model_type": "model_type",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_value_heads",
    "vocab_size": "vocabulary",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "norm_epsilon",
}
_COPIED_OF_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_ffn",
    "norm_topk_prob": "renormalizes",
}
"""Fields of a config that are copied, each with its name in `Architecture`."""

_CHECKED = {"head_dim", "pad_token_id", "rope_parameters", "layer_types"}
_CHECKED_OF_EXPERTS = {"num_local_experts", "sliding_window"}
"""Fields that are checked or converted, not copied."""

_UNUSED = frozenset(
    {
        "architectures",
        "dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        # The weight of a loss that only exists with `output_router_logits`.
        "router_aux_loss_coef",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        # Qwen 3 always has these norms.
        "use_qk_norm",
        # The next three determine `layer_types`, which is read instead.
        "max_window_layers",
        "sliding_window",
        "use_sliding_window",
    }
)
"""Fields without an effect on training, such as unused outputs, labels, and notes of tools."""

_ROPE_TYPES = ("default", "linear", "llama3")
_ROPE_SETTINGS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
)
"""The settings that transformers reads for the types in `_ROPE_TYPES`."""

MODEL_TYPES = tuple(sorted(config.model_type for config in _FAMILIES))
"""The model types that can be trained."""


def read_architecture(config: PretrainedConfig, head: str = "vocabulary") -> Architecture:
    """Read the architecture that this config describes. `head` is that of `ModelConfig`.

    Raises:
        ModelError: If backend megatron does not support this type of model, or the value of a field.
    """
    family = _FAMILIES.get(type(config))
    if family is None:
        raise ModelError(
            f"model.path: {_name(config)} is a model of type '{config.model_type}', but backend megatron trains only "
            f"{listing(MODEL_TYPES)}. Backends fsdp and local train every causal language model of transformers."
        )
    defaults = {known.name: known.default for known in dataclasses.fields(type(config))}
    has_experts = "num_experts" in defaults
    for field, value, needed in _unknown(config, defaults, has_experts=has_experts):
        raise ModelError(
            f"model.path: the config of {_name(config)} has {field}: {value!r:.60}, and backend megatron {needed} "
            "Train it with backend fsdp or local."
        )
    copied = _COPIED | (_COPIED_OF_EXPERTS if has_experts and config.num_experts else {})
    padding = config.pad_token_id
    return Architecture(
        **{ours: getattr(config, theirs) for theirs, ours in copied.items()},
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        scores=head == "score",
        # torch counts negative rows from the end.
        padding_token=None if padding is None else padding % config.vocab_size,
        **family,
    )


def _unknown(
    config: PretrainedConfig, defaults: Mapping[str, Any], *, has_experts: bool
) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, value, reason) for each field that backend megatron does not support. Reasons begin with a verb."""
    read = {*_COPIED, *_CHECKED}
    if has_experts:
        read |= {*_COPIED_OF_EXPERTS, *_CHECKED_OF_EXPERTS}
    fields = config.to_dict()
    for field in sorted(fields.keys() - read - _UNUSED):
        value, default = fields[field], defaults.get(field)
        is_default = value == default or (_is_off(value) and _is_off(default))
        if is_default or field.startswith("_") or field.endswith("_token_id"):
            continue
        needed = (
            f"supports only {defaults[field]!r}."
            if field in defaults
            else "does not know this field. If it has no effect on the model, for example because it is a note of a "
            f"tool, set model.config_overrides: {{{field}: null}}."
        )
        yield field, value, needed
    kinds = fields.get("layer_types") or []
    for kind in kinds[: fields["num_hidden_layers"]]:
        if kind != "full_attention":
            yield "layer_types", kind, "supports only full_attention."
    if has_experts and config.sliding_window is not None:
        # Every layer of these models has the window, for any value of `use_sliding_window`.
        yield "sliding_window", config.sliding_window, "supports no sliding window."
    if has_experts and config.num_experts and config.num_experts_per_tok == 1 and config.norm_topk_prob:
        yield (
            "norm_topk_prob",
            True,
            "cannot train a router with one expert for each token (num_experts_per_tok: 1), whose weight is always 1.",
        )
    yield from _unknown_rope(fields.get("rope_parameters"))


def _unknown_rope(settings: Any) -> Iterator[tuple[str, Any, str]]:
    known = f"supports only rotary embeddings of type {listing(_ROPE_TYPES)}, over whole heads."
    if not isinstance(settings, Mapping) or rope_type(settings) not in _ROPE_TYPES:
        yield "rope_parameters", settings, known
        return
    for name, value in sorted(settings.items()):
        if name not in _ROPE_SETTINGS and value is not None and not (name == "partial_rotary_factor" and value == 1.0):
            yield f"rope_parameters.{name}", value, known


def _is_off(value: Any) -> bool:
    """Return whether a value turns a feature off: None, False, 0, or something empty."""
    return value is None or (isinstance(value, (bool, int, float, str, list, dict)) and not value)


def _name(config: PretrainedConfig) -> str:
    return f"{config.name_or_path} ({type(config).__name__})" if config.name_or_path else type(config).__name__
