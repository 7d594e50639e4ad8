"""Which GPUs of this machine an engine sees: those that no rank of the backend has, or the very ones that ranks have,
with `placement: colocated` and where weights come by handles of their memory.

A backend that trains in this process shares its GPU with engines, as `gpu_memory_utilization` says. One with ranks has
a GPU for each, whose memory it fills while it trains.
"""

from __future__ import annotations

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_ranks.devices import gpus_beside_ranks, gpus_of_ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpus(run: RunConfig, number: int, engines: int, each: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of one of so many engines, which has `each` GPUs for itself; None: as this process.

    Raises ConfigError when the ranks leave too few.
    """
    beside = _candidates(run)
    if beside is None:
        return None
    if len(beside) < engines * each and run.source.facts.has_colocated_engines:
        raise ConfigError.at(
            "source.engine.engines",
            f"is {engines}, each on {each} GPU{'s' if each > 1 else ''}, and with placement: colocated they have the "
            f"{len(beside)} of the ranks of backend '{run.backend.name}'. Lower it, or raise backend.ranks.",
        )
    if len(beside) < engines * each:
        raise ConfigError.at(
            "source.engine.engines",
            f"is {engines}, each on {each} GPU{'s' if each > 1 else ''}, but the ranks of backend "
            f"'{run.backend.name}' leave {len(beside)} on this machine. Name the GPUs of the ranks in backend.gpus, or "
            "set backend.ranks, so that enough are left.",
        )
    return ",".join(beside[number * each : (number + 1) * each])


def shared_gpu(run: RunConfig, number: int) -> str | None:
    """The same for an engine that shares its GPU with other engines, or has none where the ranks leave none."""
    beside = _candidates(run)
    if beside is None:
        return None
    return beside[number % len(beside)] if beside else ""


def _candidates(run: RunConfig) -> tuple[str, ...] | None:
    request = run.backend.rank_request()
    beside = gpus_beside_ranks(request)
    if beside is None or request is None:
        return None
    # Each rank makes handles of memory on its own GPU, which reach no other one.
    shares = run.source.facts.has_colocated_engines or run.source.facts.transport == "cuda_ipc"
    return gpus_of_ranks(request) if shares else beside
