"""The architecture of a model: its config with the run's overrides, and a model of it without memory.

What does not fit is refused here, with the override that made it so, before torch meets it in the middle of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError, listing, suggestion
from spurline_text.hub import finding, refuse_adapter
from spurline_text.tokenizer import describe_missing

LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    ImportError,
    AttributeError,
    RuntimeError,
    AssertionError,
    StrictDataclassError,
)
"""What transformers raises for folders, names and architectures it cannot use."""

_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Fields that are above 0 in every model; transformers itself takes any number."""


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What models call the number of experts of a layer."""

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")
"""What models call the experts that a token of a layer gets."""


def has_experts(config: PretrainedConfig) -> bool:
    """Whether a text model with this config may have layers with experts."""
    return any(getattr(config, name, None) for name in _EXPERT_COUNTS)


def num_experts(config: PretrainedConfig) -> int | None:
    """Experts of a layer of a text model with this config; None where it has none, or not in all layers as many."""
    return _count(config, _EXPERT_COUNTS)


def experts_per_token(config: PretrainedConfig) -> int | None:
    """Experts that a token of a layer gets; None as for `num_experts`."""
    return _count(config, _EXPERTS_PER_TOKEN)


def _count(config: PretrainedConfig, names: Sequence[str]) -> int | None:
    counts = (getattr(config, name, None) for name in names)
    return next((count for count in counts if isinstance(count, int) and count), None)


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """The architecture of `model.path` with `model.config_overrides` applied. Raises ModelError."""
    refuse_adapter("model.path", model.path)
    try:
        with finding("model.path", model.path):
            config = AutoConfig.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
    except LOADING_ERRORS as error:
        raise ModelError(describe_missing("model.path", model.path, "model", error, model.trust_remote_code)) from error
    if not model.trust_remote_code:
        # `org/name` there is a kernel of the hub, which is a program; runs choose by themselves how they compute.
        config._attn_implementation = config._experts_implementation = None
    for name, value in model.config_overrides.items():
        _override(config, name, value)
    _check_consistent(config, model)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.path: {model.path} is quantized, and quantized weights cannot be trained. "
            "Use the unquantized model it was made from."
        )
    return config


def build_without_memory(
    config: PretrainedConfig, model: ModelConfig, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model on the meta device: shapes without storage. Raises ModelError for an architecture that is none.

    dtype: of its weights; the config's own by default.
    """
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code, **options)
    except LOADING_ERRORS as error:
        raise ModelError(_cannot_build(config, model, error)) from error


def decoder_layers(causal: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers itself never divides; those of a decoder are its layers."""
    names = set(causal._no_split_modules or ())
    decoder = causal.get_decoder()
    found = [module for module in decoder.modules() if type(module).__name__ in names]
    return found or list(getattr(decoder, "layers", ()))


def find_decoder(causal: PreTrainedModel) -> nn.Module:
    """The part of the model that makes hidden states. Raises ModelError where there is none to be found."""
    decoder = causal.get_decoder()
    if decoder is not causal and isinstance(decoder, PreTrainedModel):
        return decoder
    # transformers looks for it by names, which not every model has, or has for something else.
    inner = [module for module in causal.children() if isinstance(module, PreTrainedModel)]
    if len(inner) != 1:
        raise ModelError(f"{type(causal).__name__} has no part that is a decoder. Choose a causal language model.")
    return inner[0]


def vocabulary_size(causal: PreTrainedModel) -> int:
    """Tokens that the model can read and predict; models may round the tokenizer's vocabulary up."""
    weight = causal.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    # Some embeddings have further rows, of prompts that are no tokens (CPM-Ant).
    named = getattr(causal.config.get_text_config(), "vocab_size", None)
    return min(weight.shape[0], named) if isinstance(named, int) else weight.shape[0]


def _cannot_build(config: PretrainedConfig, model: ModelConfig, error: Exception) -> str:
    if "Unrecognized configuration class" in str(error):
        text = config.get_text_config()
        if text is not config and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return (
                f"model.path: {model.path} ({type(config).__name__}) also sees or hears, and transformers has no "
                f"causal language model of it. Its text part is of type {text.model_type}, which has one: save it by "
                "itself, as docs/models.md shows (Models that also see or hear), and train that folder."
            )
        if text is not config:
            return (
                f"model.path: {model.path} ({type(config).__name__}) also sees or hears, and transformers has no "
                f"causal language model of it, nor of its text part ({text.model_type}). Choose a text model, such as "
                "the one that its text part was made from."
            )
        return (
            f"model.path: {model.path} ({type(config).__name__}) is not a causal language model. "
            "Choose a decoder-only text model."
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if model.config_overrides:
        return (
            f"model.config_overrides: no {type(config).__name__.removesuffix('Config')} model can be built with "
            f"{model.config_overrides} ({reason}). Remove them one by one to see which does not fit."
        )
    return f"model.path: no model can be built from the config of {model.path} ({reason}). Mend its config.json."


def _override(config: PretrainedConfig, name: str, value: Any) -> None:
    known = {*config.to_dict(), *config.attribute_map}
    key = f"model.config_overrides.{name}"
    if name not in known and (not hasattr(config, name) or callable(getattr(config, name))):
        raise ModelError(
            f"model.config_overrides: '{name}' is not a field of {type(config).__name__}."
            f"{suggestion(name, known)}\n"
            f"Fields: {listing(known)}."
        )
    before = getattr(config, name, None)
    try:
        # transformers completes some values in place, and a run's config never changes.
        setattr(config, name, deepcopy(value))
    except (StrictDataclassError, TypeError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[-1].strip()
        raise ModelError(
            f"{key} is {value!r}, which does not fit: {reason}. The model itself has {before!r}."
        ) from None
    if name in _COUNTS and isinstance(value, int) and value <= 0:
        raise ModelError(f"{key} is {value}; it must be above 0. The model itself has {before!r}.")


def _check_consistent(config: PretrainedConfig, model: ModelConfig) -> None:
    """Fields that depend on each other; transformers finds out while it builds or computes, or not at all."""
    text = config.get_text_config()
    place = "model.config_overrides" if model.config_overrides else f"model.path: the config of {model.path}"
    layers, kinds = getattr(text, "num_hidden_layers", None), getattr(text, "layer_types", None)
    if isinstance(layers, int) and isinstance(kinds, list):
        # A model cut to its first layers is usual, and takes the first kinds.
        is_cut = "num_hidden_layers" in model.config_overrides and "layer_types" not in model.config_overrides
        if len(kinds) < layers or (len(kinds) > layers and not is_cut):
            example = f" layer_types: [{', '.join([kinds[0]] * layers)}]" if len(set(kinds)) == 1 and layers < 9 else ""
            raise ModelError(
                f"{place}: layer_types has {len(kinds)} entries, and num_hidden_layers is {layers}. Set both to fit "
                f"each other{',' if example else '.'}{example}{'.' if example else ''}"
            )
    heads, key_heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(key_heads, int) and (key_heads <= 0 or heads % key_heads):
        raise ModelError(
            f"{place}: num_key_value_heads is {key_heads}, which does not divide num_attention_heads: {heads}. Change "
            "one of them."
        )
    hidden, head_size = getattr(text, "hidden_size", None), getattr(text, "head_dim", None)
    if isinstance(heads, int) and isinstance(hidden, int) and not head_size and hidden % heads:
        raise ModelError(
            f"{place}: num_attention_heads is {heads}, which does not divide hidden_size: {hidden}. Change one of them."
        )
