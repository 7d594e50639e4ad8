"""How the ranks divide the work: groups in words, models that they cannot divide, and settings that need less memory.

Reads the config of the model, no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, Problem
from spurline.protocols.optimizer import OptimizerConfig
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.memory import has_reference
from spurline_megatron_backend.parts import held_parameters
from spurline_models.architecture import load_model_config
from spurline_models.optimizers.groups import settings_of
from spurline_ranks.layout import counted, describe_ranks, divisors, more_ranks, ranks_of_machine, smaller_microbatches

if TYPE_CHECKING:
    from spurline_megatron_backend.configs import MegatronBackendConfig

RANKS_OF_MACHINE = 8
"""Devices of a machine that is not known: as many as a DGX has."""


def describe_layout(config: MegatronBackendConfig, run: RunConfig) -> Iterator[str]:
    """Yield sentences on ranks, machines and groups."""
    grid, local = config.grid, ranks_of_machine(config)
    yield from describe_ranks(config, _product(grid))
    if grid.tensor > 1:
        tokens = ", and between them the tokens" if config.divides_tokens else ""
        yield f"{grid.tensor} neighbouring ranks divide each matrix{tokens}"
    if grid.context > 1:
        yield f"{grid.context} ranks share each sequence"
    if grid.pipeline > 1:
        layers = read_architecture(load_model_config(run.model)).num_layers
        counts = sorted({grid.count_layers(layers, stage) for stage in range(grid.pipeline)})
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        turns = f", in {grid.virtual_stages} parts that take turns" if grid.virtual_stages > 1 else ""
        yield f"{grid.pipeline} stages of {each} layers each{turns}"
    if grid.expert > 1:
        yield f"{grid.expert} ranks divide the experts of each layer; {grid.expert_data} have the same ones"
    if grid.expert_tensor > 1:
        yield f"{grid.expert_tensor} neighbouring ranks divide each expert"
    shards = grid.data * grid.context
    if shards > 1:
        yield f"the optimizer is divided among the {counted(shards, 'rank')} with the same part of the model"
    if local is not None:
        for name, stride, ranks in (("tensor", 1, grid.tensor), ("context", grid.tensor, grid.context)):
            if ranks > 1 and (stride * ranks > local or local % (stride * ranks)):
                yield f"groups of {name} lie across machines, as each has {local} ranks: slow"


def _product(grid: Grid) -> str:
    sizes = {"data": grid.data, "pipeline": grid.pipeline, "context": grid.context, "tensor": grid.tensor}
    return " x ".join(f"{size} {name}" for name, size in sizes.items() if name == "data" or size > 1)


def check_model(config: MegatronBackendConfig, run: RunConfig) -> None:
    """Raise ConfigError for a model that the ranks cannot divide, ModelError for a model that is not supported."""
    architecture = read_architecture(load_model_config(run.model))
    problems = [
        *size_problems(config, architecture),
        *_group_problems("optimizer", run.optimizer, architecture, critic=False),
    ]
    if run.trained_critic is not None:
        problems += _group_problems("critic.optimizer", run.trained_critic.optimizer, architecture, critic=True)
    if problems:
        raise ConfigError(problems)


def size_problems(config: MegatronBackendConfig, a: Architecture) -> Iterator[Problem]:
    """Yield the sizes that do not divide this model."""
    grid = config.grid
    divided = {"attention heads": a.heads, "key and value heads": a.key_value_heads}
    if not a.num_experts:
        divided["columns of the feed-forward layer"] = a.ffn
    common = math.gcd(*divided.values())
    if common % grid.tensor:
        counts = ", ".join(f"{count} {name}" for name, count in divided.items() if count % grid.tensor)
        fitting = _fitting("tensor", common, grid.ranks // (grid.pipeline * grid.context))
        yield Problem("backend.tensor", f"is {grid.tensor}, which does not divide the model's {counts}. {fitting}")
    elif a.heads // grid.tensor % grid.context:
        fitting = _fitting("context", a.heads // grid.tensor, grid.ranks // (grid.pipeline * grid.tensor))
        yield Problem(
            "backend.context",
            f"is {grid.context}, which does not divide the {a.heads // grid.tensor} attention heads that a rank has "
            f"(backend.tensor is {grid.tensor}). {fitting}",
        )
    parts = grid.pipeline * grid.virtual_stages
    if parts > a.num_layers:
        key, count = ("pipeline", grid.pipeline) if grid.virtual_stages == 1 else ("virtual_stages", parts)
        what = "stages" if grid.virtual_stages == 1 else "parts of stages"
        yield Problem(
            f"backend.{key}",
            f"makes {count} {what}, and each needs one of the model's {a.num_layers} layers. Make it smaller.",
        )
    yield from _expert_problems(config, a)


def _expert_problems(config: MegatronBackendConfig, a: Architecture) -> Iterator[Problem]:
    grid = config.grid
    if not a.num_experts:
        for key in ("expert", "expert_tensor"):
            if getattr(grid, key) > 1:
                yield Problem(
                    f"backend.{key}", f"is {getattr(grid, key)}, and the model has no experts. Set {key} to 1."
                )
        return
    stage = grid.ranks // grid.pipeline
    if a.num_experts % grid.expert:
        fitting = _fitting("expert", a.num_experts, stage // grid.expert_tensor)
        yield Problem(
            "backend.expert",
            f"is {grid.expert}, which does not divide the {a.num_experts} experts of a layer. {fitting}",
        )
    if a.expert_ffn % grid.expert_tensor:
        fitting = _fitting("expert_tensor", a.expert_ffn, stage // grid.expert)
        yield Problem(
            "backend.expert_tensor",
            f"is {grid.expert_tensor}, which does not divide the {a.expert_ffn} columns of an expert. {fitting}",
        )
    if grid.tensor > 1 and not config.divides_tokens:
        yield Problem("backend.sequence_parallel", "is false, but experts need it with tensor above 1. Remove it.")


def _group_problems(key: str, optimizer: OptimizerConfig, a: Architecture, *, critic: bool) -> Iterator[Problem]:
    """Yield the first group of parameters that separates weights which Megatron keeps as one parameter."""
    alone = Grid(1)
    (parameters,) = held_parameters(a, alone, alone.place(0), critic=critic)
    for held in parameters.values():
        names = list(dict.fromkeys(part.name for part in held.parts))
        # Settings look at names and dimensions.
        like = Parameter(torch.empty((0,) * len(held.shape)))
        if len({settings_of(optimizer, name, like) for name in names}) > 1:
            yield Problem(
                f"{key}.groups",
                f"give {' and '.join(names)} different settings, and Megatron keeps them as one parameter. Let one "
                "pattern fit all of them, or choose backend fsdp.",
            )
            return


def _fitting(key: str, number: int, ranks: int) -> str:
    """Return a sentence with the sizes that divide both numbers."""
    fitting = divisors(math.gcd(number, ranks))
    return f"Choose one of {', '.join(map(str, fitting))}." if len(fitting) > 1 else f"Set {key} to 1."


def savings(config: MegatronBackendConfig, run: RunConfig, row_length: int, tokens: int) -> Iterator[Mapping[str, Any]]:
    """Yield settings that need less memory, the cheapest in time first."""
    if config.recompute == "none":
        yield {"recompute": "selective"}
    yield from smaller_microbatches(config, row_length, tokens)
    if config.reference == "device" and has_reference(run):
        yield {"reference": "host"}
    if config.recompute != "full":
        yield {"recompute": "full"}
    yield from _finer_grids(config, read_architecture(load_model_config(run.model)))
    yield from more_ranks(config)


def _finer_grids(config: MegatronBackendConfig, a: Architecture) -> Iterator[Mapping[str, Any]]:
    """Yield layouts of the same ranks with more ranks for each copy of the model."""
    grid, local = config.grid, ranks_of_machine(config) or RANKS_OF_MACHINE
    expert, tensor = grid.expert, grid.tensor
    experts = math.gcd(a.num_experts, grid.ranks_of_stage // grid.expert_tensor) if a.num_experts else 1
    for size in divisors(experts):
        # An exchange of tokens across machines would be slow.
        if size > expert and size * grid.expert_tensor <= local:
            expert = size
            yield {"expert": size}
    divided = math.gcd(a.heads // grid.context, a.key_value_heads, 0 if a.num_experts else a.ffn)
    for size in divisors(divided):
        fits = local % size == 0 and grid.ranks % (size * grid.context * grid.pipeline) == 0
        if size > tensor and fits and config.sequence_parallel is not False:
            tensor = size
            yield {"tensor": size}
    for size in divisors(grid.ranks // (tensor * grid.context)):
        fits = grid.ranks // size % (grid.expert_tensor * expert) == 0
        if grid.pipeline < size <= a.num_layers // grid.virtual_stages and fits:
            yield {"pipeline": size}
