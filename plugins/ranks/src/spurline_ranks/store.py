"""Open the key-value store that processes of a run use to find each other before they exchange tensors.

Every process that can connect to the store can read and change its values.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed


def open_store(host: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Open a store that listens only at this address, at a free port. A plain `TCPStore` listens on all interfaces.

    If no interface of this machine has the address, as behind NAT, the opened store listens on all interfaces.
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
