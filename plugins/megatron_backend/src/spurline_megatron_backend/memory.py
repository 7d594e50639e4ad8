"""Estimate what the fullest rank holds, for `spurline plan`.

Weights, gradients and optimizer are exact sums over the table of parts. Activations are the tensors that a layer keeps
for the backward pass, counted as in Korthikanti et al. 2022 (arXiv:2205.05198) for gated SiLU, shared keys and
attention that keeps no scores, times the micro-batches that a stage has begun and not finished.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from spurline.config.run_config import RunConfig
from spurline.protocols.optimizer import OptimizerConfig
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import held_parameters, padded_vocabulary
from spurline_models.architecture import load_model_config
from spurline_models.backend_config import MemoryEstimate
from spurline_models.memory import COMPUTED_BYTES
from spurline_ranks.layout import ranks_of_machine

if TYPE_CHECKING:
    from spurline_megatron_backend.configs import MegatronBackendConfig

MAIN_BYTES = 4
"""Bytes of the copy of a weight that the optimizer changes, and of a summed gradient."""
_UNEVEN_EXPERTS = 1.2
"""Assumed load of the busiest rank of an expert-parallel group, relative to an even share; no router is even."""


def estimate_memory(config: MegatronBackendConfig, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
    """Estimate a step of so many tokens on the fullest rank. Raises ModelError, ConfigError."""
    return estimate_fullest(config, run, read_architecture(load_model_config(run.model)), row_length, tokens)


def estimate_fullest(
    config: MegatronBackendConfig, run: RunConfig, a: Architecture, row_length: int, tokens: int
) -> MemoryEstimate:
    """Estimate a step of so many tokens of this model on the fullest rank."""
    stages = [_of_stage(config, run, a, stage, row_length, tokens) for stage in range(config.pipeline)]
    found = max(stages, key=lambda estimate: estimate.peak)
    local = ranks_of_machine(config)
    if config.reference != "host" or not has_reference(run) or local is None:
        return found
    return replace(found, host=local * max(estimate.kept["weights"] for estimate in stages))


def has_reference(run: RunConfig) -> bool:
    """Return whether the ranks hold a reference model."""
    return run.loss.uses_reference or run.source.facts.uses_reference


def _of_stage(
    config: MegatronBackendConfig, run: RunConfig, a: Architecture, stage: int, row_length: int, tokens: int
) -> MemoryEstimate:
    grid, computed = config.grid, COMPUTED_BYTES[config.computes_in]
    values = sum(held_values(a, grid, stage))
    parts = {
        "weights": computed * values,
        # One buffer holds all gradients, and stays from step to step.
        "gradients": MAIN_BYTES * values,
        "optimizer": _optimizer_bytes(grid, held_values(a, grid, stage), run.optimizer, computed),
    }
    if run.trained_critic is not None:
        of_critic = held_values(a, grid, stage, critic=True)
        parts["critic"] = (computed + MAIN_BYTES) * sum(of_critic)
        parts["critic"] += _optimizer_bytes(grid, of_critic, run.trained_critic.optimizer, computed)
    if has_reference(run) and config.reference == "device":
        parts["reference"] = computed * values
    number, own = microbatches(config, row_length, tokens)
    update = {"activations": math.ceil(own * _activations(config, a, stage, number) * computed)}
    if config.divides_tokens:
        # Divided matrices are multiplied with the inputs of all tokens, and with their gradients.
        update["gathered activations"] = 2 * own * a.hidden * computed
    if stage == grid.pipeline - 1:
        # The peak is in backward: log-softmax and its gradient in fp32, then the gradient of the logits as computed.
        columns = padded_vocabulary(a, grid) // grid.tensor
        update["logits"] = min(own, config.logits_chunk_tokens) * columns * (8 + computed)
    if run.source.facts.replays_experts:
        # int16 numbers for all tokens of a step, and once more for the rank's own tokens.
        share = math.ceil(tokens / grid.data)
        of_token = 2 * a.num_layers * a.experts_per_token
        update["routed experts"] = share * of_token + math.ceil(share / grid.context) * of_token
    moments = [update]
    if has_reference(run) and config.reference == "host":
        moments.append({"reference, while it scores": computed * values})
    return MemoryEstimate(parts, tuple(moments))


def microbatches(config: MegatronBackendConfig, row_length: int, tokens: int) -> tuple[int, int]:
    """Return the number of micro-batches of a step, and the tokens that a rank of a context group has of each."""
    share = math.ceil(tokens / config.grid.data)
    # A row is never divided between micro-batches.
    size = max(min(share, config.max_tokens_per_microbatch or share), min(row_length, tokens))
    number = config.grid.rounded_up(max(1, math.ceil(share / max(1, size))))
    return number, math.ceil(size / config.grid.context)


def held_values(a: Architecture, grid: Grid, stage: int, *, critic: bool = False) -> tuple[int, int]:
    """Count the values that each rank of a stage holds in its experts and in all else, with padding."""
    # All layers are alike: one layer and the rest are counted, and the layer is multiplied.
    layers = grid.count_layers(a.num_layers, stage)
    of_experts, of_rest = _values_of_layer(a, grid.tensor, grid.expert, grid.expert_tensor)
    _, beside = _count_values(replace(a, num_layers=0), grid, stage, critic)
    return layers * of_experts, layers * of_rest + beside


@lru_cache(maxsize=256)
def _values_of_layer(a: Architecture, tensor: int, expert: int, expert_tensor: int) -> tuple[int, int]:
    # The second of three stages has one layer and nothing else.
    grid = Grid(3 * tensor * expert * expert_tensor, tensor, 3, expert=expert, expert_tensor=expert_tensor)
    return _count_values(replace(a, num_layers=3), grid, 1, critic=False)


def _count_values(a: Architecture, grid: Grid, stage: int, critic: bool) -> tuple[int, int]:
    place = grid.place(stage * grid.ranks_of_stage)
    held = [parameter for part in held_parameters(a, grid, place, critic=critic) for parameter in part.values()]
    experts = sum(math.prod(parameter.shape) for parameter in held if parameter.is_expert)
    return experts, sum(math.prod(parameter.shape) for parameter in held) - experts


def _optimizer_bytes(grid: Grid, values: tuple[int, int], optimizer: OptimizerConfig, computed_bytes: int) -> int:
    """Return the bytes of a rank's share of the optimizer: its state, and fp32 copies of narrower weights."""
    expert, dense = math.ceil(values[0] / grid.expert_data), math.ceil(values[1] / (grid.data * grid.context))
    copies = MAIN_BYTES * (dense + expert) if computed_bytes < MAIN_BYTES else 0
    return copies + optimizer.state_bytes({"dense": (dense,), "expert": (expert,)}, MAIN_BYTES)


def microbatches_in_flight(grid: Grid, stage: int, number: int) -> float:
    """Count the micro-batches whose activations a stage keeps at its peak, of `number` in all.

    Plain stages keep as many as there are stages from this one to the last (PipeDream-Flush, Narayanan et al. 2021,
    arXiv:2104.04473). Interleaved stages begin 2 (stages behind) + (parts - 1) stages more parts before the first goes
    back (`get_pp_rank_microbatches`), as in Korthikanti et al. 2022, section 4.2.3.
    """
    behind, parts = grid.pipeline - stage - 1, grid.virtual_stages
    if parts == 1:
        return min(number, behind + 1)
    return min(number * parts, 2 * behind + (parts - 1) * grid.pipeline + 1) / parts


def _activations(config: MegatronBackendConfig, a: Architecture, stage: int, number: int) -> float:
    """Count the values that a stage keeps for each token of a micro-batch."""
    grid, share = config.grid, sequence_share(config)
    layers = grid.count_layers(a.num_layers, stage)
    whole_layer = kept_values(config, a, _UNEVEN_EXPERTS if grid.expert > 1 else 1.0)
    of_layer = a.hidden / share if config.recompute == "full" else whole_layer
    values = microbatches_in_flight(grid, stage, number) * layers * of_layer
    if config.recompute == "full":
        values += whole_layer
    if stage == grid.pipeline - 1:
        # Hidden states before and after the last norm, then gathered for all tokens and for those with loss.
        values += a.hidden * (2 / share + 2)
    return values


def kept_values(config: MegatronBackendConfig, a: Architecture, expert_load: float = 1.0) -> float:
    """Count the values that a layer keeps for its backward pass, for each token of a rank of the context group.

    A rank's experts get `expert_load` times an even share of the tokens.
    """
    grid, share = config.grid, sequence_share(config)
    norms = 4 * a.hidden / share
    attention = _kept_of_attention(config, a)
    if not a.num_experts:
        # The layer keeps gate, up projection and their product.
        return norms + attention + 3 * a.ffn / grid.tensor
    # Experts keep copies of tokens, gathered by the ranks that divide an expert, with gate, up and weighted product of
    # each. Routers keep scores and weights in fp32.
    copies = expert_load * a.experts_per_token * (a.hidden * grid.expert_tensor + 3 * a.expert_ffn)
    return norms + attention + (copies + 4 * a.num_experts) / share


def sequence_share(config: MegatronBackendConfig) -> int:
    """Return the number of ranks that divide the tokens in norms and other undivided layers."""
    return config.tensor if config.divides_tokens else 1


def _kept_of_attention(config: MegatronBackendConfig, a: Architecture) -> float:
    queries, keys = a.heads // config.tensor, a.key_value_heads // config.tensor
    # The projection is one tensor. Keys and values are views that keep all of it; queries are copied out of it.
    projected = queries + 2 * keys
    # A norm reads the copied queries, and makes new queries and keys.
    normed = queries + keys if a.qk_norm else 0
    if config.recompute != "none":
        return a.head_dim * (projected + queries + normed + queries)
    read = queries if a.qk_norm else 0
    if config.context == 1:
        # Turned queries and keys, and results; the values are in the projection.
        return a.head_dim * (projected + read + queries + keys + queries)
    # Keys and values that context parallelism cannot divide evenly are repeated until it can. Results are kept before
    # and after they are exchanged.
    exchanged = queries + 2 * math.lcm(keys, config.context)
    return a.head_dim * ((projected + read if a.qk_norm else 0) + exchanged + 2 * queries)
