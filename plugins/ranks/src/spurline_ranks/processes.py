"""Ranks as processes of this machine.

The controller keeps one process per worker module that has imported torch, transformers and that module, and forks
ranks from it (`rank_server`): a group of ranks is up in seconds, where importing takes ten times as long. Each rank has
one connection for its calls; the controller hosts the store where they meet, which only this machine can reach.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from signal import Signals
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

from spurline.child import ChildProcess
from spurline.errors import RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_models.machine import why_silent
from spurline_ranks import rank_server
from spurline_ranks.calls import RankCalls
from spurline_ranks.devices import local_environments, num_threads
from spurline_ranks.group import TimeLimits
from spurline_ranks.network import LOOPBACK
from spurline_ranks.outcomes import Died, Identity, Outcome
from spurline_ranks.rank_main import RankOrder
from spurline_ranks.store import open_store

_END_TIMEOUT_S = 30.0
"""Seconds that a process may take to be gone after it was killed."""
_ANSWER_TIMEOUT_S = 2.0
"""Seconds that a rank has to say what it does, and to write its stacks."""
_STOPPED_S = 60.0
"""Seconds in which a rank takes nothing of what it is sent, or sends nothing of what it has begun to say, after which
it counts as dead."""
_SHORTEST_S = 0.01
"""Seconds of the shortest wait: none at all is without end to a socket."""
_WRITING_S = 0.1
_LAST_WORDS_BYTES = 3000
_STACKS_BYTES = 20000


class LocalRanks(RankCalls):
    """A `RankGroup` of processes of this machine."""

    def __init__(self, request: RankRequest, worker: str, arguments: tuple[Any, ...], limits: TimeLimits) -> None:
        super().__init__(request.count, limits)
        environments = local_environments(request)
        node, threads = platform.node(), num_threads(request, request.count)
        self._server = _server_for(worker.partition(":")[0], limits.start_s)
        self._store: TCPStore | None = open_store(LOOPBACK)
        self.port = port = self._store.port
        self._ranks: list[_Process] = []
        try:
            for rank, environment in enumerate(environments):
                order = RankOrder(
                    rank,
                    request.count,
                    rank,
                    node,
                    worker,
                    arguments,
                    limits,
                    request.device,
                    threads,
                    (LOOPBACK, port),
                    environment,
                )
                self._ranks.append(_Process(self._server, order))
            self._start()
        except BaseException:
            self.close()
            raise

    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        until = time.monotonic() + self._limits.call_s
        message = _pickled((method, common))
        for rank, process in enumerate(self._ranks):
            process.send(message, () if per_rank is None else (per_rank[rank],), until)
            if process.has_outcome:
                # It has not taken the call, which is over for all.
                break

    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        until = time.monotonic() + timeout_s
        waiting = {self._ranks[rank].connection: rank for rank in missing}
        outcomes: dict[int, Outcome] = {}
        while not outcomes:
            early = [connection for connection, rank in waiting.items() if self._ranks[rank].has_outcome]
            ready = early or wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                if (outcome := self._ranks[rank].take()) is not None:
                    outcomes[rank] = outcome
        return outcomes

    def _identity(self, rank: int) -> Identity:
        process = self._ranks[rank]
        return Identity(rank, self.size, process.order.node, process.pid)

    def _doing(self, missing: Sequence[int]) -> Mapping[int, str]:
        until = time.monotonic() + _ANSWER_TIMEOUT_S
        for rank in missing:
            self._ranks[rank].ask(until)
        return {rank: said for rank in missing if (said := self._ranks[rank].said(until)) is not None}

    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        before = {rank: self._ranks[rank].log_size() for rank in missing}
        for rank in missing:
            self._server.command(rank_server.STACKS, self._ranks[rank].number)
        until = time.monotonic() + _ANSWER_TIMEOUT_S
        stacks: dict[int, str] = {}
        for rank in missing:
            process = self._ranks[rank]
            stacks[rank] = process.written_since(before[rank], until) or why_silent(process.pid)
        return stacks

    def _end(self) -> None:
        for process in self._ranks:
            process.kill()
        until = time.monotonic() + _END_TIMEOUT_S
        for process in self._ranks:
            process.wait_for_end(until)

    def _release(self) -> None:
        for process in self._ranks:
            process.release()
        # Its port is closed with it.
        self._store = None


class _Process:
    """One rank, as the controller sees it."""

    def __init__(self, server: _Server, order: RankOrder) -> None:
        self.order = order
        self._server = server
        self._said: str | None = None
        self._early: Outcome | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `release`
        ours, theirs = socket.socketpair()
        with theirs:
            self._socket = ours
            self._stopped_s = min(_STOPPED_S, order.limits.call_s)
            # A process may be stopped in the middle of an answer.
            self._limit(socket.SO_RCVTIMEO, self._stopped_s)
            self.connection = Connection(ours.dup().detach())
            self.number = server.start_rank(theirs.fileno(), self._log.fileno())
        process = {
            "environment": dict(os.environ),
            "path": [place or os.getcwd() for place in sys.path],
            "folder": os.getcwd(),
            "order": order,
        }
        self._write(_pickled(process), time.monotonic() + order.limits.start_s)

    def send(self, message: bytes, own: tuple[Any, ...], until: float) -> None:
        """A call, pickled, and the arguments that only this rank gets. Where it does not read, its outcome is there.

        until: on the monotonic clock.
        """
        self._write(message, until)
        if self._early is None:
            self._write(_pickled(own), until)

    def ask(self, until: float) -> None:
        """What it does; the answer comes by `said`."""
        self._said = None
        if self._early is None:
            self._limit(socket.SO_SNDTIMEO, until - time.monotonic())
            # So short a message goes whole or not at all, and one that does not go is not answered.
            with suppress(OSError):
                self.connection.send_bytes(_pickled((None, None)))

    def said(self, until: float) -> str | None:
        """What it answered to `ask` until then, on the monotonic clock."""
        while self._said is None and self._early is None and self.connection.poll(max(0.0, until - time.monotonic())):
            self._early = self._read()
        return self._said

    def take(self) -> Outcome | None:
        """What came of the call, when the connection is ready; None when that was another message."""
        outcome, self._early = self._early or self._read(), None
        return outcome

    @property
    def pid(self) -> int:
        """0 until it is known."""
        return self._server.pids.get(self.number, 0)

    @property
    def has_outcome(self) -> bool:
        return self._early is not None

    def log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def written_since(self, start: int, until: float) -> str:
        """What it writes from `start` on, once it has not written for a moment; waits until then at most."""
        size = start
        while time.monotonic() < until and (self.log_size() == start or self.log_size() > size):
            size = self.log_size()
            time.sleep(_WRITING_S)
        return os.pread(self._log.fileno(), _STACKS_BYTES, start).decode(errors="replace").strip()

    def kill(self) -> None:
        self._server.command(rank_server.KILL, self.number)

    def wait_for_end(self, until: float) -> None:
        """Raises RunFailedError when it cannot be killed."""
        if self._server.exit_code(self.number, until) is None:
            raise RunFailedError(f"Process {self.pid} was killed, but has not ended {_END_TIMEOUT_S:g} s later.")

    def release(self) -> None:
        self.connection.close()
        self._socket.close()
        self._log.close()

    def _read(self) -> Outcome | None:
        try:
            kind, value = self.connection.recv()
        except BlockingIOError:
            return Died(f"stopped for {self._stopped_s:g} s in the middle of its answer")
        except (EOFError, OSError):
            return self._death()
        if kind == "outcome":
            return value
        assert kind == "doing", kind
        self._said = value
        return None

    def _death(self) -> Died:
        code = self._server.exit_code(self.number, time.monotonic() + _ANSWER_TIMEOUT_S)
        words = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, self.log_size() - _LAST_WORDS_BYTES)).decode(
            errors="replace"
        )
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {Signals(-code).name}"
            how += ", as the system does when memory runs out," if -code == Signals.SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        return Died(how, words.strip())

    def _write(self, message: bytes, until: float) -> None:
        limit_s = max(_SHORTEST_S, min(_STOPPED_S, until - time.monotonic()))
        self._limit(socket.SO_SNDTIMEO, limit_s)
        try:
            self.connection.send_bytes(message)
        except BlockingIOError:
            # A part of the message may be on its way: nothing can be sent any more.
            self._early = Died(f"took nothing of what it was sent for {limit_s:.1f} s, as if it was stopped,")
        except OSError:
            # It is dead, which is found by who waits for its answer.
            pass

    def _limit(self, option: int, seconds: float) -> None:
        """Of each wait to send or to receive, as the option says."""
        whole, rest = divmod(max(_SHORTEST_S, seconds), 1)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(rest * 1e6)))


def _pickled(message: object) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class _Server:
    """The process that ranks are forked from, at the controller's end."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._changed = threading.Condition()
        self._is_ready = self.has_ended = False
        self._num_started = 0
        self._codes: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        """By the number of the rank."""
        self._control, theirs = socket.socketpair()
        with theirs:
            self._child = ChildProcess(
                "spurline_ranks.rank_server",
                [theirs.fileno(), module],
                take=self._take,
                on_end=self._note_end,
                pass_fds=[theirs.fileno()],
                # A library that looks for GPUs when it is imported must not make those useless to the forks.
                environment={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )

    def wait_until_ready(self, limit_s: float) -> None:
        """Raises RunFailedError when it has not imported everything within the limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self.has_ended, limit_s)
        if self._is_ready and not self.has_ended:
            return
        if self.has_ended:
            raise RunFailedError(
                f"The process that imports {self._module} for the ranks ended: {self._child.how_it_ended}. "
                f"The end of what it wrote:\n{self._child.last_words()}"
            )
        self._child.end()
        raise RunFailedError(
            f"Importing torch, transformers and {self._module} for the ranks took longer than {limit_s:g} s, the limit "
            "by backend.start_timeout_s."
        )

    def start_rank(self, connection: int, log: int) -> int:
        """Fork a rank with these open files. Returns its number."""
        with self._changed:
            number = self._num_started
            self._num_started += 1
            # Under the lock: ranks are numbered in the order of their start.
            with suppress(OSError):
                socket.send_fds(self._control, [rank_server.COMMAND.pack(rank_server.FORK, number)], [connection, log])
        return number

    def command(self, what: bytes, number: int) -> None:
        # A server that is gone has taken its ranks with it.
        with suppress(OSError):
            self._control.send(rank_server.COMMAND.pack(what, number))

    def exit_code(self, number: int, until: float) -> int | None:
        """How the rank ended, negative for a signal; None when it has not until then, on the monotonic clock."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._codes or self.has_ended, max(0.0, until - time.monotonic()))
            return self._codes.get(number, -Signals.SIGKILL if self.has_ended else None)

    def _take(self, messages: list[Mapping[str, Any]]) -> None:
        with self._changed:
            for message in messages:
                if "ready" in message:
                    self._is_ready = True
                elif "started" in message:
                    self.pids[message["started"]] = message["pid"]
                else:
                    self._codes[message["ended"]] = message["code"]
            self._changed.notify_all()

    def _note_end(self, child: ChildProcess) -> None:
        with self._changed:
            self.has_ended = True
            self._control.close()
            self._changed.notify_all()


_servers: dict[str, _Server] = {}
_servers_lock = threading.Lock()


def _server_for(module: str, limit_s: float) -> _Server:
    """The server of a worker's module; it stays as long as this process, for the next ranks."""
    with _servers_lock:
        server = _servers.get(module)
        if server is None or server.has_ended:
            server = _servers[module] = _Server(module)
    server.wait_until_ready(limit_s)
    return server
