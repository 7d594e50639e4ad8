"""Choose the GPUs of this machine that an engine sees.

By default, an engine gets GPUs on which the backend does not train. With `placement: colocated` or `weight_sync:
cuda_ipc`, it gets the GPUs of the backend. So does an engine beside a backend in this process, if there is one GPU.
"""

from __future__ import annotations

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_async_rl.engines.configs import shares_trainers_gpus, trains_on_gpu_here
from spurline_ranks import devices

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_gpus(run: RunConfig, number: int, engines: int, each: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for an engine that gets `each` GPUs of its own, or None to inherit the variable.

    Raises:
        ConfigError: If there are too few GPUs.
    """
    candidates = _candidates(run)
    if candidates is None:
        return None
    shares = shares_trainers_gpus(run)
    if shares and each == 1 and trains_on_gpu_here(run):
        return candidates[0]
    if len(candidates) < engines * each:
        raise ConfigError.at(
            "source.engine.engines",
            f"is {engines}, each on {each} GPU{'s' if each > 1 else ''}, but backend '{run.backend.name}' "
            f"{'has' if shares else 'leaves'} {len(candidates)} on this machine. Lower it, or give the backend fewer.",
        )
    return ",".join(candidates[number * each : (number + 1) * each])


def shared_gpu(run: RunConfig, number: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for an engine that may share a GPU with other engines, or None to inherit it."""
    candidates = _candidates(run)
    if candidates is None:
        return None
    return candidates[number % len(candidates)] if candidates else ""


def _candidates(run: RunConfig) -> tuple[str, ...] | None:
    """Return the GPUs from which engines get theirs, or None if the backend uses no GPU, or a cluster assigns them."""
    request = run.backend.rank_request()
    if trains_on_gpu_here(run):
        # A backend in this process trains on the first GPU.
        taken = devices.visible_gpus()[:1]
    elif request is not None and request.device == "cuda" and request.launch == "local":
        taken = devices.gpus_of_ranks(request)
    else:
        return None
    return taken if shares_trainers_gpus(run) else tuple(gpu for gpu in devices.visible_gpus() if gpu not in taken)
