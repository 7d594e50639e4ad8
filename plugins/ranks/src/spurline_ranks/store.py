"""The key-value store where processes of a run meet, before they exchange tensors.

It asks nobody who they are: a process that reaches it can write what the others read, such as where to connect to.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

_TIMEOUT = timedelta(minutes=5)


def open_store(host: str, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Open a store at a free port of this address alone, where `TCPStore` by itself listens on all interfaces.

    Where no interface has the address, as behind a translation of addresses, it listens on all of them.

    Args:
        host: The address.
        timeout: Of each operation.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((str(place[0]), 0), family=family)
    except OSError:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
