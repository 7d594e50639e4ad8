"""Choose GPUs and network interfaces for the ranks of this machine, and find the GPUs that no rank has."""

from __future__ import annotations

import os
import socket

from spurline.errors import ConfigError
from spurline.protocols.ranks import RankRequest
from spurline_models.machine import visible_gpus

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo"


def local_environments(request: RankRequest) -> list[dict[str, str]]:
    """Return the environment variables of each rank here. With `cuda` each sees one GPU, otherwise none.

    Raises:
        ConfigError: If there are too few GPUs.
    """
    gpus = gpus_of_ranks(request) if request.device == "cuda" else [""] * request.count
    common = {**variables_of_one_machine(peers_elsewhere=request.peers_elsewhere), **request.variables}
    return [{**common, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]


def gpus_of_ranks(request: RankRequest) -> tuple[str, ...]:
    """Return the GPU of each rank on this machine, as CUDA_VISIBLE_DEVICES names it. Raises ConfigError if too few."""
    seen = visible_gpus()
    if wrong := [gpu for gpu in request.gpus or () if gpu >= len(seen)]:
        exists = f"this machine has {', '.join(map(str, range(len(seen))))}" if seen else "this machine has none"
        raise ConfigError.at("backend.gpus", f"names GPU {wrong[0]}, but {exists}. They are numbered as CUDA does.")
    usable = seen if request.gpus is None else tuple(seen[gpu] for gpu in request.gpus)
    if request.count > len(usable):
        fix = f"Set it to {len(usable)}, or device: cpu." if usable else "Set device: cpu."
        raise ConfigError.at(
            "backend.ranks", f"asks for {request.count} ranks with a GPU each, and there are {len(usable)}. {fix}"
        )
    return usable[: request.count]


def gpus_beside_ranks(request: RankRequest | None) -> tuple[str, ...] | None:
    """Return the GPUs of this machine that no rank has, as CUDA_VISIBLE_DEVICES names them.

    None if no rank has a GPU of this machine, or the cluster gives them out.
    """
    if request is None or request.device != "cuda" or request.launch != "local":
        return None
    taken = gpus_of_ranks(request)
    return tuple(gpu for gpu in visible_gpus() if gpu not in taken)


def variables_of_one_machine(*, peers_elsewhere: bool) -> dict[str, str]:
    """Return environment variables that keep exchanges on this machine's loopback, without those that are set.

    Neither gloo nor NCCL authenticates peers, and by default both take the interface that other machines reach.

    Args:
        peers_elsewhere: Whether NCCL also exchanges with other machines: it has one interface for all groups.
    """
    if _INTERFACE not in (name for _, name in socket.if_nameindex()):
        return {}
    names = ("GLOO_SOCKET_IFNAME",) if peers_elsewhere else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: _INTERFACE for name in names if name not in os.environ}
