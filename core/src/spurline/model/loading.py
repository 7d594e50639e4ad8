"""Load the causal language model that a run trains, and refuse one that cannot be trained exactly.

Weights come in the profile's dtype on its device. What a model's config alone shows is refused here, also where the
probe (`probe.py`) is switched off: losses that would be left out, frequencies that would change between samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from spurline.config.run_config import ModelConfig
from spurline.data.tokenizer import describe_missing
from spurline.errors import DataError, ModelError, listing, suggestion
from spurline.model.device_profile import DeviceProfile

_LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    ImportError,
    AttributeError,
    RuntimeError,
    AssertionError,
    StrictDataclassError,
)
"""What transformers raises for folders, names and architectures it cannot use."""


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """The architecture of `model.path` with `model.config_overrides` applied. Raises ModelError."""
    try:
        config = AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except _LOADING_ERRORS as error:
        raise ModelError(describe_missing("model.path", model.path, "model", error, model.trust_remote_code)) from error
    known = config.to_dict().keys()
    for name, value in model.config_overrides.items():
        if name not in known and not hasattr(config, name):
            raise ModelError(
                f"model.config_overrides: '{name}' is not a field of {type(config).__name__}."
                f"{suggestion(name, known)}\n"
                f"Fields: {listing(known)}."
            )
        setattr(config, name, value)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.path: {model.path} is quantized, and quantized weights cannot be trained. "
            "Use the unquantized model it was made from."
        )
    return config


def load_model(model: ModelConfig, profile: DeviceProfile, seed: int) -> PreTrainedModel:
    """The model, on the device, in training mode; with `init: random` its weights depend on `seed` alone."""
    config = load_model_config(model)
    try:
        with _quiet_loading():
            # Always through fp32: fp64 runs then start from the very weights of fp32 runs.
            common: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": model.trust_remote_code}
            if model.init == "random":
                torch.manual_seed(seed)
                causal = AutoModelForCausalLM.from_config(config, **common)
            else:
                common |= {"config": config, "revision": model.revision}
                causal = AutoModelForCausalLM.from_pretrained(model.path, **common)
    except _LOADING_ERRORS as error:
        raise ModelError(_loading_failed(model, config, error)) from error
    if profile.weight_dtype == torch.float64 and hasattr(causal, "set_experts_implementation"):
        # The grouped matrix product of experts has no float64 kernel.
        causal.set_experts_implementation("eager")
    nn.Module.to(causal, device=profile.device, dtype=profile.weight_dtype)
    return causal.train()


def _loading_failed(model: ModelConfig, config: PretrainedConfig, error: Exception) -> str:
    text = str(error)
    if "Unrecognized configuration class" in text:
        return (
            f"model.path: {model.path} ({type(config).__name__}) is not a causal language model. "
            "Choose a decoder-only text model."
        )
    message = describe_missing("model.path", model.path, "weights", error, model.trust_remote_code)
    if model.init == "pretrained":
        message += "\nTo train this architecture from scratch set model.init: random."
    if model.config_overrides:
        message += f"\nmodel.config_overrides changes {listing(model.config_overrides)}; does it fit the weights?"
    return message


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without the progress bars of transformers, which would write into the terminal tracker's output."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class LengthLimit:
    """Up to `tokens` per sample, rotary frequencies of this type are those of each sample alone."""

    tokens: int
    rope_type: str

    def check(self, longest: int) -> None:
        """Raise DataError for a batch whose longest sample would change the frequencies of the others."""
        if longest > self.tokens:
            raise DataError(
                f"A sample has {longest} tokens, but rotary frequencies of type '{self.rope_type}' switch beyond "
                f"{self.tokens} for all samples of a micro-batch. Shorten it to {self.tokens} tokens."
            )


def check_config(causal: PreTrainedModel, path: str, max_length: int) -> LengthLimit | None:
    """Raise ModelError for what cannot be trained exactly; the limit that batches must keep, when there is one.

    max_length: tokens of the longest sample that the run's data may have.
    """
    name = f"model.path: {path} ({type(causal).__name__})"
    for config in (causal.config, causal.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{name} sets output_router_logits, which asks for an auxiliary loss on its router; losses here see "
                "log-probabilities only and would leave it out. To train without it set "
                "model.config_overrides: {output_router_logits: false}."
            )
    limit = min(_switching_rope(causal.config.get_text_config()), key=lambda limit: limit.tokens, default=None)
    if limit is not None and max_length > limit.tokens:
        raise ModelError(
            f"{name} has rotary frequencies of type '{limit.rope_type}', which switch for all samples of a micro-batch "
            f"when the longest has more than {limit.tokens} tokens, and data.max_length allows {max_length}. "
            f"Set data.max_length: {limit.tokens} or less."
        )
    return limit


def _switching_rope(config: PretrainedConfig) -> Iterator[LengthLimit]:
    """Rotary settings under which transformers chooses frequencies by the largest position it sees."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, Mapping):
        return
    # The settings of the whole model, or one per layer type.
    for settings in [value for value in found.values() if isinstance(value, Mapping)] or [found]:
        rope_type = str(settings.get("rope_type") or settings.get("type"))
        longest = getattr(config, "max_position_embeddings", None)
        if rope_type == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            longest = settings.get("original_max_position_embeddings") or own or longest
        elif "dynamic" not in rope_type:
            continue
        # Without a known limit every length may switch.
        yield LengthLimit(int(longest or 0), rope_type)
