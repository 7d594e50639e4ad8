"""Estimate the memory of an update of the backend `local`, for `spurline plan`."""

from __future__ import annotations

import math

from spurline.config.run_config import RunConfig
from spurline.protocols.optimizer import num_values
from spurline_models.backend_config import MemoryEstimate
from spurline_models.exact_sums import SUM_BYTES
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.memory import COMPUTED_BYTES, Shapes, frozen_shapes, model_shapes
from spurline_models.optimizers.groups import check_groups
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.placement.quantized_weights import quantized_bytes

_WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}
"""Bytes of a weight in full precision. With bf16, only the computation is in half precision."""

_HALF_BYTES = 2


def estimate_memory(config: LocalBackendConfig, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
    """Estimate the memory of an update of `tokens` tokens that all have loss."""
    shapes = model_shapes(run.model, config.lora)
    check_groups(run.optimizer, shapes.trained)
    wide, computed = _WEIGHT_BYTES[config.computes_in], COMPUTED_BYTES[config.computes_in]
    microbatch = config.microbatch_tokens(row_length, tokens)
    held = {name: shape for name, shape in shapes.trained.items() if name in shapes.narrowable}
    narrow = num_values(held) if config.narrow_weights else 0
    trained = num_values(shapes.trained)
    weights, rounded = _held_weights(config, run, shapes)
    optimizers = [run.optimizer, *([] if run.trained_critic is None else [run.trained_critic.optimizer])]
    states = [one.state_bytes(shapes.trained, wide) for one in optimizers]
    # An optimizer on the host steps on copies of all trained weights.
    masters = (trained if config.offload_optimizer else narrow) * wide
    # The copies from which an asynchronous checkpoint is written.
    copy = sum(trained * wide + state for state in states) if run.checkpoint.is_async else 0
    host = 0
    if config.on == "cuda":
        host, copy = copy, 0
        if config.offload_optimizer:
            host += sum(masters + state for state in states)
            masters, states = 0, [0 for _ in states]
    kept = {"weights": weights, "optimizer": states[0]}
    if masters:
        kept["masters"] = masters
    for role, frozen in frozen_shapes(run, config.lora).items():
        narrow_frozen = config.narrow_weights or (role in run.model.frozen and config.computes_in == "bf16")
        kept[role] = sum(
            math.prod(shape) * (_HALF_BYTES if narrow_frozen and name in frozen.narrowable else wide)
            for name, shape in {**frozen.trained, **frozen.frozen}.items()
        )
    if run.trained_critic is not None:
        # The critic is as large as the policy. Its gradients are freed before the policy has any.
        kept["critic"] = weights + masters + states[1]
    if copy:
        kept["checkpoint copy"] = copy

    several = microbatch < tokens
    # Sums of gradients over several micro-batches are in full precision.
    gradients = (trained - narrow) * wide + narrow * (wide if several else _HALF_BYTES)
    if config.is_reproducible:
        gradients = SUM_BYTES * trained
    # On a CPU there is only host memory.
    offloading = config.offload_activations and config.on == "cuda"
    on_device, on_host = shapes.activation_bytes(
        microbatch, computed, wide, share=config.activation_checkpointing, offloading=offloading
    )
    host += on_host
    # Without Triton kernels, the backward pass needs the log-softmax and two gradients, all in full precision.
    logit = computed if config.fuses_logprobs else 3 * wide
    forward = {"activations": on_device, "logits": min(microbatch, config.chunk_tokens) * shapes.vocabulary * logit}
    if rounded:
        forward["rounded weights"] = rounded
    # With a single micro-batch, activations are freed while gradients are made.
    moments = ({"gradients": gradients, **forward},) if several else (forward, {"gradients": gradients})
    return MemoryEstimate(kept, moments, host)


def _held_weights(config: LocalBackendConfig, run: RunConfig, shapes: Shapes) -> tuple[int, int]:
    """Return the bytes of all weights, and of their copies in the dtype of computation."""
    wide, computed = _WEIGHT_BYTES[config.computes_in], COMPUTED_BYTES[config.computes_in]
    narrow_bytes = _HALF_BYTES if config.narrow_weights else wide
    if config.lora is not None:
        narrow_bytes = min(wide, base_dtype(config.lora, run.model).itemsize)
    held = rounded = largest = 0
    for name, shape in {**shapes.frozen, **shapes.trained}.items():
        values, is_frozen = math.prod(shape), name in shapes.frozen
        if is_frozen and config.lora is not None and config.lora.is_quantized and name in shapes.quantizable:
            held += quantized_bytes(values)
            largest = max(largest, values)
            continue
        is_narrow = name in shapes.narrowable and (is_frozen or config.narrow_weights)
        size = narrow_bytes if is_narrow else wide
        held += values * size
        if size > computed:
            rounded += values
        elif size < computed:
            largest = max(largest, values)
    # Autocast keeps the rounded weights of all layers for the backward pass, or, with LoRA, those of one checkpointed
    # layer at a time.
    if config.lora is not None:
        rounded = rounded * shapes.num_whole(config.activation_checkpointing) // max(1, len(shapes.blocks))
    # Matrices in a narrower dtype than the computation are converted one at a time.
    return held, (rounded + largest) * computed
