"""Choose the GPUs of this machine that an engine sees.

By default, an engine gets GPUs that no rank of the backend uses. With `placement: colocated` or `weight_sync:
cuda_ipc`, it gets the GPUs of the ranks. If the backend trains in this process, it shares its GPU with the engines.
"""

from __future__ import annotations

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_ranks.devices import gpus_beside_ranks, gpus_of_ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpus(run: RunConfig, number: int, engines: int, each: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for an engine that gets `each` GPUs of its own, or None to inherit the variable.

    Raises:
        ConfigError: If there are too few GPUs.
    """
    candidates = _candidates(run)
    if candidates is None:
        return None
    if len(candidates) < engines * each:
        whose = "have" if run.source.facts.has_colocated_engines else "leave"
        raise ConfigError.at(
            "source.engine.engines",
            f"is {engines}, each on {each} GPU{'s' if each > 1 else ''}, but the ranks of backend "
            f"'{run.backend.name}' {whose} {len(candidates)} on this machine. Lower it, or change backend.ranks or "
            "backend.gpus.",
        )
    return ",".join(candidates[number * each : (number + 1) * each])


def shared_gpu(run: RunConfig, number: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for an engine that may share a GPU with other engines, or None to inherit it."""
    candidates = _candidates(run)
    if candidates is None:
        return None
    return candidates[number % len(candidates)] if candidates else ""


def _candidates(run: RunConfig) -> tuple[str, ...] | None:
    request = run.backend.rank_request()
    beside = gpus_beside_ranks(request)
    if beside is None or request is None:
        return None
    # A CUDA IPC handle of a rank's memory works only on the GPU of that rank.
    shares = run.source.facts.has_colocated_engines or run.source.facts.transport == "cuda_ipc"
    return gpus_of_ranks(request) if shares else beside
