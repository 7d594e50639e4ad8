"""Describe for `spurline plan` how many ranks each machine has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spurline_models import device_profile
from spurline_models.machine import num_gpus
from spurline_ranks.configs import RankBackendConfig


def ranks_of_machine(config: RankBackendConfig) -> int | None:
    """Return the number of ranks on the fullest machine, or None if it is not known, as on some clusters."""
    if config.launch == "local" or config.num_ranks == 1:
        return config.num_ranks
    # All machines of the cluster are assumed to have as many GPUs as this machine.
    fitting = config.ranks_per_node or (num_gpus() if config.on == "cuda" else 0)
    return min(config.num_ranks, fitting) if fitting else None


def device_bytes(config: RankBackendConfig) -> int | None:
    """Return the memory that one rank has on this machine, or None if the config trains on other machines."""
    if config.missing_here() or config.launch == "ray":
        return None
    memory = device_profile.device_bytes(config.on)
    return memory // config.num_ranks if config.on == "cpu" else memory


def describe_ranks(config: RankBackendConfig, groups: str) -> Iterator[str]:
    """Yield sentences about the ranks and their machines. `groups` is a text such as `4 data x 2 context`."""
    local = ranks_of_machine(config)
    if config.launch == "local":
        where = "this machine"
    elif local is None:
        where = "a Ray cluster"
    else:
        where = f"{counted(-(-config.num_ranks // local), 'machine')} of a Ray cluster"
    yield f"{counted(config.num_ranks, 'rank')} on {where}, {config.device_words}: {groups}"
    if local is None:
        yield "the number of machines is not known: set backend.ranks_per_node to plan for it"
    if config.device == "auto" and config.on == "cpu":
        yield (
            "there is no GPU here, so ranks compute on the CPU in fp32. To plan for GPUs of another machine: "
            "--set backend.device=cuda --set backend.ranks=8 --gpu-gib 80"
        )


def counted(count: int, noun: str) -> str:
    """Return a text such as `1 rank` or `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def smaller_microbatches(config: RankBackendConfig, row_length: int, tokens: int) -> Iterator[Mapping[str, Any]]:
    """Yield settings with smaller and smaller micro-batches, down to one row."""
    share = math.ceil(tokens / config.layout().data)
    bound = min(share, config.max_tokens_per_microbatch or share)
    while bound > row_length:
        bound = max(row_length, bound // 2)
        yield {"max_tokens_per_microbatch": bound}


def more_ranks(config: RankBackendConfig) -> Iterator[Mapping[str, Any]]:
    """Yield settings with more ranks. If `gpus` is set, it limits the number of ranks."""
    for ranks in (config.num_ranks * factor for factor in (2, 4, 8)):
        if config.gpus is None or ranks <= len(config.gpus):
            yield {"ranks": ranks}
