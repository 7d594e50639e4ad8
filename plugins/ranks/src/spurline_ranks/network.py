"""Which network interfaces the processes of a run exchange over, chosen without loading torch.

Neither gloo nor NCCL asks who connects, and by themselves both take the interface that other machines reach.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence

from spurline.errors import UserError

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo"


def variables_of_one_machine(*, peers_elsewhere: bool) -> dict[str, str]:
    """Variables of the environment that keep exchanges on this machine's loopback; those that are set are left.

    peers_elsewhere: whether some exchanges are with other machines, which then are NCCL's alone: it has one interface
    for all of them, where gloo has a default that a group may depart from.
    """
    if _INTERFACE not in (name for _, name in socket.if_nameindex()):
        return {}
    names = ("GLOO_SOCKET_IFNAME",) if peers_elsewhere else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: _INTERFACE for name in names if name not in os.environ}


def check_interfaces(process_group: str) -> None:
    """Raise UserError where the environment names interfaces that this machine does not have.

    Gloo and NCCL would name an interface at most, and never the variable.

    Args:
        process_group: The libraries that exchange, such as `cpu:gloo,cuda:nccl`.
    """
    there = [name for _, name in socket.if_nameindex()]
    if "gloo" in process_group and (chosen := os.environ.get("GLOO_SOCKET_IFNAME")):
        # An address with a label of its own, such as `eth0:1`, is one of eth0.
        names = [name.partition(":")[0] for name in chosen.split(",") if name]
        _check_interfaces("GLOO_SOCKET_IFNAME", chosen, there, {*names} <= {*there})
    # A list of beginnings of names, of whole names after `=`, or of those that are not to be taken after `^`.
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if "nccl" in process_group and chosen and not chosen.startswith("^"):
        names = [name for name in re.split("[,:]", chosen.removeprefix("=")) if name]
        takes = str.__eq__ if chosen.startswith("=") else str.startswith
        is_there = any(takes(interface, name) for interface in there for name in names)
        _check_interfaces("NCCL_SOCKET_IFNAME", chosen, there, is_there)


def _check_interfaces(variable: str, chosen: str, there: Sequence[str], is_there: bool) -> None:
    if not is_there:
        raise UserError(
            f"The environment variable {variable} is {chosen!r}, and this machine has no such network interface. It "
            f"has {', '.join(there)}: set the variable to one of them, or remove it."
        )
