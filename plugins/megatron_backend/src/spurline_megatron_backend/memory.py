"""Estimate what the fullest rank holds, for `spurline plan`.

Weights, gradients and optimizer are exact sums over the table of parts. Activations are a rule of thumb: the tensors
that a layer keeps for the backward pass, counted as Korthikanti et al. 2022 (arXiv:2205.05198) do, for gated SiLU,
shared keys and attention that materializes no scores; times the micro-batches that a stage has begun and not finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spurline.config.run_config import RunConfig
from spurline.protocols.optimizer import OptimizerConfig
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.parts import padded_vocabulary
from spurline_megatron_backend.workload import Layout, Stages, Step, Values
from spurline_models.architecture import load_model_config
from spurline_models.backend_config import MemoryEstimate
from spurline_models.memory import COMPUTED_BYTES
from spurline_ranks.layout import ranks_of_machine

if TYPE_CHECKING:
    from spurline_megatron_backend.configs import MegatronBackendConfig

MAIN_BYTES = 4
"""Bytes of the copy of a weight that the optimizer changes, and of a summed gradient."""


@dataclass(frozen=True)
class Kept:
    """The settings of what is in memory beside one trained model.

    Attributes:
        computed_bytes: Bytes of a weight and of what is computed with it.
        logits_chunk_tokens: Positions whose logits exist at the same time.
        optimizer: Settings of the policy's optimizer.
        critic: Settings of the critic's optimizer, if there is one.
        reference: Where the reference's weights lie, if there is one: `device` or `host`.
        replays_experts: Whether batches say which experts compute a token.
    """

    computed_bytes: int
    logits_chunk_tokens: int
    optimizer: OptimizerConfig
    critic: OptimizerConfig | None = None
    reference: str | None = None
    replays_experts: bool = False


def estimate_memory(config: MegatronBackendConfig, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
    """Estimate a step of so many tokens on the fullest rank. Raises ModelError, ConfigError."""
    architecture = read_architecture(load_model_config(run.model))
    kept, local = kept_of(config, run), ranks_of_machine(config)
    found = estimate_fullest(architecture, layout_of(config), Step(row_length, tokens), kept)
    if kept.reference != "host" or local is None:
        return found
    stages = Stages(architecture, config.grid)
    weights = kept.computed_bytes * max(stages.values(stage).all for stage in range(config.grid.pipeline))
    return replace(found, host=local * weights)


def layout_of(config: MegatronBackendConfig) -> Layout:
    """Return the layout that the settings ask for."""
    return Layout(config.grid, config.max_tokens_per_microbatch, config.recompute, config.divides_tokens)


def kept_of(config: MegatronBackendConfig, run: RunConfig) -> Kept:
    """Return what the run keeps beside the policy."""
    has_reference = run.loss.uses_reference or run.source.facts.uses_reference
    return Kept(
        COMPUTED_BYTES[config.computes_in],
        config.logits_chunk_tokens,
        run.optimizer,
        None if run.trained_critic is None else run.trained_critic.optimizer,
        config.reference if has_reference else None,
        run.source.facts.replays_experts,
    )


def estimate_fullest(architecture: Architecture, layout: Layout, step: Step, kept: Kept) -> MemoryEstimate:
    """Estimate the memory of a rank of the pipeline stage that needs most."""
    stages = (estimate_stage(architecture, layout, step, kept, stage) for stage in range(layout.grid.pipeline))
    return max(stages, key=lambda found: found.peak)


def estimate_stage(architecture: Architecture, layout: Layout, step: Step, kept: Kept, stage: int) -> MemoryEstimate:
    """Estimate the memory of a rank of one pipeline stage."""
    grid = layout.grid
    stages = Stages(architecture, grid)
    values = stages.values(stage)
    # What a rank of the context group computes of a micro-batch.
    tokens = math.ceil(step.tokens_of_microbatch(layout) / grid.context)
    parts = {
        "weights": kept.computed_bytes * values.all,
        # One buffer for all of them, which stays from step to step.
        "gradients": MAIN_BYTES * values.all,
        "optimizer": _optimizer_bytes(layout, values, kept.optimizer, kept.computed_bytes),
    }
    if kept.critic is not None:
        of_critic = Stages(architecture, grid, critic=True).values(stage)
        parts["critic"] = (kept.computed_bytes + MAIN_BYTES) * of_critic.all
        parts["critic"] += _optimizer_bytes(layout, of_critic, kept.critic, kept.computed_bytes)
    if kept.reference == "device":
        parts["reference"] = kept.computed_bytes * values.all
    update = {
        "activations": _activations(architecture, layout, stages, stage, tokens, step.num_microbatches(layout), kept)
    }
    if layout.sequence_share > 1:
        # All tokens of the input of a divided matrix, and of its gradient, are there while it is computed with.
        update["gathered activations"] = 2 * tokens * architecture.hidden * kept.computed_bytes
    if stages.is_last(stage):
        # At the peak, in backward: log-softmax and its gradient in fp32, then the gradient of the logits as computed.
        columns = padded_vocabulary(architecture, grid) // grid.tensor
        update["logits"] = min(tokens, kept.logits_chunk_tokens) * columns * (8 + kept.computed_bytes)
    if kept.replays_experts:
        # int16, of all micro-batches of a step, and once more of each rank's own tokens of them.
        share = math.ceil(step.tokens / grid.data)
        of_token = 2 * architecture.num_layers * architecture.experts_per_token
        update["routed experts"] = share * of_token + math.ceil(share / grid.context) * of_token
    moments = [update]
    if kept.reference == "host":
        moments.append({"reference, while it scores": kept.computed_bytes * values.all})
    return MemoryEstimate(parts, tuple(moments))


def _optimizer_bytes(layout: Layout, values: Values, optimizer: OptimizerConfig, computed_bytes: int) -> int:
    """Return the bytes of a rank's share of the optimizer: its state, and fp32 copies of weights that are narrower."""
    grid = layout.grid
    dense = math.ceil(values.dense / (grid.data * grid.context))
    expert = math.ceil(values.expert / grid.expert_data)
    copies = MAIN_BYTES * (dense + expert) if computed_bytes < MAIN_BYTES else 0
    return copies + optimizer.state_bytes({"dense": (dense,), "expert": (expert,)}, MAIN_BYTES)


def microbatches_in_flight(layout: Layout, stage: int, number: int) -> float:
    """Count the micro-batches whose activations a stage keeps at its peak, of so many in all.

    Part of a micro-batch is part of its layers.

    One forward, one backward: as many as there are stages from this one to the last (PipeDream-Flush, Narayanan et al.
    2021, arXiv:2104.04473). Interleaved, Megatron begins 2 (stages behind) + (parts - 1) stages more parts of a
    micro-batch before the first goes back (`get_pp_rank_microbatches`), which for the first stage is the factor
    1 + (p - 1) / (p v) of Korthikanti et al. 2022, section 4.2.3.
    """
    pipeline, parts = layout.grid.pipeline, layout.grid.virtual_stages
    behind = pipeline - stage - 1
    if parts == 1:
        return min(number, behind + 1)
    return min(number * parts, 2 * behind + (parts - 1) * pipeline + 1) / parts


def _activations(
    architecture: Architecture, layout: Layout, stages: Stages, stage: int, tokens: int, number: int, kept: Kept
) -> int:
    layers = sum(stages.layers[stage])
    whole_layer = kept_values(architecture, layout, layout.expert_load)
    of_layer = architecture.hidden / layout.sequence_share if layout.recompute == "full" else whole_layer
    values = microbatches_in_flight(layout, stage, number) * layers * of_layer
    if layout.recompute == "full":
        values += whole_layer
    if stages.is_last(stage):
        # Before and after the last norm, what is gathered of it, and of that the positions with loss.
        values += architecture.hidden * (2 / layout.sequence_share + 2)
    return math.ceil(tokens * values * kept.computed_bytes)


def kept_values(architecture: Architecture, layout: Layout, expert_load: float = 1.0) -> float:
    """Count the values that a layer keeps for its backward pass, for each token of a rank of the context group.

    A rank's experts get `expert_load` times as many copies of tokens as an even share.
    """
    a, grid = architecture, layout.grid
    norms = 4 * a.hidden / layout.sequence_share
    attention = _kept_of_attention(a, layout)
    if not a.num_experts:
        # Gate and up projection, and their product.
        return norms + attention + 3 * a.ffn / grid.tensor
    # The copies that experts get, gathered by those that divide an expert, and what an expert makes of them: as above,
    # the product as it has been weighted. Scores and weights in fp32.
    copies = a.hidden * grid.expert_tensor + 3 * a.expert_ffn
    routed = expert_load * a.experts_per_token * copies
    return norms + attention + (routed + 4 * a.num_experts) / layout.sequence_share


def _kept_of_attention(a: Architecture, layout: Layout) -> float:
    grid = layout.grid
    queries, keys = a.heads // grid.tensor, a.key_value_heads // grid.tensor
    # The projection is one tensor. Keys and values are views that keep all of it; queries are copied out of it.
    projected = queries + 2 * keys
    # Copied queries are what a norm reads, which makes new queries and keys.
    normed = queries + keys if a.qk_norm else 0
    if layout.recompute != "none":
        return a.head_dim * (projected + queries + normed + queries)
    read = queries if a.qk_norm else 0
    if grid.context == 1:
        # Turned queries and keys, and results; the values are in the projection.
        return a.head_dim * (projected + read + queries + keys + queries)
    # Keys and values that context parallelism cannot divide evenly are repeated until it can. Results are kept before
    # and after they are exchanged.
    exchanged = queries + 2 * math.lcm(keys, grid.context)
    return a.head_dim * ((projected + read if a.qk_norm else 0) + exchanged + 2 * queries)
