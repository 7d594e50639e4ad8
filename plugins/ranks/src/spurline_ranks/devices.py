"""Choose GPUs and network interfaces for the ranks of this machine."""

from __future__ import annotations

import os
import socket

from spurline.errors import ConfigError
from spurline.protocols.ranks import RankRequest
from spurline_models.machine import visible_gpus as visible_gpus

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo"


def local_environments(request: RankRequest) -> list[dict[str, str]]:
    """Return the environment variables of each rank on this machine. On `cuda` each rank sees one GPU, else none.

    Raises:
        ConfigError: If there are too few GPUs.
    """
    gpus = gpus_of_ranks(request) if request.device == "cuda" else [""] * request.count
    # Ranks of a cluster may have peers on other machines.
    of_machine = {} if request.launch == "ray" else variables_of_one_machine(peers_elsewhere=request.peers_elsewhere)
    return [{**of_machine, **request.variables, "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]


def gpus_of_ranks(request: RankRequest) -> tuple[str, ...]:
    """Return the GPU of each rank, named as in CUDA_VISIBLE_DEVICES. Raises ConfigError if there are too few."""
    seen = visible_gpus()
    if wrong := [gpu for gpu in request.gpus or () if gpu >= len(seen)]:
        exists = f"this machine has {', '.join(map(str, range(len(seen))))}" if seen else "this machine has none"
        raise ConfigError.at("backend.gpus", f"names GPU {wrong[0]}, but {exists}. Number GPUs as CUDA does.")
    usable = seen if request.gpus is None else tuple(seen[gpu] for gpu in request.gpus)
    if request.count > len(usable):
        fix = f"Set it to {len(usable)}, or device: cpu." if usable else "Set device: cpu."
        raise ConfigError.at(
            "backend.ranks", f"asks for {request.count} ranks with a GPU each, and there are {len(usable)} GPUs. {fix}"
        )
    return usable[: request.count]


def variables_of_one_machine(*, peers_elsewhere: bool) -> dict[str, str]:
    """Return environment variables that limit exchanges to the loopback interface, except those that are set already.

    Neither gloo nor NCCL authenticates peers, and by default other machines can reach both.

    Args:
        peers_elsewhere: Whether NCCL also connects to other machines. If so, NCCL is not limited to loopback, since it
            uses one interface for all groups.
    """
    if _INTERFACE not in (name for _, name in socket.if_nameindex()):
        return {}
    names = ("GLOO_SOCKET_IFNAME",) if peers_elsewhere else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: _INTERFACE for name in names if name not in os.environ}
