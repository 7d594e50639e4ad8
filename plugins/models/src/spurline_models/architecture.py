"""Read a model's config, apply the run's overrides, and build the model on the meta device, without memory."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError, listing, suggestion
from spurline.protocols.backend import Role
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
"""Errors that transformers raises for folders, names and architectures that it cannot use."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")


def num_experts(config: PretrainedConfig) -> int | None:
    """Return the number of experts in a layer. It is None if no layer has experts, or if layers differ."""
    return _count(config, _EXPERT_COUNTS)


def experts_per_token(config: PretrainedConfig) -> int | None:
    """Return the number of experts used per token. It is None if no layer has experts, or if layers differ."""
    return _count(config, _EXPERTS_PER_TOKEN)


def _count(config: PretrainedConfig, names: Sequence[str]) -> int | None:
    counts = (getattr(config, name, None) for name in names)
    return next((count for count in counts if isinstance(count, int) and count), None)


def model_of(model: ModelConfig, role: Role) -> ModelConfig:
    """Return the settings with which the model of a role is loaded: those of `model.frozen`, or else `model` itself."""
    frozen = model.frozen.get(role)
    if frozen is None:
        return model
    return ModelConfig.model_construct(**dict(frozen), allow_extrapolation=model.allow_extrapolation)


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """Return the config of `model.path` with `model.config_overrides` applied. Raises ModelError."""
    refuse_adapter("model.path", model.path)
    try:
        with finding("model.path", model.path):
            config = AutoConfig.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
    except LOADING_ERRORS as error:
        raise ModelError(describe_missing("model.path", model.path, "model", error, model.trust_remote_code)) from error
    if not model.trust_remote_code:
        # These fields may name a repository on the hub, from which transformers would load code.
        config._attn_implementation = config._experts_implementation = None
    for name, value in model.config_overrides.items():
        _override(config, name, value)
    if model.head == "score":
        config.num_labels = 1
    elif has_score(config):
        raise ModelError(
            f"model.path: {model.path} is a {', '.join(config.architectures or ())}, which gives scores and has no "
            "vocabulary. Set model.head: score, or choose the language model that it was made from."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.path: {model.path} is quantized, and quantized weights cannot be trained. "
            "Use the unquantized model it was made from."
        )
    return config


def build_without_memory(
    config: PretrainedConfig, model: ModelConfig, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build the model on the meta device, in `dtype` or the dtype of its config. Raises ModelError."""
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"):
            return new_model(config, model, **options)
    except LOADING_ERRORS as error:
        raise ModelError(_cannot_build(config, model, error)) from error


SCORE = "score.weight"
"""The name of a score head's weight in transformers and in files."""


class ScalarHead(nn.Linear):
    """A linear layer that maps hidden states [..., H] to a number [...]. Its values are 0 at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        # Autocast would round a matrix product to half precision. Differences of values need more digits.
        return (hidden.to(self.weight.dtype) * self.weight).sum(-1)


def has_score(config: PretrainedConfig) -> bool:
    """Return whether the model of this config has a score head instead of a vocabulary."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def new_model(config: PretrainedConfig, model: ModelConfig, **options: Any) -> PreTrainedModel:
    """Build the model with new weights and the head that `model` asks for."""
    if model.head == "vocabulary":
        return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code, **options)
    scorer: Any = AutoModelForSequenceClassification.from_config(
        config, trust_remote_code=model.trust_remote_code, **options
    )
    own = getattr(scorer, "score", None)
    if not isinstance(own, nn.Linear) or own.bias is not None:
        raise ValueError(f"{type(scorer).__name__} has no score head over a decoder")
    head = ScalarHead(own.in_features)
    head.weight = own.weight
    scorer.score = head
    return scorer


def output_layer(causal: PreTrainedModel) -> nn.Module | None:
    """Return the layer after the decoder: the output embeddings or the score head."""
    return causal.get_output_embeddings() or getattr(causal, "score", None)


def decoder_layers(causal: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers: modules of the classes that transformers never splits, or else its `layers`."""
    names = set(causal._no_split_modules or ())
    decoder = causal.get_decoder()
    found = [module for module in decoder.modules() if type(module).__name__ in names]
    return found or list(getattr(decoder, "layers", ()))


def find_decoder(causal: PreTrainedModel) -> nn.Module:
    """Return the part of the model that computes hidden states. Raises ModelError if there is none."""
    decoder = causal.get_decoder()
    if decoder is not causal and isinstance(decoder, PreTrainedModel):
        return decoder
    # transformers looks for attributes with certain names. Some models lack them, or use them for something else.
    inner = [module for module in causal.children() if isinstance(module, PreTrainedModel)]
    if len(inner) != 1:
        raise ModelError(f"{type(causal).__name__} has no part that is a decoder. Choose a causal language model.")
    return inner[0]


def vocabulary_size(causal: PreTrainedModel) -> int:
    """Return the size of the model's vocabulary. The tokenizer's vocabulary may be smaller."""
    weight = causal.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    # Some embeddings have more rows than the vocabulary has tokens (CPM-Ant).
    named = getattr(causal.config.get_text_config(), "vocab_size", None)
    return min(weight.shape[0], named) if isinstance(named, int) else weight.shape[0]


def _cannot_build(config: PretrainedConfig, model: ModelConfig, error: Exception) -> str:
    kind = type(config).__name__
    if "Unrecognized configuration class" in str(error):
        text = config.get_text_config()
        if text is config:
            return f"model.path: {model.path} ({kind}) is not a causal language model. Choose a text model."
        return (
            f"model.path: {model.path} ({kind}) also sees or hears, and is not a causal language model. Choose a text "
            "model, or save its text part as docs/models.md shows (Models that also see or hear)."
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if model.config_overrides:
        return f"model.config_overrides: no model can be built with {model.config_overrides} ({reason})."
    return f"model.path: no model can be built from the config of {model.path} ({reason}). Correct its config.json."


def _override(config: PretrainedConfig, name: str, value: Any) -> None:
    known = {*config.to_dict(), *config.attribute_map}
    if name not in known and (not hasattr(config, name) or callable(getattr(config, name))):
        raise ModelError(
            f"model.config_overrides: '{name}' is not a field of {type(config).__name__}.{suggestion(name, known)}\n"
            f"Fields: {listing(known)}."
        )
    before = getattr(config, name, None)
    try:
        # transformers changes some values in place. The copy protects the run's config.
        setattr(config, name, deepcopy(value))
    except (StrictDataclassError, AttributeError, TypeError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[-1].strip()
        raise ModelError(
            f"model.config_overrides.{name} is {value!r}, which does not fit: {reason}. The model itself has "
            f"{before!r}."
        ) from None
