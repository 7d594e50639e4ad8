"""Estimate the device memory of a run without loading a weight, for `spurline plan`.

Place on the way: config -> meta-device model -> bytes by part. Weights, gradients and optimizer are exact sums of
shapes; activations are a rule of thumb over the shapes of the linear layers.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spurline.backends.local.configs import LocalBackendConfig
from spurline.config.run_config import RunConfig
from spurline.model.loading import load_model_config
from spurline.model.stream_model import vocabulary_size

_ELEMENTWISE_TENSORS_PER_LAYER = 8
"""Hidden-sized tensors a layer keeps for backward besides the inputs of its matrices: norms, residuals, rotary."""


def estimate_memory(run: RunConfig, config: LocalBackendConfig, tokens_per_microbatch: int) -> dict[str, int]:
    """Bytes of `weights`, `gradients`, `optimizer`, `activations` and `logits`. Raises ModelError.

    `critic`, if there is one: its weights and optimizer; all else of it is never there together with the policy's.
    tokens_per_microbatch: non-padding tokens of one micro-batch, all of which are taken to carry loss.
    """
    model_config = load_model_config(run.model)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(model_config, trust_remote_code=run.model.trust_remote_code)
    weight_bytes = 8 if config.precision == "fp64" else 4
    activation_bytes = {"fp64": 8, "fp32": 4, "bf16": 2}[config.precision]
    all_parameters = sum(parameter.numel() for parameter in causal.parameters())
    adapters = 0 if config.lora is None else _adapter_parameters(causal, config)
    trained = adapters or all_parameters
    parts = {
        "weights": (all_parameters + adapters) * weight_bytes,
        "gradients": trained * weight_bytes,
        "optimizer": 2 * trained * weight_bytes,
        "activations": tokens_per_microbatch * _activation_elements_per_token(causal, config) * activation_bytes,
        "logits": _logit_bytes(causal, config, tokens_per_microbatch, weight_bytes, activation_bytes),
    }
    if run.critic is not None:
        # As large as the policy but for its output layer, and its gradients are dropped before the policy has any.
        parts["critic"] = parts["weights"] + parts["optimizer"]
    return parts


def _activation_elements_per_token(causal: PreTrainedModel, config: LocalBackendConfig) -> int:
    text = causal.config.get_text_config()
    layers, hidden = text.num_hidden_layers, text.hidden_size
    matrices = sum(module.in_features + module.out_features for _, module in _linear_layers(causal))
    everything = matrices + layers * hidden * _ELEMENTWISE_TENSORS_PER_LAYER
    if not config.activation_checkpointing:
        return everything
    # Each layer keeps its input only; one layer at a time is recomputed in full.
    return layers * hidden + everything // layers


def _logit_bytes(
    causal: PreTrainedModel, config: LocalBackendConfig, tokens: int, softmax_bytes: int, activation_bytes: int
) -> int:
    vocabulary = vocabulary_size(causal)
    # At the peak, in backward: log-softmax and its gradient, then the gradient of the logits in compute precision.
    return min(tokens, config.logits_chunk_tokens) * vocabulary * (2 * softmax_bytes + activation_bytes)


def _adapter_parameters(causal: PreTrainedModel, config: LocalBackendConfig) -> int:
    assert config.lora is not None
    targets = config.lora.target_modules
    return sum(
        config.lora.rank * (module.in_features + module.out_features)
        for name, module in _linear_layers(causal)
        if targets == "all-linear" or any(name == target or name.endswith(f".{target}") for target in targets)
    )


def _linear_layers(causal: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """All but the output layer, whose cost is that of the logits."""
    head = causal.get_output_embeddings()
    return [
        (name, module)
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
