"""Choose the network interfaces that the processes of a run exchange over, without loading torch.

Neither gloo nor NCCL asks who connects, and by themselves both take the interface that other machines reach.
"""

from __future__ import annotations

import os
import socket

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo"


def variables_of_one_machine(*, peers_elsewhere: bool) -> dict[str, str]:
    """Return environment variables that keep exchanges on this machine's loopback; those that are set are left.

    peers_elsewhere: whether some exchanges are with other machines. These are NCCL's alone, which has one interface for
    all of them, where gloo has a default that a group may depart from.
    """
    if _INTERFACE not in (name for _, name in socket.if_nameindex()):
        return {}
    names = ("GLOO_SOCKET_IFNAME",) if peers_elsewhere else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: _INTERFACE for name in names if name not in os.environ}
