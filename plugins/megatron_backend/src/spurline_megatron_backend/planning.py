"""Plan how ranks divide the model: describe the division, refuse models that do not fit it, and estimate memory.

Plans need the model's config but no weights. The estimate is for the rank that needs most memory. The bytes of weights,
gradients and optimizer are exact sums over the rank's parts of tensors. Activations are the tensors that a layer keeps
for the backward pass, times the micro-batches that a stage has begun and not finished. They are counted as in
Korthikanti et al. 2022 (arXiv:2205.05198), for gated SiLU, grouped keys and values, and attention that keeps no scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, Problem
from spurline.protocols.backend import Role
from spurline.protocols.optimizer import OptimizerConfig
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import held_parameters, padded_vocabulary
from spurline_models.architecture import load_model_config, model_of
from spurline_models.backend_config import MemoryEstimate
from spurline_models.frozen import naming_frozen
from spurline_models.losses.distributions import SaysReadsLogits
from spurline_models.memory import COMPUTED_BYTES
from spurline_models.optimizers.groups import settings_of
from spurline_ranks.layout import counted, describe_ranks, divisors, more_ranks, ranks_of_machine, smaller_microbatches

if TYPE_CHECKING:
    from spurline_megatron_backend.configs import MegatronBackendConfig

MAIN_BYTES = 4
"""Bytes of the optimizer's copy of a weight, and of a summed gradient."""
_UNEVEN_EXPERTS = 1.2
"""The assumed tokens of the busiest rank, relative to an even share, if ranks divide experts."""


def describe_layout(config: MegatronBackendConfig, run: RunConfig) -> Iterator[str]:
    """Yield sentences about ranks, machines and groups."""
    grid, local = config.grid, ranks_of_machine(config)
    sizes = {"data": grid.data, "pipeline": grid.pipeline, "context": grid.context, "tensor": grid.tensor}
    product = [f"{size} {name}" for name, size in sizes.items() if name == "data" or size > 1]
    yield from describe_ranks(config, " x ".join(product))
    if grid.tensor > 1:
        yield f"{grid.tensor} neighbouring ranks divide each matrix, and the tokens outside of matrices"
    if grid.context > 1:
        yield f"{grid.context} ranks share each sequence"
    if grid.pipeline > 1:
        layers = read_architecture(load_model_config(run.model), run.model.head).num_layers
        counts = sorted({grid.count_layers(layers, stage) for stage in range(grid.pipeline)})
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        turns = f", in {grid.virtual_stages} parts that take turns" if grid.virtual_stages > 1 else ""
        yield f"{grid.pipeline} stages of {each} layers each{turns}"
    if grid.expert > 1:
        yield f"{grid.expert} ranks divide the experts of each layer; {grid.expert_data} ranks have each part"
    if grid.expert_tensor > 1:
        yield f"{grid.expert_tensor} neighbouring ranks divide each expert"
    shards = grid.data * grid.context
    if shards > 1:
        yield f"the optimizer is divided among the {counted(shards, 'rank')} with the same part of the model"
    if local is not None:
        for name, stride, ranks in (("tensor", 1, grid.tensor), ("context", grid.tensor, grid.context)):
            if ranks > 1 and (stride * ranks > local or local % (stride * ranks)):
                yield f"groups of {name} span several machines, which is slow: a machine has {local} ranks"


def check_model(config: MegatronBackendConfig, run: RunConfig) -> None:
    """Raise ConfigError if the ranks cannot divide the model, or ModelError if the model is not supported."""
    architecture = _architecture(run, "policy")
    problems = [
        *size_problems(config, architecture),
        *(
            Problem(problem.key, f"for model.frozen.{role}: {problem.message}")
            for role in run.model.frozen
            for problem in size_problems(config, _architecture(run, role), frozen=True)
        ),
        *_group_problems("optimizer", run.optimizer, architecture, critic=False),
    ]
    if run.trained_critic is not None:
        problems += _group_problems("critic.optimizer", run.trained_critic.optimizer, architecture, critic=True)
    if problems:
        raise ConfigError(problems)


def _architecture(run: RunConfig, role: Role) -> Architecture:
    with naming_frozen(run.model, role):
        model = model_of(run.model, role)
        return read_architecture(load_model_config(model), model.head)


def size_problems(config: MegatronBackendConfig, a: Architecture, *, frozen: bool = False) -> Iterator[Problem]:
    """Yield the problems of sizes that do not divide this model. A frozen model may have no experts to divide."""
    grid = config.grid
    divided = {"attention heads": a.heads, "key and value heads": a.key_value_heads}
    if not a.num_experts:
        divided["columns of the feed-forward layer"] = a.ffn
    undivided = [*_undivided("tensor", grid, divided, grid.context)]
    yield from undivided or _undivided(
        "context", grid, {"attention heads that a rank has": a.heads // grid.tensor}, grid.tensor
    )
    parts = grid.pipeline * grid.virtual_stages
    if parts > a.num_layers:
        key, count = ("pipeline", grid.pipeline) if grid.virtual_stages == 1 else ("virtual_stages", parts)
        what = "stages" if grid.virtual_stages == 1 else "parts of stages"
        yield Problem(
            f"backend.{key}",
            f"makes {count} {what}, and each needs at least one of the model's {a.num_layers} layers. Make it smaller.",
        )
    for key, count, what, others in (
        ("expert", a.num_experts, "experts of a layer", grid.expert_tensor),
        ("expert_tensor", a.expert_ffn, "columns of an expert", grid.expert),
    ):
        if a.num_experts:
            yield from _undivided(key, grid, {what: count}, others)
        elif (size := getattr(grid, key)) > 1 and not frozen:
            yield Problem(f"backend.{key}", f"is {size}, and the model has no experts. Set {key} to 1.")


def _undivided(key: str, grid: Grid, counts: Mapping[str, int], others: int) -> Iterator[Problem]:
    """Yield a problem if this size does not divide these counts. `others` is another size that divides the ranks."""
    size, common = getattr(grid, key), math.gcd(*counts.values())
    if common % size:
        listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count % size)
        fitting = divisors(math.gcd(common, grid.ranks_of_stage // others))
        fix = f"Choose one of {', '.join(map(str, fitting))}." if len(fitting) > 1 else f"Set {key} to 1."
        yield Problem(f"backend.{key}", f"is {size}, which does not divide the {listed}. {fix}")


def _group_problems(key: str, optimizer: OptimizerConfig, a: Architecture, *, critic: bool) -> Iterator[Problem]:
    """Yield a problem if the optimizer's groups give different settings to weights that Megatron joins."""
    alone = Grid(1)
    (parameters,) = held_parameters(a, alone, alone.place(0), critic=critic)
    for held in parameters.values():
        names = list(dict.fromkeys(part.name for part in held.parts))
        # The settings depend only on the name and the number of dimensions.
        like = Parameter(torch.empty((0,) * len(held.shape)))
        if len({settings_of(optimizer, name, like) for name in names}) > 1:
            yield Problem(
                f"{key}.groups",
                f"give {' and '.join(names)} different settings, and Megatron keeps them as one parameter. Use one "
                "pattern that matches all of them, or choose backend fsdp.",
            )
            return


def savings(config: MegatronBackendConfig, run: RunConfig, row_length: int, tokens: int) -> Iterator[Mapping[str, Any]]:
    """Yield changes of settings that save memory. Changes that cost least time come first.

    They keep the division of the model. The module `layout_search` finds other divisions.
    """
    if config.recompute == "none":
        yield {"recompute": "selective"}
    yield from smaller_microbatches(config, row_length, tokens)
    if config.frozen == "device" and run.frozen_roles - _teachers(run):
        yield {"frozen": "host"}
    if config.recompute != "full":
        yield {"recompute": "full"}
    yield from more_ranks(config)


def estimate_memory(config: MegatronBackendConfig, run: RunConfig, row_length: int, tokens: int) -> MemoryEstimate:
    """Estimate the memory of the fullest rank in a step of `tokens` tokens. Raises ModelError, ConfigError."""
    return estimate_fullest(config, run, _architecture(run, "policy"), row_length, tokens)


def estimate_fullest(
    config: MegatronBackendConfig, run: RunConfig, a: Architecture, row_length: int, tokens: int
) -> MemoryEstimate:
    """Estimate the memory of the fullest rank in a step of `tokens` tokens of this model."""
    stages = [_of_stage(config, run, a, stage, row_length, tokens) for stage in range(config.pipeline)]
    found = max(stages, key=lambda estimate: estimate.peak)
    local = ranks_of_machine(config)
    if config.frozen != "host" or local is None:
        return found
    return replace(
        found, host=local * max(sum(_frozen_bytes(config, run, a, it).values()) for it in range(len(stages)))
    )


def _teachers(run: RunConfig) -> set[str]:
    """Return the roles whose distributions the loss may read, so that they stay on the device during the update."""
    return set(run.loss.roles) if isinstance(run.loss, SaysReadsLogits) else set()


def _frozen_bytes(config: MegatronBackendConfig, run: RunConfig, a: Architecture, stage: int) -> dict[str, int]:
    """Return the bytes of each untrained model's weights on a rank of this stage, by role."""
    models = {role: _architecture(run, role) if role in run.model.frozen else a for role in sorted(run.frozen_roles)}
    computed = COMPUTED_BYTES[config.computes_in]
    return {role: computed * sum(held_values(model, config.grid, stage)) for role, model in models.items()}


def _of_stage(
    config: MegatronBackendConfig, run: RunConfig, a: Architecture, stage: int, row_length: int, tokens: int
) -> MemoryEstimate:
    grid, computed = config.grid, COMPUTED_BYTES[config.computes_in]
    values = sum(held_values(a, grid, stage))
    parts = {
        "weights": computed * values,
        # One buffer holds all gradients. It stays allocated between steps.
        "gradients": MAIN_BYTES * values,
        "optimizer": _optimizer_bytes(grid, held_values(a, grid, stage), run.optimizer, computed),
    }
    if run.trained_critic is not None:
        of_critic = held_values(a, grid, stage, critic=True)
        parts["critic"] = (computed + MAIN_BYTES) * sum(of_critic)
        parts["critic"] += _optimizer_bytes(grid, of_critic, run.trained_critic.optimizer, computed)
    frozen = _frozen_bytes(config, run, a, stage)
    if config.frozen == "device":
        parts |= frozen
    number, own = microbatches(config, row_length, tokens)
    update = {"activations": math.ceil(own * _activations(config, a, stage, number) * computed)}
    if config.tensor > 1:
        # Divided matrices need the gathered inputs of all tokens, and in the backward pass also the inputs' gradients.
        update["gathered activations"] = 2 * own * a.hidden * computed
    if stage == grid.pipeline - 1 and not a.scores:
        # The backward pass has log-softmax and its gradient in fp32, and the logits' gradient in the computed dtype.
        columns = padded_vocabulary(a, grid) // grid.tensor
        update["logits"] = min(own, config.chunk_tokens) * columns * (8 + computed)
    if run.source.facts.replays_experts:
        # These are int16 numbers of experts for all tokens of a step, and a copy for the tokens of this rank.
        share = math.ceil(tokens / grid.data)
        of_token = 2 * a.num_layers * a.experts_per_token
        update["routed experts"] = share * of_token + math.ceil(share / grid.context) * of_token
    moments = [update]
    if config.frozen == "host":
        update |= {role: size for role, size in frozen.items() if role in _teachers(run)}
        moments += [{f"{role}, while it scores": size} for role, size in frozen.items()]
    return MemoryEstimate(parts, tuple(moments))


def microbatches(config: MegatronBackendConfig, row_length: int, tokens: int) -> tuple[int, int]:
    """Return the number of micro-batches of a step, and the tokens of a micro-batch that one rank computes."""
    share = math.ceil(tokens / config.grid.data)
    # A row is never divided between micro-batches.
    size = max(min(share, config.max_tokens_per_microbatch or share), min(row_length, tokens))
    number = config.grid.rounded_up(max(1, math.ceil(share / max(1, size))))
    return number, math.ceil(size / config.grid.context)


def held_values(a: Architecture, grid: Grid, stage: int, *, critic: bool = False) -> tuple[int, int]:
    """Count the values that each rank of a stage holds in experts, and in all other parameters including padding."""
    # All layers are alike, so one layer is counted and multiplied.
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
    """Return the bytes of a rank's share of the optimizer: its state, and fp32 copies of weights that are narrower."""
    expert, dense = math.ceil(values[0] / grid.expert_data), math.ceil(values[1] / (grid.data * grid.context))
    copies = MAIN_BYTES * (dense + expert) if computed_bytes < MAIN_BYTES else 0
    return copies + optimizer.state_bytes({"dense": (dense,), "expert": (expert,)}, MAIN_BYTES)


def microbatches_in_flight(grid: Grid, stage: int, number: int) -> float:
    """Count the micro-batches, out of `number`, whose activations a stage keeps at its peak.

    Without `virtual_stages`, it is at most the number of stages from this one to the last (PipeDream-Flush, Narayanan
    et al. 2021, arXiv:2104.04473). For interleaved stages see Korthikanti et al. 2022, section 4.2.3, and Megatron's
    `get_pp_rank_microbatches`.
    """
    behind, parts = grid.pipeline - stage - 1, grid.virtual_stages
    if parts == 1:
        return min(number, behind + 1)
    return min(number * parts, 2 * behind + (parts - 1) * grid.pipeline + 1) / parts


def _activations(config: MegatronBackendConfig, a: Architecture, stage: int, number: int) -> float:
    """Count the values that a stage keeps for each token of a micro-batch."""
    grid, share = config.grid, config.tensor
    layers = grid.count_layers(a.num_layers, stage)
    whole_layer = kept_values(config, a, _UNEVEN_EXPERTS if grid.expert > 1 else 1.0)
    of_layer = a.hidden / share if config.recompute == "full" else whole_layer
    values = microbatches_in_flight(grid, stage, number) * layers * of_layer
    if config.recompute == "full":
        values += whole_layer
    if stage == grid.pipeline - 1:
        # Hidden states are kept before and after the last norm, gathered for all tokens, and for tokens with loss.
        values += a.hidden * (2 / share + 2)
    return values


def kept_values(config: MegatronBackendConfig, a: Architecture, expert_load: float = 1.0) -> float:
    """Count the values that a layer keeps for its backward pass, for each token of a rank.

    The experts of a rank get `expert_load` times an even share of the tokens.
    """
    # The ranks of `tensor` divide the tokens in layers whose weights are not divided, such as norms.
    grid, share = config.grid, config.tensor
    norms = 4 * a.hidden / share
    attention = _kept_of_attention(config, a)
    if not a.num_experts:
        # The layer keeps gate, up projection and their product.
        return norms + attention + 3 * a.ffn / grid.tensor
    # Every rank that divides an expert keeps a copy of each of the expert's tokens, with gate, up projection and
    # weighted product. Routers keep scores and weights in fp32.
    copies = expert_load * a.experts_per_token * (a.hidden * grid.expert_tensor + 3 * a.expert_ffn)
    return norms + attention + (copies + 4 * a.num_experts) / share


def _kept_of_attention(config: MegatronBackendConfig, a: Architecture) -> float:
    queries, keys = a.heads // config.tensor, a.key_value_heads // config.tensor
    # The projection is one tensor, which stays in memory because keys and values are views of it. Queries are copied.
    projected = queries + 2 * keys
    # A norm reads the copied queries and the keys, and makes normed copies.
    normed = queries + keys if a.qk_norm else 0
    if config.recompute != "none":
        return a.head_dim * (projected + queries + normed + queries)
    read = queries if a.qk_norm else 0
    if config.context == 1:
        # This adds rotated queries and keys, and results. The values are in the projection.
        return a.head_dim * (projected + read + queries + keys + queries)
    # Keys and values are repeated until the ranks can divide them evenly. Results are kept before and after the
    # exchange.
    exchanged = queries + 2 * math.lcm(keys, config.context)
    return a.head_dim * ((projected + read if a.qk_norm else 0) + exchanged + 2 * queries)
