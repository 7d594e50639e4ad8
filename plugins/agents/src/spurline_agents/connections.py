"""Connections of the server: how many there are, how long the head of a request may take, and how much may be held.

Place on the way: socket -> Connection -> aiohttp's parser -> the server's handler, which says when a request begins and
ends. aiohttp itself waits as long as a client likes, and takes as many as come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from aiohttp import web

HEAD_TIMEOUT_S = 60.0
"""Seconds from a connection, or the first byte of a further request on it, to the end of the request's head."""
_GRACE_S = 1.0
"""A loop that has stood still for long first reads what has come meanwhile."""
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nx-should-retry: true\r\n"
    b'Connection: close\r\n\r\n{"error": {"message": "There are too many connections '
    b'(environment.max_connections).", "type": "server_error", "param": null, "code": "too_many_connections"}}'
)


class Buffered:
    """Bytes held of requests that are on their way. most: of them; whole: what these are counted in too."""

    def __init__(self, most: int, whole: Buffered | None = None) -> None:
        self._most = most
        self._whole = whole
        self.num_bytes = 0

    def add(self, count: int) -> bool:
        """Whether there was room for so many more."""
        if self.num_bytes + count > self._most or (self._whole is not None and not self._whole.add(count)):
            return False
        self.num_bytes += count
        return True

    def remove(self, count: int) -> None:
        """They are held no longer."""
        self.num_bytes -= count
        if self._whole is not None:
            self._whole.remove(count)


class Incoming:
    """The body of one request while it comes and is read."""

    def __init__(self, buffered: Buffered) -> None:
        self._buffered = buffered
        self.raw = bytearray()

    def add(self, part: bytes) -> bool:
        """Whether there was room for this part of it too."""
        if not self._buffered.add(len(part)):
            return False
        self.raw += part
        return True

    def release(self) -> None:
        """It is needed no more."""
        self._buffered.remove(len(self.raw))
        # Not cleared: a thread may be reading it for a request that is no more.
        self.raw = bytearray()


class Connections:
    """Makes the protocol of each connection. make_handler: aiohttp's. buffered: counts heads that are not complete."""

    def __init__(self, most: int, buffered: Buffered, make_handler: Callable[[], asyncio.Protocol]) -> None:
        self._most = most
        self.buffered = buffered
        self._make_handler = make_handler
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        # Those without a request under way, the one that has been so for longest first.
        self._idle: dict[_Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._make_handler())

    @contextmanager
    def serving(self, request: web.BaseRequest) -> Generator[None, None, None]:
        """This request is under way."""
        transport = request.transport
        connection = None if transport is None else self._open.get(transport)
        if connection is None:
            # It is gone already.
            yield
            return
        self._idle.pop(connection, None)
        connection.stop_waiting()
        try:
            yield
        finally:
            if transport in self._open:
                self._idle[connection] = None
                connection.wait_for_next(body_is_whole=request.content.is_eof())

    def opened(self, connection: _Connection, transport: asyncio.Transport) -> bool:
        """Whether there is room for one more, which may be made."""
        if len(self._open) >= self._most:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            oldest.abort()
        self._open[transport] = connection
        self._idle[connection] = None
        return True

    def closed(self, connection: _Connection, transport: asyncio.BaseTransport) -> None:
        """This one is no more."""
        self._open.pop(transport, None)
        self._idle.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Passes on what comes to aiohttp's handler."""

    def __init__(self, connections: Connections, handler: asyncio.Protocol) -> None:
        self._connections = connections
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._num_held = 0
        self.is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._connections.opened(self, transport):
            transport.write(_BUSY)
            transport.close()
            return
        self._transport = transport
        self._wait_for_head()
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if not self.is_serving:
            if self._deadline is None:
                self._wait_for_head()
            if not self._connections.buffered.add(len(data)):
                self.abort()
                return
            self._num_held += len(data)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return
        self.stop_waiting()
        self._connections.closed(self, self._transport)
        self._handler.connection_lost(exc)

    def stop_waiting(self) -> None:
        """A request is whole up to its body, or none will come."""
        self.is_serving = True
        self._connections.buffered.remove(self._num_held)
        self._num_held = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def wait_for_next(self, *, body_is_whole: bool) -> None:
        """The request is answered. What is missing of its body is thrown away as it comes: it is part of no head, and
        counts as no bytes that are held."""
        self.is_serving = not body_is_whole
        if not body_is_whole:
            self._wait_for_head()

    def abort(self) -> None:
        """Close it at once, whatever is still to be sent."""
        assert self._transport is not None
        self._connections.closed(self, self._transport)
        self._transport.abort()

    def _wait_for_head(self) -> None:
        loop = asyncio.get_running_loop()

        def has_come_too_late() -> None:
            self._deadline = loop.call_later(_GRACE_S, self.abort)

        self._deadline = loop.call_later(HEAD_TIMEOUT_S, has_come_too_late)
