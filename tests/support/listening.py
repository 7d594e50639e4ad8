"""What processes listen on, whether others than this machine can reach it, and a port that is free."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str, int]]:
    """Return (process, address, port) of each listening socket."""
    found: set[tuple[str, str, int]] = set()
    for process in processes:
        try:
            sockets, name = process.net_connections("inet"), f"{process.name()} {process.pid}"
        except psutil.NoSuchProcess:
            continue
        found |= {(name, one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def reachable(sockets: Iterable[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Return the listening sockets that are not on the loopback."""
    return [one for one in sockets if not _plain(one[1]).is_loopback]


def free_port() -> int:
    """Return a free port below those that Linux hands out, so that nothing else gets it before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are in use")


def _plain(address: str) -> IPv4Address | IPv6Address:
    parsed = ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed
