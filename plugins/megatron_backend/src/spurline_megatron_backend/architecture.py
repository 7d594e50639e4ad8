"""Read from the config of a Hugging Face model what Megatron-core has to know: sizes and switches, nothing else.

A model whose config says something that is not in this table is refused by the name of the field: what is not known
would be left out of the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from spurline.errors import ModelError, listing
from spurline_models.streams.positions import rope_type


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal layers with rotary positions, RMS norms and gated SiLU.

    hidden, ffn, head_dim, expert_ffn: widths. key_value_heads: shared ones, each by heads / key_value_heads queries.
    tied: the output layer is the embedding. qk_norm: queries and keys are normalised per head. num_experts: 0 for a
    dense model; else every layer has so many, and experts_per_token of them compute a token. renormalizes: whether the
    weights of the chosen experts are made to sum to 1. padding_token: the token whose row of the embedding gets no
    gradient from where it is read; in a tied model it still gets that of the output layer.
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
    padding_token: int | None = None


@dataclass(frozen=True)
class _Family:
    """The fields that configs of one class may have.

    switches: values of the fields of `Architecture` that the class itself decides. required: fields with the one value
    that can be computed; a config may leave them out. unused: fields that change nothing that is computed.
    has_experts: whether they say how many experts there are.
    """

    switches: Mapping[str, bool]
    required: Mapping[str, Any]
    unused: frozenset[str] = frozenset()
    has_experts: bool = False


_READ = frozenset(
    {
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "rms_norm_eps",
        "pad_token_id",
        "rope_parameters",
        "layer_types",
    }
)
"""Fields of every family that are read or have a check of their own."""

_READ_OF_EXPERTS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
)

_UNUSED = frozenset(
    {
        "architectures",
        "dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Fields of every family that do not matter to training: outputs that nobody asks for, labels, and notes of tools."""

_REQUIRED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "return_dict": True,
}

# Which layers have a window is said by `layer_types`; these are what it was made from.
_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})

_FAMILIES: Mapping[type[PretrainedConfig], _Family] = {
    LlamaConfig: _Family({}, {"attention_bias": False, "mlp_bias": False}, frozenset({"pretraining_tp"})),
    Qwen2Config: _Family({"qkv_bias": True}, {}, _WINDOWS),
    Qwen3Config: _Family({"qk_norm": True}, {"attention_bias": False, "use_qk_norm": True}, _WINDOWS),
    Qwen3MoeConfig: _Family(
        {"qk_norm": True},
        {
            "attention_bias": False,
            "use_qk_norm": True,
            # Used in every layer, whatever `use_sliding_window` says.
            "sliding_window": None,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "output_router_logits": False,
        },
        # The coefficient weighs a loss that only exists with `output_router_logits`.
        frozenset({"use_sliding_window", "max_window_layers", "router_aux_loss_coef"}),
        has_experts=True,
    ),
}

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
"""All settings that these types read in transformers, which ignores settings of another type."""

MODEL_TYPES = tuple(sorted(config.model_type for config in _FAMILIES))
"""Models that can be trained, by the names of transformers."""


def read_architecture(config: PretrainedConfig) -> Architecture:
    """Read the architecture that this config describes.

    Raises:
        ModelError: For another kind of model, and for any field that asks for what is not computed here.
    """
    family = _FAMILIES.get(type(config))
    if family is None:
        raise ModelError(
            f"model.path: {_name(config)} is a model of type '{config.model_type}', and backend megatron trains "
            f"{listing(MODEL_TYPES)}. Backends fsdp and local train every causal language model of transformers."
        )
    for field, value, needed in _unknown(config, family):
        raise ModelError(
            f"model.path: the config of {_name(config)} has {field}: {_short(value)}, and backend megatron {needed} "
            "Train it with backend fsdp or local."
        )
    padding = config.pad_token_id
    experts = _experts(config) if family.has_experts and config.num_experts else {}
    return Architecture(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        norm_epsilon=config.rms_norm_eps,
        # torch counts rows that are given as negative from the end.
        padding_token=None if padding is None else padding % config.vocab_size,
        **family.switches,
        **experts,
    )


def _experts(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_ffn": config.moe_intermediate_size,
        "renormalizes": bool(config.norm_topk_prob),
    }


def _unknown(config: PretrainedConfig, family: _Family) -> Iterator[tuple[str, Any, str]]:
    """(field, its value, the end of a sentence that says why not) of what this config asks for and is not computed."""
    required = {**_REQUIRED, **family.required}
    read = _READ | (_READ_OF_EXPERTS if family.has_experts else frozenset())
    fields = config.to_dict()
    for field in sorted(fields.keys() - read - _UNUSED - family.unused):
        value = fields[field]
        if field.startswith("_") or field.endswith("_token_id"):
            continue
        if field in required:
            if value != required[field]:
                yield field, value, f"computes {required[field]!r} alone."
        elif value != _default(type(config), field) and not _is_off(value):
            yield (
                field,
                value,
                (
                    "does not know this field. If it changes nothing in the model, as a note of some tool, set "
                    f"model.config_overrides: {{{field}: null}}."
                ),
            )
    yield from _unknown_layers(fields)
    if family.has_experts:
        yield from _unknown_routing(config)
    yield from _unknown_rope(fields.get("rope_parameters"))


def _unknown_layers(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    kinds = fields.get("layer_types") or []
    others = [kind for kind in kinds[: fields["num_hidden_layers"]] if kind != "full_attention"]
    if others:
        yield "layer_types", others[0], "computes full_attention alone."


def _unknown_routing(config: PretrainedConfig) -> Iterator[tuple[str, Any, str]]:
    if config.num_experts and config.num_experts_per_tok == 1 and config.norm_topk_prob:
        yield (
            "norm_topk_prob",
            True,
            "does not train a router whose one expert for a token (num_experts_per_tok: 1) always has weight 1: "
            "Megatron-core builds none.",
        )


def _unknown_rope(settings: Any) -> Iterator[tuple[str, Any, str]]:
    known = f"computes rotary frequencies of type {listing(_ROPE_TYPES)} alone, over whole heads."
    if not isinstance(settings, Mapping) or rope_type(settings) not in _ROPE_TYPES:
        yield "rope_parameters", settings, known
        return
    for name, value in sorted(settings.items()):
        if name not in _ROPE_SETTINGS and value is not None and not (name == "partial_rotary_factor" and value == 1.0):
            yield f"rope_parameters.{name}", value, known


def _default(kind: type[PretrainedConfig], field: str) -> Any:
    """Return the default of a field of the config class, or None if the class does not have the field."""
    return next((known.default for known in dataclasses.fields(kind) if known.name == field), None)


def _is_off(value: Any) -> bool:
    """Return whether a value turns a feature off: None, False, 0, or an empty string, list or mapping."""
    return value is None or (isinstance(value, (bool, int, float, str, list, dict)) and not value)


def _name(config: PretrainedConfig) -> str:
    return f"{config.name_or_path} ({type(config).__name__})" if config.name_or_path else type(config).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
