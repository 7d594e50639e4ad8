"""The key-value store where processes of a run meet, before they exchange tensors.

It asks nobody who they are: whoever reaches it can write what the others read there, such as where to connect to.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

_TIMEOUT = timedelta(minutes=5)


def open_store(host: str, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A store of this process, at a free port of this address alone, where `TCPStore` by itself listens on all
    interfaces; on all of them where none has the address, as behind a translation of addresses.

    timeout: of each operation. Raises torch's DistError where this machine does not reach itself there.
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
