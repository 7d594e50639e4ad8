"""Find layouts in which a model fits on the same ranks, and order them by the bytes that a rank sends in a step.

The search tries all layouts that divide the model and the ranks and keep tensor groups inside machines. For each
layout it computes the bytes sent and the share of time spent waiting, without guessing speeds of devices or networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from spurline.config.run_config import RunConfig
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid, part_sizes
from spurline_megatron_backend.planning import MAIN_BYTES, estimate_fullest, held_values, microbatches, size_problems
from spurline_models.architecture import load_model_config
from spurline_models.backend_config import MemoryEstimate
from spurline_models.memory import COMPUTED_BYTES
from spurline_ranks.layout import divisors, ranks_of_machine

if TYPE_CHECKING:
    from spurline_megatron_backend.configs import MegatronBackendConfig

MOST_IDLE = 0.1
"""The share of a step that ranks may wait for other stages. Layouts with longer waits come last."""

_SIZES = ("tensor", "pipeline", "virtual_stages", "context", "expert", "expert_tensor")
_SHOWN = 5
"""The number of layouts that a plan shows."""
_RANKS_OF_MACHINE = 8
"""The assumed number of devices of a machine if it is not known. A DGX has 8."""
_MICROBATCH = 4096
"""Tokens of a micro-batch. Longer rows make larger micro-batches."""
_SMALL_SHARE = 1024
"""The minimum number of tokens of a row on each rank of `context`."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its costs."""

    config: MegatronBackendConfig
    memory: MemoryEstimate
    """The memory of the fullest rank."""
    sent: int
    """The bytes that a rank sends in a step."""
    idle: float
    """The share of a step that ranks wait for other stages."""


def suggested_layouts(
    config: MegatronBackendConfig, run: RunConfig, row_length: int, tokens: int, usable_bytes: int
) -> Iterator[str]:
    """Yield lines for a plan: the costs of the run's own layout, then layouts that fit, the best first."""
    a = read_architecture(load_model_config(run.model), run.model.head)
    own = evaluate(config, run, a, row_length, tokens)
    fits = "fits" if own.memory.peak <= usable_bytes else f"does not fit: {_largest_part(own)}"
    yield f"this run: {_words(own)}; {fits}"
    fitting, smallest = find_layouts(config, run, a, row_length, tokens, usable_bytes)
    for found in fitting[:_SHOWN]:
        yield f"{_changes(config, found.config)}: {_words(found)}"
    if not fitting:
        yield (
            f"no layout fits. {_changes(config, smallest.config)} needs least memory, {_gib(smallest.memory.peak)} "
            f"({_gib(usable_bytes)} can be used); {_largest_part(smallest)}. Use more ranks, or larger devices"
        )


def find_layouts(
    config: MegatronBackendConfig, run: RunConfig, a: Architecture, row_length: int, tokens: int, usable_bytes: float
) -> tuple[list[Candidate], Candidate]:
    """Try all layouts. Return the fitting layouts, the best first, and the layout that needs least memory."""
    tried: list[Candidate] = []
    for divided in _divisions(config, a, row_length):
        for layout in _variants(divided, a, row_length, tokens):
            tried.append(evaluate(layout, run, a, row_length, tokens))
            if tried[-1].memory.peak <= usable_bytes and tried[-1].idle <= MOST_IDLE:
                # All later variants are slower.
                break
    fitting = [found for found in tried if found.memory.peak <= usable_bytes]
    # Recomputing whole layers takes a third more time.
    fitting.sort(key=lambda found: (found.idle > MOST_IDLE, found.config.recompute == "full", found.sent))
    return fitting, min(tried, key=lambda found: found.memory.peak)


def evaluate(config: MegatronBackendConfig, run: RunConfig, a: Architecture, row_length: int, tokens: int) -> Candidate:
    """Return the layout with its costs."""
    memory = estimate_fullest(config, run, a, row_length, tokens)
    number, _ = microbatches(config, row_length, tokens)
    return Candidate(config, memory, sent_bytes(config, a, row_length, tokens), idle_share(config.grid, a, number))


def idle_share(grid: Grid, a: Architecture, number: int) -> float:
    """Return the share of a step with `number` micro-batches that ranks spend waiting for other stages.

    With p stages of v parts and m micro-batches, a step takes v m turns, and p - 1 more to fill and empty the pipeline
    (Narayanan et al. 2021, arXiv:2104.04473). A turn takes as long as the part with most layers.
    """
    turns = grid.virtual_stages * number + grid.pipeline - 1
    most = max(part_sizes(a.num_layers, grid.pipeline * grid.virtual_stages))
    return 1 - number * a.num_layers / grid.pipeline / (turns * most)


def sent_bytes(config: MegatronBackendConfig, a: Architecture, row_length: int, tokens: int) -> int:
    """Return the bytes that a rank sends in a step: in each layer, between stages, and once for the gradients."""
    grid, share, computed = config.grid, config.tensor, COMPUTED_BYTES[config.computes_in]
    number, own = microbatches(config, row_length, tokens)
    # The next three counts are the values that a rank sends for each token, in one layer and one pass. Attention and
    # feed-forward layers both gather their inputs and sum their results. Experts exchange tokens instead.
    by_tensor = (2 if a.num_experts else 4) * _others(grid.tensor) * a.hidden
    # Queries, keys, values and results are exchanged before and after attention. Keys and values are repeated until the
    # ranks can divide them evenly.
    heads = a.heads // grid.tensor + math.lcm(a.key_value_heads // grid.tensor, grid.context)
    by_context = _others(grid.context) * 2 * heads * a.head_dim
    # Copies of a token are sent to all ranks with parts of its experts, and results come back.
    by_expert = 2 * a.experts_per_token * a.hidden / share * (_others(grid.expert) + grid.expert_tensor - 1)
    # With full recomputation, a step has two forward passes and a backward pass.
    passes = 3 if config.recompute == "full" else 2
    of_token = passes * math.ceil(a.num_layers / grid.pipeline) * (by_tensor + by_context + by_expert)
    if grid.pipeline > 1:
        of_token += 2 * grid.virtual_stages * a.hidden / share
    # Gradients are summed in fp32, and weights gathered in the dtype of the computation.
    expert, dense = max((held_values(a, grid, stage) for stage in range(grid.pipeline)), key=sum)
    by_data = expert * _others(grid.expert_data) + dense * _others(grid.data * grid.context)
    return int(computed * number * own * of_token + (MAIN_BYTES + computed) * by_data)


def _others(ranks: int) -> float:
    """Return the share of a group's data that a rank exchanges with the other ranks."""
    return (ranks - 1) / ranks


def _divisions(config: MegatronBackendConfig, a: Architecture, row_length: int) -> Iterator[MegatronBackendConfig]:
    """Yield a config for each way to divide this model among the ranks."""
    ranks, local = config.num_ranks, ranks_of_machine(config) or _RANKS_OF_MACHINE
    sizes = divisors(ranks)
    contexts = [size for size in sizes if size <= max(1, row_length // _SMALL_SHARE)]
    experts = divisors(math.gcd(ranks, a.num_experts)) if a.num_experts else [1]
    for tensor, pipeline, context, expert in product(divisors(math.gcd(ranks, local)), sizes, contexts, experts):
        for expert_tensor in sorted({1, tensor}) if a.num_experts else [1]:
            of_grid = (tensor, pipeline, 1, context, expert, expert_tensor)
            found = config.model_copy(update=dict[str, int](zip(_SIZES, of_grid, strict=True)))
            if not any(found.division_problems(ranks)) and not any(size_problems(found, a)):
                yield found


def _variants(
    config: MegatronBackendConfig, a: Architecture, row_length: int, tokens: int
) -> Iterator[MegatronBackendConfig]:
    """Yield layouts with the groups of `config` and micro-batches of a few rows, the fastest first."""
    share = max(row_length, math.ceil(tokens / config.grid.data))
    bound = min(share, max(1, _MICROBATCH // row_length) * row_length)
    # If stages have several parts, ranks wait less and send more.
    parts = a.num_layers // config.pipeline // 4 if config.pipeline > 1 else 1
    for recompute in ("none", "selective", "full"):
        for virtual in sorted({1, max(1, parts)}):
            changes = {"max_tokens_per_microbatch": bound, "recompute": recompute, "virtual_stages": virtual}
            yield config.model_copy(update=changes)


def _changes(config: MegatronBackendConfig, layout: MegatronBackendConfig) -> str:
    """Return the options that change the config to this layout. Sizes that are 1 in both are left out."""
    sizes: dict[str, Any] = {key: getattr(layout, key) for key in _SIZES}
    values = {key: size for key, size in sizes.items() if size > 1 or getattr(config, key) > 1}
    values |= {"max_tokens_per_microbatch": layout.max_tokens_per_microbatch, "recompute": layout.recompute}
    return " ".join(f"--set backend.{key}={value}" for key, value in values.items())


def _words(found: Candidate) -> str:
    idle = f", {found.idle:.0%} of a step waiting for other stages" if found.idle else ""
    return f"{_gib(found.memory.peak)}, a rank sends {_gib(found.sent)} a step{idle}"


def _largest_part(found: Candidate) -> str:
    name, size = max(found.memory.parts.items(), key=lambda part: part[1])
    return f"most of it is {name}, {_gib(size)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
