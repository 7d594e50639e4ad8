"""How ranks lie on machines, in numbers and in words, for `spurline plan`."""

from __future__ import annotations

from collections.abc import Iterator

from spurline_models import device_profile
from spurline_models.machine import num_gpus
from spurline_ranks.configs import RankBackendConfig


def ranks_of_machine(config: RankBackendConfig) -> int | None:
    """Ranks of the fullest machine; None for those of a cluster that neither settings nor GPUs of this machine tell."""
    if config.launch == "local" or config.num_ranks == 1:
        return config.num_ranks
    # A machine of the cluster that has GPUs is taken for one like the others.
    fitting = config.ranks_per_node or (num_gpus() if config.on == "cuda" else 0)
    return min(config.num_ranks, fitting) if fitting else None


def device_bytes(config: RankBackendConfig) -> int | None:
    """Memory that one rank has here; None for a config that trains elsewhere."""
    if config.missing_here() or config.launch == "ray":
        return None
    memory = device_profile.device_bytes(config.on)
    return memory // config.num_ranks if config.on == "cpu" else memory


def describe_ranks(config: RankBackendConfig, groups: str) -> Iterator[str]:
    """Sentences on where the ranks are. groups: what they are the product of, as `4 data x 2 context`."""
    local = ranks_of_machine(config)
    yield f"{counted(config.num_ranks, 'rank')} on {_where(config, local)}, {config.on}, {config.computes_in}: {groups}"
    if local is None:
        yield "on how many machines they are, only the cluster knows: set backend.ranks_per_node to plan for it"


def describe_lack_of_gpus(config: RankBackendConfig) -> Iterator[str]:
    """A sentence where `auto` stands for the CPU."""
    if config.device == "auto" and config.on == "cpu":
        yield (
            "there is no GPU here, so these are processes on the CPU, and all memory is that of fp32. To plan for GPUs "
            "elsewhere: --set backend.device=cuda --set backend.ranks=8 --gpu-gib 80"
        )


def _where(config: RankBackendConfig, local: int | None) -> str:
    if config.launch == "local":
        return "this machine"
    if local is None:
        return "a Ray cluster"
    return f"{counted(-(-config.num_ranks // local), 'machine')} of a Ray cluster"


def counted(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in order; none of 0."""
    return [size for size in range(1, number + 1) if number % size == 0]
