"""Run ranks as processes of this machine.

For each worker module the controller keeps a server process (`rank_server`), which has imported torch, transformers and
the module. Ranks are forked from the server, so they start without waiting for imports. Each rank has one connection
for its calls. The controller hosts the store that ranks use to find each other. Only this machine can reach the store.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

from spurline.child import ChildProcess, kill_group
from spurline.errors import RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_ranks.devices import LOOPBACK, local_environments
from spurline_ranks.group import RankGroup, TimeLimits
from spurline_ranks.logs import last_words, stacks_of
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, packed, unpacked
from spurline_ranks.rank_main import RankOrder
from spurline_ranks.rank_server import PID_BYTES
from spurline_ranks.store import open_store

_END_TIMEOUT_S = 30.0
"""Seconds within which a killed process must have ended."""
_ANSWER_TIMEOUT_S = 2.0
"""Seconds that a rank has to report its work, or to write its stacks."""
_FORK_TIMEOUT_S = 60.0


class LocalRanks(RankGroup):
    """The ranks of this machine."""

    def __init__(self, request: RankRequest, worker: str, arguments: tuple[Any, ...], limits: TimeLimits) -> None:
        super().__init__(request.count, limits)
        environments = local_environments(request)
        node = platform.node()
        server = _server_for(worker.partition(":")[0], limits.start_s)
        self._store: TCPStore | None = open_store(LOOPBACK)
        self.port = port = self._store.port
        self._outcomes: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self._ranks: list[_Process] = []
        try:
            for rank, environment in enumerate(environments):
                order = RankOrder(
                    request, rank, rank, request.count, node, worker, arguments, limits, (LOOPBACK, port), environment
                )
                self._ranks.append(_Process(server, order, self._outcomes))
            self._start()
        except BaseException:
            self.close()
            raise

    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        message = packed((method, common))
        for rank, process in enumerate(self._ranks):
            own = packed(() if per_rank is None else (per_rank[rank],))
            if not process.send(message, own):
                # The rank counts as dead, so `_wait` gets its outcome and the call fails.
                break

    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        try:
            return dict([self._outcomes.get(timeout=timeout_s)])
        except Empty:
            return {}

    def _identity(self, rank: int) -> Identity:
        process = self._ranks[rank]
        return Identity(rank, self.size, process.order.node, process.pid)

    def _doing(self, missing: Sequence[int]) -> Mapping[int, str]:
        until = time.monotonic() + _ANSWER_TIMEOUT_S
        for rank in missing:
            self._ranks[rank].ask()
        return {rank: said for rank in missing if (said := self._ranks[rank].said(until)) is not None}

    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        return {rank: self._ranks[rank].stacks() for rank in missing}

    def _end(self) -> None:
        for process in self._ranks:
            process.kill()
        until = time.monotonic() + _END_TIMEOUT_S
        for process in self._ranks:
            process.wait_for_end(until)

    def _release(self) -> None:
        for process in self._ranks:
            process.release()
        self._store = None


class _Process:
    """The controller's handle of one rank. A thread receives its messages."""

    def __init__(self, server: _Server, order: RankOrder, outcomes: SimpleQueue[tuple[int, Outcome]]) -> None:
        self.order = order
        self.code: int | None = None
        """The exit code of the process, negative if a signal killed it. None while the process runs."""
        self.ended = threading.Event()
        self._outcomes = outcomes
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `release`
        ours, theirs = socket.socketpair()
        with theirs:
            # A rank that reads nothing for this time counts as dead.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(order.limits.call_s) or 1, 0))
            self._connection = Connection(ours.detach())
            self.pid = server.fork(self, theirs.fileno(), self._log.fileno())
        self._reader = threading.Thread(target=self._read, name=f"rank-{order.rank}", daemon=True)
        self._reader.start()
        path = [place or os.getcwd() for place in sys.path]
        self.send(packed((dict(os.environ), path, os.getcwd(), order)))

    def send(self, *messages: bytes) -> bool:
        """Send the messages of one call. If the rank does not read them in time, report `Died` and return False."""
        try:
            for message in messages:
                self._connection.send_bytes(message)
        except BlockingIOError:
            how = f"read nothing for {self.order.limits.call_s:g} s (backend.call_timeout_s), as if it was stopped,"
            self._outcomes.put((self.order.rank, Died(how)))
            return False
        except OSError:
            # The rank is dead, and the reader thread reports that.
            pass
        return True

    def ask(self) -> None:
        """Ask the rank for its current work. `said` returns the answer."""
        self._answers = SimpleQueue()
        with suppress(OSError):
            self._connection.send_bytes(packed((None, None)))

    def said(self, until: float) -> str | None:
        """Wait for the answer to `ask` until this monotonic time. Return the answer, or None if it is late."""
        try:
            return self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return None

    def stacks(self) -> str:
        return stacks_of(self.pid, self._log.fileno(), _ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        if not self.ended.is_set():
            kill_group(self.pid)

    def wait_for_end(self, until: float) -> None:
        """Wait for the end of the killed process. Raises RunFailedError if it still runs at this monotonic time."""
        if not self.ended.wait(max(0.0, until - time.monotonic())):
            raise RunFailedError(f"Process {self.pid} was killed, but has not ended {_END_TIMEOUT_S:g} s later.")

    def release(self) -> None:
        # The process has ended, so the reader ends too.
        self._reader.join(_ANSWER_TIMEOUT_S)
        self._connection.close()
        self._log.close()

    def _read(self) -> None:
        try:
            while True:
                said = unpacked(self._connection.recv_bytes())
                if isinstance(said, str):
                    self._answers.put(said)
                else:
                    self._outcomes.put((self.order.rank, said))
        except (EOFError, OSError):
            self.ended.wait(_ANSWER_TIMEOUT_S)
            self._outcomes.put((self.order.rank, Died(self._how_it_died(), last_words(self._log.fileno()))))
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            self._outcomes.put((self.order.rank, Raised.of(error)))

    def _how_it_died(self) -> str:
        if self.code is None:
            return "closed its connection"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        by_memory = ", as the system does when memory runs out," if self.code == -signal.SIGKILL else ""
        # Real-time signals have no names.
        known = {int(each): each.name for each in signal.Signals}
        return f"was killed by {known.get(-self.code, f'signal {-self.code}')}{by_memory}"


class _Server:
    """The controller's handle of the process that ranks are forked from."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._ready = threading.Event()
        self.has_ended = False
        self._lock = threading.Lock()
        self._ranks: dict[int, _Process] = {}
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_FORK_TIMEOUT_S)
        with theirs:
            self._child = ChildProcess(
                "spurline_ranks.rank_server",
                [theirs.fileno(), module],
                take=self._take,
                on_end=self._note_end,
                pass_fds=[theirs.fileno()],
                # Some libraries look for GPUs on import. This setting keeps them from initializing CUDA, which would
                # make CUDA unusable in forks.
                environment={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait until the server has imported its modules. Raises RunFailedError if it fails or takes too long."""
        self._ready.wait(limit_s)
        if self.has_ended:
            raise RunFailedError(
                f"The process that imports {self._module} for the ranks ended: {self._child.how_it_ended}. "
                f"The end of what it wrote:\n{self._child.last_words()}"
            )
        if not self._ready.is_set():
            self._child.end()
            raise RunFailedError(
                f"Importing torch, transformers and {self._module} for the ranks took longer than {limit_s:g} s "
                "(backend.start_timeout_s)."
            )

    def fork(self, rank: _Process, connection: int, log: int) -> int:
        """Fork a rank, and give it these two open files. Return the rank's process id."""
        with self._lock:
            try:
                socket.send_fds(self._control, [b"f"], [connection, log])
                answer = self._control.recv(PID_BYTES)
            except OSError:
                answer = b""
            if not answer:
                # A late answer would be mistaken for the answer to the next request.
                self.has_ended = True
                self._child.kill()
                raise RunFailedError(f"The process that ranks are forked from did not fork: {self._child.how_it_ended}")
            pid = int.from_bytes(answer)
            self._ranks[pid] = rank
            return pid

    def _take(self, messages: list[Mapping[str, Any]]) -> None:
        for message in messages:
            if "ready" in message:
                self._ready.set()
                continue
            with self._lock:
                rank = self._ranks.pop(message["pid"])
            rank.code = message["code"]
            rank.ended.set()

    def _note_end(self, child: ChildProcess) -> None:
        self.has_ended = True
        self._ready.set()
        self._control.close()
        with self._lock:
            # Linux has killed the ranks with the process that they were forked from.
            for rank in self._ranks.values():
                rank.code = -signal.SIGKILL
                rank.ended.set()


_servers: dict[str, _Server] = {}
_servers_lock = threading.Lock()


def _server_for(module: str, limit_s: float) -> _Server:
    """Return the server for a worker's module. The server lives as long as this process."""
    with _servers_lock:
        server = _servers.get(module)
        if server is None or server.has_ended:
            server = _servers[module] = _Server(module)
    server.wait_until_ready(limit_s)
    return server
