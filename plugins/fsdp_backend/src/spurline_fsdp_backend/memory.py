"""Estimate what the fullest rank holds, from the shapes of the model alone, for `spurline plan`.

Weights, gradients and optimizer are exact sums of what a rank has of each tensor. Gathered weights and gradients on
their way follow how FSDP2 groups a model: each layer of the decoder is one group, and all else, embedding and output
layer among it, is another that stays gathered from the forward to the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spurline.config.run_config import RunConfig
from spurline.protocols.optimizer import num_values
from spurline_models.memory import Shapes, model_shapes, token_activations
from spurline_models.optimizers.groups import check_groups
from spurline_models.placement.narrow_weights import base_dtype
from spurline_ranks.layout import ranks_of_machine

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig

_WEIGHT_BYTES = 4
"""Of a trained weight and of its gradient, in every precision."""

_COMPUTED_BYTES = {"fp32": 4, "bf16": 2}

Parts = Mapping[str, tuple[int, ...]]


def estimate_memory(config: FsdpBackendConfig, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
    """Bytes on the fullest rank by part, at the peak of an update of so many tokens. Raises ModelError, ConfigError.

    What `cpu_offload` keeps in the memory of the host is not among them.
    """
    shapes = model_shapes(run.model, config.lora)
    check_groups(run.optimizer, shapes.trained)
    computed = _COMPUTED_BYTES[config.computes_in]
    tokens = tokens_of_microbatch(config, row_length, tokens)
    parts = {} if config.cpu_offload else _kept(config, run, shapes)
    parts["gathered weights"] = computed * gathered_values(config, shapes)
    # The gradients of the group that is done are summed over the ranks in fp32 while they are there as computed.
    groups = _groups(shapes, _gathered(config, shapes.trained))
    parts["gradients on their way"] = (computed + 4) * max(map(num_values, groups))
    kept = token_activations(run.model, config.lora, config.computes_in, autocast=False)
    per_token = kept.kept(checkpointing=config.activation_checkpointing, offloading=_offloads(config))
    parts["activations"] = tokens * (per_token + (kept.recomputed if config.activation_checkpointing else 0))
    # At the peak, in backward: log-softmax and its gradient in fp32, then the gradient of the logits as computed.
    parts["logits"] = min(tokens, config.logits_chunk_tokens) * shapes.vocabulary * (8 + computed)
    return parts


def estimate_host_memory(config: FsdpBackendConfig, run: RunConfig) -> int:
    """Bytes that the ranks of one machine keep in its memory for `cpu_offload`; 0 where machines are not known."""
    local = ranks_of_machine(config)
    if not config.cpu_offload or local is None:
        return 0
    return local * sum(_kept(config, run, model_shapes(run.model, config.lora)).values())


def estimate_offloaded_activations(config: FsdpBackendConfig, run: RunConfig, row_length: int, tokens: int) -> int:
    """Bytes of activations that the ranks of one machine keep in its memory; 0 where machines are not known."""
    local = ranks_of_machine(config)
    if not _offloads(config) or local is None:
        return 0
    kept = token_activations(run.model, config.lora, config.computes_in, autocast=False)
    per_token = kept.offloaded(checkpointing=config.activation_checkpointing)
    return local * tokens_of_microbatch(config, row_length, tokens) * per_token


def _offloads(config: FsdpBackendConfig) -> bool:
    return config.offload_activations and config.on == "cuda"


def estimate_generation(config: FsdpBackendConfig, run: RunConfig) -> dict[str, int]:
    """Bytes by part while answers to held-out prompts are written: each rank has all weights, as it computes."""
    if not run.asks_for_answers:
        return {}
    shapes = model_shapes(run.model, config.lora)
    return {"all weights": shapes.parameters * _COMPUTED_BYTES[config.computes_in]}


def _kept(config: FsdpBackendConfig, run: RunConfig, shapes: Shapes) -> dict[str, int]:
    """Bytes of a rank that stay from step to step, and its gradients."""
    trained, frozen = _local(config, shapes.trained), _local(config, shapes.frozen)
    parts = {
        "weights": _WEIGHT_BYTES * num_values(trained) + frozen_bytes(config, run) * num_values(frozen),
        "gradients": _WEIGHT_BYTES * num_values(trained),
        "optimizer": run.optimizer.state_bytes(trained, _WEIGHT_BYTES),
    }
    if run.trained_critic is not None:
        # As large as the policy but for its output layer, and its gradients are dropped before the policy has any.
        parts["critic"] = parts["weights"] + run.trained_critic.optimizer.state_bytes(trained, _WEIGHT_BYTES)
    if (run.loss.uses_reference or run.source.facts.uses_reference) and config.lora is None:
        parts["reference"] = _COMPUTED_BYTES[config.computes_in] * (num_values(trained) + num_values(frozen))
    return parts


def tokens_of_microbatch(config: FsdpBackendConfig, row_length: int, tokens: int) -> int:
    """Tokens that a rank computes at once of a step of so many, in rows of this length."""
    share = math.ceil(tokens / config.layout().data)
    if config.max_tokens_per_microbatch is not None:
        share = min(share, config.max_tokens_per_microbatch)
    # Rows are dealt whole, and context parallelism divides them afterwards.
    return math.ceil(max(share, min(row_length, tokens)) / config.context)


def frozen_bytes(config: FsdpBackendConfig, run: RunConfig) -> int:
    """Bytes of a frozen weight: under adapters those of `base_dtype`."""
    return _WEIGHT_BYTES if config.lora is None else base_dtype(config.lora, run.model).itemsize


def gathered_values(config: FsdpBackendConfig, shapes: Shapes) -> int:
    """Weights that are whole on a rank at once: the root's, and those of two layers, as one is fetched ahead."""
    everything = _gathered(config, {**shapes.frozen, **shapes.trained})
    root, *layers = map(num_values, _groups(shapes, everything))
    if not config.reshard_after_forward:
        return root + sum(layers)
    return root + sum(sorted(layers)[-2:])


def sent_bytes(config: FsdpBackendConfig, run: RunConfig) -> int:
    """Bytes of weights and gradients that a rank sends for one micro-batch; tokens that travel are not counted.

    Weights are gathered as they are computed with, those of layers again for the backward pass, and the gradients of
    all are summed in fp32, within a copy of the model and then over the copies.
    """
    shapes = model_shapes(run.model, config.lora)
    computed, times = _COMPUTED_BYTES[config.computes_in], 2 if config.reshard_after_forward else 1
    root, *layers = _groups(shapes, {**shapes.frozen, **shapes.trained})
    sent = computed * _passed_on(config, root)
    sent += sum(times * computed * _passed_on(config, layer) for layer in layers)
    sent += 4 * _passed_on(config, shapes.trained)
    copies = config.replicas
    return int(sent + 2 * (copies - 1) / copies * 4 * num_values(_local(config, shapes.trained)))


def _passed_on(config: FsdpBackendConfig, parts: Parts) -> float:
    """Values that a rank sends so that all who share these tensors have them whole."""
    ranks = config.num_ranks // config.replicas
    experts = ranks // config.expert
    total = 0.0
    for shape in _gathered(config, parts).values():
        sharing = experts if _holds_experts(shape) else ranks
        total += (sharing - 1) / sharing * math.prod(shape)
    return total


def _groups(shapes: Shapes, parts: Parts) -> list[Parts]:
    """Parameters that are gathered together: the root's, then those of each layer."""
    layers: list[dict[str, tuple[int, ...]]] = [{} for _ in shapes.blocks]
    root: dict[str, tuple[int, ...]] = {}
    numbers = {f"{name}.": number for number, name in enumerate(shapes.blocks)}
    for name, shape in parts.items():
        number = next((number for block, number in numbers.items() if name.startswith(block)), None)
        (root if number is None else layers[number])[name] = shape
    return [root, *layers]


def _local(config: FsdpBackendConfig, parts: Parts) -> Parts:
    """What the fullest rank has of each tensor: an even share of its first dimension, rounded up.

    Divided experts are shared by those ranks alone that have the same ones.
    """
    ranks = config.num_ranks // config.replicas
    return {
        name: _first_by(shape, ranks // config.expert if _holds_experts(shape) else ranks)
        for name, shape in _gathered(config, parts).items()
    }


def _gathered(config: FsdpBackendConfig, parts: Parts) -> Parts:
    """What a rank sees of each tensor when it is gathered: everything but the experts of other ranks."""
    return {name: _first_by(shape, config.expert) if _holds_experts(shape) else shape for name, shape in parts.items()}


def _holds_experts(shape: Sequence[int]) -> bool:
    """Experts of a layer are stored as one tensor, its first dimension theirs; nothing else has three."""
    return len(shape) == 3


def _first_by(shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / number), *shape[1:]) if shape else ()
