"""Estimate what the fullest rank holds from the shapes of the model, for `spurline plan`.

Weights, gradients and optimizer are exact sums over a rank's parts of tensors. FSDP2 gathers weights and reduces
gradients by groups: each decoder layer is one, and the rest is another, which stays gathered until the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spurline.config.run_config import RunConfig
from spurline.protocols.optimizer import num_values
from spurline_models.backend_config import MemoryEstimate
from spurline_models.memory import COMPUTED_BYTES, ShapeByName, Shapes, model_shapes
from spurline_models.optimizers.groups import check_groups
from spurline_models.placement.narrow_weights import base_dtype
from spurline_ranks.layout import ranks_of_machine

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig

_WEIGHT_BYTES = 4
"""Bytes of a trained weight and of its gradient, in every precision."""


def estimate_memory(config: FsdpBackendConfig, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
    """Estimate a step of so many tokens on the fullest rank. Raises ModelError, ConfigError.

    With `cpu_offload`, weights, gradients and optimizer count for the host, if the ranks of a machine are known.
    """
    shapes = model_shapes(run.model, config.lora)
    check_groups(run.optimizer, shapes.trained)
    computed = COMPUTED_BYTES[config.computes_in]
    microbatch = _tokens_of_microbatch(config, row_length, tokens)
    on_device, on_host = shapes.activation_bytes(
        computed,
        computed,
        checkpointing=config.activation_checkpointing,
        offloading=config.offload_activations and config.on == "cuda",
    )
    groups = _groups(shapes, _gathered(config, shapes.trained))
    update = {
        "gathered weights": computed * _gathered_values(config, shapes),
        # The gradients of a finished group exist as computed and in fp32, to be summed over the ranks.
        "gradients on their way": (computed + 4) * max(map(num_values, groups)),
        "activations": microbatch * on_device,
        # The peak is in backward: log-softmax and its gradient in fp32, then the gradient of the logits as computed.
        "logits": min(microbatch, config.logits_chunk_tokens) * shapes.vocabulary * (8 + computed),
    }
    kept, gradients = _kept(config, run, shapes)
    moments = [{"gradients": gradients, **update}]
    host = microbatch * on_host
    if config.cpu_offload:
        host += sum(kept.values()) + gradients
        kept, moments = {}, [update]
    if run.asks_for_answers:
        # Each rank has all weights while it generates answers to held-out prompts.
        moments.append({"all weights, while generating": shapes.parameters * computed})
    return MemoryEstimate(kept, tuple(moments), host * (ranks_of_machine(config) or 0))


def _kept(config: FsdpBackendConfig, run: RunConfig, shapes: Shapes) -> tuple[dict[str, int], int]:
    """Return the bytes that a rank keeps from step to step, by part, and the bytes of its gradients."""
    trained, frozen = _local(config, shapes.trained), _local(config, shapes.frozen)
    frozen_bytes = _WEIGHT_BYTES if config.lora is None else base_dtype(config.lora, run.model).itemsize
    weights = _WEIGHT_BYTES * num_values(trained) + frozen_bytes * num_values(frozen)
    parts = {"weights": weights, "optimizer": run.optimizer.state_bytes(trained, _WEIGHT_BYTES)}
    if run.trained_critic is not None:
        # The critic is nearly as large as the policy. Its gradients are dropped before the policy has any.
        parts["critic"] = weights + run.trained_critic.optimizer.state_bytes(trained, _WEIGHT_BYTES)
    if (run.loss.uses_reference or run.source.facts.uses_reference) and config.lora is None:
        parts["reference"] = COMPUTED_BYTES[config.computes_in] * (num_values(trained) + num_values(frozen))
    return parts, _WEIGHT_BYTES * num_values(trained)


def _tokens_of_microbatch(config: FsdpBackendConfig, row_length: int, tokens: int) -> int:
    share = math.ceil(tokens / config.layout().data)
    share = min(share, config.max_tokens_per_microbatch or share)
    # Rows are dealt whole, and context parallelism divides them afterwards.
    return math.ceil(max(share, min(row_length, tokens)) / config.context)


def _gathered_values(config: FsdpBackendConfig, shapes: Shapes) -> int:
    """Count the gathered weights of a rank at its peak: the rest's and two layers', as one is fetched ahead."""
    everything = _gathered(config, {**shapes.frozen, **shapes.trained})
    root, *layers = map(num_values, _groups(shapes, everything))
    return root + sum(sorted(layers)[-2:] if config.reshard_after_forward else layers)


def _groups(shapes: Shapes, parts: ShapeByName) -> list[ShapeByName]:
    """Return the parameters that are gathered together: first all outside of layers, then those of each layer."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {f"{name}.": {} for name in shapes.blocks}
    root: dict[str, tuple[int, ...]] = {}
    for name, shape in parts.items():
        layer = next((block for block in layers if name.startswith(block)), None)
        (root if layer is None else layers[layer])[name] = shape
    return [root, *layers.values()]


def _local(config: FsdpBackendConfig, parts: ShapeByName) -> ShapeByName:
    """Return the fullest rank's part of each tensor: an even share of the first dimension, rounded up.

    Experts are shared by ranks that hold the same experts.
    """
    ranks = config.num_ranks // config.replicas
    return {
        name: _first_by(shape, ranks // config.expert if _holds_experts(shape) else ranks)
        for name, shape in _gathered(config, parts).items()
    }


def _gathered(config: FsdpBackendConfig, parts: ShapeByName) -> ShapeByName:
    """Return the shape of each gathered tensor on a rank: whole, without the experts of other ranks."""
    return {name: _first_by(shape, config.expert) if _holds_experts(shape) else shape for name, shape in parts.items()}


def _holds_experts(shape: Sequence[int]) -> bool:
    # A layer's experts are one tensor with a dimension of experts. No other tensor has three dimensions.
    return len(shape) == 3


def _first_by(shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / number), *shape[1:]) if shape else ()
