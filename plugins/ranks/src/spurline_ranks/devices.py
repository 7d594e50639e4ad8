"""Which GPU and how many threads each rank of this machine gets, and which GPUs are left for others."""

from __future__ import annotations

from spurline.errors import ConfigError
from spurline.protocols.ranks import RankRequest
from spurline_models.machine import num_cores, visible_gpus
from spurline_ranks.network import variables_of_one_machine


def local_environments(request: RankRequest) -> list[dict[str, str]]:
    """Return the environment variables of each rank here: with `cuda` it sees one GPU, which is its own, else none.

    Raises ConfigError when there are too few GPUs.
    """
    gpus = gpus_of_ranks(request) if request.device == "cuda" else [""] * request.count
    common = {**variables_of_one_machine(peers_elsewhere=request.peers_elsewhere), **request.variables}
    return [{**common, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]


def gpus_of_ranks(request: RankRequest) -> tuple[str, ...]:
    """Return the GPUs of ranks on this machine, by rank, as CUDA_VISIBLE_DEVICES names them.

    Raises ConfigError when there are too few.
    """
    seen = visible_gpus()
    if wrong := [gpu for gpu in request.gpus or () if gpu >= len(seen)]:
        exists = f"this machine has {', '.join(map(str, range(len(seen))))}" if seen else "this machine has none"
        raise ConfigError.at("backend.gpus", f"names GPU {wrong[0]}, but {exists}. They are numbered as CUDA does.")
    usable = seen if request.gpus is None else tuple(seen[gpu] for gpu in request.gpus)
    if request.count > len(usable):
        raise ConfigError.at(
            "backend.ranks",
            f"asks for {request.count} ranks with a GPU each, and there are {len(usable)}. "
            f"Set it to {len(usable)}, or device: cpu."
            if usable
            else f"asks for {request.count} ranks with a GPU each, and there is none. Set device: cpu.",
        )
    return usable[: request.count]


def gpus_beside_ranks(request: RankRequest | None) -> tuple[str, ...] | None:
    """Return the GPUs of this machine that no rank has, as CUDA_VISIBLE_DEVICES names them.

    None where no rank has a GPU of this machine, or the cluster gives them out: then nothing is to be kept apart here.
    """
    if request is None or request.device != "cuda" or request.launch != "local":
        return None
    taken = gpus_of_ranks(request)
    return tuple(gpu for gpu in visible_gpus() if gpu not in taken)


def num_threads(request: RankRequest, local_ranks: int) -> int:
    """Return the CPU threads of a rank, of `local_ranks` on this machine."""
    return request.num_threads or max(1, num_cores() // local_ranks)
