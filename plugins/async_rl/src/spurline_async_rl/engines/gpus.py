"""Choose the GPUs of this machine that an engine sees.

They are those that no rank of the backend has, or, with `placement: colocated` and where weights come by handles of
memory, those of the ranks. A backend that trains in this process shares its GPU with engines, by
`gpu_memory_utilization`.
"""

from __future__ import annotations

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_ranks.devices import gpus_beside_ranks, gpus_of_ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpus(run: RunConfig, number: int, engines: int, each: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of an engine with `each` GPUs for itself; None leaves it as it is here.

    Raises ConfigError if the ranks leave too few.
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
    """Return the same for an engine that shares a GPU with other engines; "" if the ranks leave none."""
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
