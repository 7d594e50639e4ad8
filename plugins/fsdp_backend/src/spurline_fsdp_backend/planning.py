"""Plan how ranks divide the model: describe the division, refuse models that do not fit it, and estimate memory.

Plans need the config and the shapes of the model, but no weights. The estimate is for the rank that needs most memory.
The bytes of weights, gradients and optimizer are exact sums over the parts of tensors on this rank. FSDP2 gathers
weights and sums gradients group by group. Each decoder layer is a group. All other parameters are one more group, which
stays gathered until the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, Problem
from spurline.protocols.optimizer import num_values
from spurline_models.architecture import load_model_config, model_of, num_experts
from spurline_models.backend_config import MemoryEstimate
from spurline_models.exact_sums import SUM_BYTES
from spurline_models.memory import COMPUTED_BYTES, ShapeByName, Shapes, frozen_shapes, model_shapes, pinned_bytes
from spurline_models.optimizers.groups import check_groups
from spurline_models.placement.narrow_weights import base_dtype
from spurline_ranks.layout import counted, describe_ranks, divisors, more_ranks, ranks_of_machine, smaller_microbatches

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig

_WEIGHT_BYTES = 4
"""Bytes of a trained weight, and of its gradient, in every precision."""


def describe_layout(config: FsdpBackendConfig, run: RunConfig) -> Iterator[str]:
    """Yield sentences about ranks, machines and groups."""
    ranks, local = config.num_ranks, ranks_of_machine(config)
    sharing = f" x {config.context} context" if config.context > 1 else ""
    yield from describe_ranks(config, f"{config.layout().data} data{sharing}")
    shards = ranks // config.replicas
    if config.replicas > 1:
        yield (
            f"{config.replicas} copies of the model, each divided among {shards} ranks; gradients are summed over the "
            "copies"
        )
    else:
        yield f"weights, gradients and optimizer are divided among {counted(shards, 'rank')}"
    if config.context > 1:
        yield f"{config.context} neighbouring ranks share each sequence"
        if local is not None and local % config.context:
            yield f"groups of context span several machines, which is slow: a machine has {local} ranks"
    if config.expert > 1:
        yield f"{config.expert} neighbouring ranks divide the experts of each layer"
    if config.cpu_offload:
        yield "weights, gradients and optimizer stay in the memory of the host"


def check_model(config: FsdpBackendConfig, run: RunConfig) -> None:
    """Raise ConfigError if the ranks cannot divide the model, or ModelError if the model's config cannot be read."""
    problems: list[Problem] = []
    for role in ("policy", *run.model.frozen):
        model, of_model = load_model_config(model_of(run.model, role)).get_text_config(), ""
        divided = {"context": (_heads(model), "attention heads"), "expert": (num_experts(model), "experts")}
        if role != "policy":
            of_model = f" of model.frozen.{role}"
            if divided["expert"][0] is None:
                # A frozen model without experts is sharded like any other.
                divided.pop("expert")
        for key, (count, what) in divided.items():
            size = getattr(config, key)
            if size > 1 and count is None:
                problems.append(Problem(f"backend.{key}", f"is {size}, and the model has no {what}. Set {key} to 1."))
            elif count is not None and count % size:
                fitting = ", ".join(str(fits) for fits in divisors(count) if config.num_ranks % fits == 0)
                said = f"is {size}, which does not divide the {count} {what}{of_model}. Choose one of {fitting}."
                problems.append(Problem(f"backend.{key}", said))
    if problems:
        raise ConfigError(problems)


def _heads(model: Any) -> int | None:
    heads = getattr(model, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def savings(config: FsdpBackendConfig, run: RunConfig, row_length: int, tokens: int) -> Iterator[Mapping[str, Any]]:
    """Yield changes of settings that save memory. Changes that cost least time come first."""
    if config.activation_checkpointing is not True:
        yield {"activation_checkpointing": True}
    if not (config.offload_activations or config.compile) and config.on == "cuda":
        yield {"offload_activations": True}
    if config.lora is not None and config.lora.base_dtype != "bf16":
        yield {"lora.base_dtype": "bf16"}
    yield from smaller_microbatches(config, row_length, tokens)
    heads, local = _heads(load_model_config(run.model).get_text_config()) or 1, ranks_of_machine(config)
    for context in divisors(heads):
        if context > config.context and local is not None and local % context == 0:
            yield {"context": context}
    if config.replicas > 1:
        yield {"replicas": 1}
    if not config.cpu_offload and config.on == "cuda":
        yield {"cpu_offload": True}
    yield from more_ranks(config)


def estimate_memory(config: FsdpBackendConfig, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
    """Estimate the memory of the fullest rank in a step of `tokens` tokens. Raises ModelError or ConfigError.

    With `cpu_offload` the host holds weights, gradients and optimizer state. If the number of ranks on a machine is not
    known, the estimate of host memory is 0.
    """
    shapes = model_shapes(run.model, config.lora)
    check_groups(run.optimizer, shapes.trained)
    computed = COMPUTED_BYTES[config.computes_in]
    microbatch = _tokens_of_microbatch(config, row_length, tokens)
    on_device, on_host = shapes.activation_bytes(
        microbatch,
        computed,
        computed,
        share=config.activation_checkpointing,
        offloading=config.offload_activations and config.on == "cuda",
    )
    groups = _groups(shapes, _gathered(config, shapes.trained))
    # Without Triton kernels, the backward pass has log-softmax and its gradient in fp32, and the logits' gradient.
    logit = computed if config.fuses_logprobs else 8 + computed
    update = {
        "gathered weights": computed * _gathered_values(config, shapes),
        # The gradients of a group exist twice while ranks sum them: in the computed dtype and in fp32. Exact sums also
        # need what other ranks sent.
        "gradients being summed": (computed + (8 if config.is_reproducible else 4)) * max(map(num_values, groups)),
        "activations": on_device,
        "logits": min(microbatch, config.chunk_tokens) * shapes.vocabulary * logit,
    }
    if config.is_reproducible:
        update["exact sums"] = SUM_BYTES * num_values(_local(config, shapes.trained))
    kept, gradients = _kept(config, run, shapes)
    moments = [{"gradients": gradients, **update}]
    host = on_host
    if config.cpu_offload:
        host += sum(kept.values()) + gradients
        kept, moments = {}, [update]
    if run.asks_for_answers:
        # Each rank has all weights while it generates answers to held-out prompts.
        moments.append({"all weights, while generating": shapes.parameters * computed})
    return MemoryEstimate(kept, tuple(moments), host * (ranks_of_machine(config) or 0))


def _kept(config: FsdpBackendConfig, run: RunConfig, shapes: Shapes) -> tuple[dict[str, int], int]:
    """Return the bytes that a rank keeps between steps, for each part, and the bytes of its gradients."""
    trained, frozen = _local(config, shapes.trained), _local(config, shapes.frozen)
    frozen_bytes = _WEIGHT_BYTES if config.lora is None else base_dtype(config.lora, run.model).itemsize
    weights = _stored(config, trained, _WEIGHT_BYTES) + _stored(config, frozen, frozen_bytes)
    parts = {"weights": weights, "optimizer": run.optimizer.state_bytes(trained, _WEIGHT_BYTES)}
    if run.trained_critic is not None:
        # The critic is nearly as large as the policy. Its gradients are freed before the policy has gradients.
        parts["critic"] = weights + run.trained_critic.optimizer.state_bytes(trained, _WEIGHT_BYTES)
    for role, untrained in frozen_shapes(run, config.lora).items():
        whole = {**untrained.trained, **untrained.frozen}
        parts[role] = _stored(config, _local(config, whole), COMPUTED_BYTES[config.computes_in])
    return parts, _stored(config, trained, _WEIGHT_BYTES)


def _stored(config: FsdpBackendConfig, parts: ShapeByName, itemsize: int) -> int:
    """Return the bytes of these tensors. In the memory of a host with GPUs they are pinned."""
    sizes = (math.prod(shape) * itemsize for shape in parts.values())
    return sum(map(pinned_bytes, sizes) if config.cpu_offload and config.on == "cuda" else sizes)


def _tokens_of_microbatch(config: FsdpBackendConfig, row_length: int, tokens: int) -> int:
    share = math.ceil(tokens / config.layout().data)
    share = 1 if config.is_reproducible else min(share, config.max_tokens_per_microbatch or share)
    # A micro-batch has at least one whole row, which the ranks of `context` divide.
    return math.ceil(max(share, min(row_length, tokens)) / config.context)


def _gathered_values(config: FsdpBackendConfig, shapes: Shapes) -> int:
    """Count the weights that a rank has gathered at its peak: the parameters outside of layers, and two whole layers.

    FSDP2 gathers the second layer in advance. Without `reshard_after_forward`, all layers stay gathered.
    """
    everything = _gathered(config, {**shapes.frozen, **shapes.trained})
    root, *layers = map(num_values, _groups(shapes, everything))
    return root + sum(sorted(layers)[-2:] if config.reshard_after_forward else layers)


def _groups(shapes: Shapes, parts: ShapeByName) -> list[ShapeByName]:
    """Return the groups of parameters that are gathered together: one outside of layers, then one for each layer."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {f"{name}.": {} for name in shapes.blocks}
    root: dict[str, tuple[int, ...]] = {}
    for name, shape in parts.items():
        layer = next((block for block in layers if name.startswith(block)), None)
        (root if layer is None else layers[layer])[name] = shape
    return [root, *layers.values()]


def _local(config: FsdpBackendConfig, parts: ShapeByName) -> ShapeByName:
    """Return the shape of each tensor's largest part on a rank: a share of the first dimension, rounded up."""
    ranks = config.num_ranks // config.replicas
    return {
        name: _first_by(shape, ranks // config.expert if _holds_experts(shape) else ranks)
        for name, shape in _gathered(config, parts).items()
    }


def _gathered(config: FsdpBackendConfig, parts: ShapeByName) -> ShapeByName:
    """Return the shape of each gathered tensor. A tensor of experts has only the experts of the rank."""
    return {name: _first_by(shape, config.expert) if _holds_experts(shape) else shape for name, shape in parts.items()}


def _holds_experts(shape: Sequence[int]) -> bool:
    # The experts of a layer are one tensor with three dimensions. No other tensor has three.
    return len(shape) == 3


def _first_by(shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / number), *shape[1:]) if shape else ()
