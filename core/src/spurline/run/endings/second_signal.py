"""A second signal ends the process for certain, also where Python cannot answer it.

Python answers a signal on the main thread, between two of its instructions. A library that keeps the interpreter's
lock, a hook that catches everything or a close that waits for ever keep it from that. So a small process beside this
one is told of every signal by the C part of Python's handler, which needs no lock: it counts them, and kills.

This file is that process too, run by a bare interpreter: it imports nothing but the standard library, and at its top
only what is quick.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress

GRACE_S = 10.0
"""Seconds after the second signal that a process has to end by itself."""

TOGETHER_S = 0.1
"""Seconds within which signals are one request: `timeout` sends SIGTERM to the command and to its group, and others
pass on what the terminal has sent already. Python often answers such signals once, and means to finish its step."""

ASKS_TO_END = (signal.SIGINT, signal.SIGTERM)
"""Each of these counts. SIGHUP only does as the first: the shell and the kernel both send it when a terminal closes."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as Linux attaches them to what is written into a socket."""


def end_at_second_signal(grace_s: float = GRACE_S, together_s: float = TOGETHER_S) -> None:
    """From here on a second signal ends this process within `grace_s`, and a third at once, with all it has started.

    For a program that owns its process; call it on the main thread. What handles the signals stays as it is.
    together_s: a signal that comes sooner than this after one that counted does not count. Raises OSError when no
    process can be started, or no file opened.
    """
    import subprocess

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    limits = (str(grace_s), str(together_s))
    blocked = {*ASKS_TO_END, signal.SIGHUP}
    # What a thread blocks, its children block: it must outlive what is sent to all processes of a terminal or a job.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with theirs:
            if sys.platform == "linux":
                # Before the first byte: what is written earlier does not say by whom.
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            _keep.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(theirs.fileno()), *limits],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _keep.append(ours)
    signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)


_keep: list[object] = []
"""The process and the socket, for as long as this process lives."""


def _watch(parent: int, told: socket.socket, grace_s: float, together_s: float) -> None:
    """Wait for the end of the parent, and bring it about when two signals have not."""
    ends = [told.fileno()]
    # Where there is no such file, the parent's end closes the socket; forks of the parent hold it open, though.
    with suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        return
    count, counted_at, until = 0, -math.inf, None
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready, _, _ = select.select(ends, [], [], left)
        if ends[-1] in ready and ends[-1] != told.fileno():
            return
        if told.fileno() in ready:
            numbers, by = _receive(told)
            if not numbers:
                return
            # Ctrl-C in a terminal reaches the parent's forks too, which write into the same socket.
            for number in numbers if by in (None, parent) else b"":
                counts = number in ASKS_TO_END or (number == signal.SIGHUP and count == 0)
                if counts and time.monotonic() - counted_at >= together_s:
                    count, counted_at = count + 1, time.monotonic()
        if count >= 2 and until is None:
            until = counted_at + grace_s
        if count >= 3 or (until is not None and time.monotonic() >= until):
            why = "at the third signal" if count >= 3 else f"{grace_s:g} s after the second signal, still running"
            _kill(parent)
            # Afterwards: nobody may be reading.
            with suppress(OSError):
                os.write(2, f"\nKilled {why}, with all that it had started. What was saved stands.\n".encode())
            return


def _receive(told: socket.socket) -> tuple[bytes, int | None]:
    """Numbers of signals that came together, none when the socket is closed, and the process that got them."""
    numbers, further, _, _ = told.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
    return numbers, next((_CREDENTIALS.unpack(data)[0] for _, _, data in further), None)


def _kill(parent: int) -> None:
    """The process and all that descends from it."""
    # Before its end, which makes orphans of its children.
    family = _descendants(parent)
    os.kill(parent, signal.SIGKILL)
    for pid in family:
        with suppress(ProcessLookupError, PermissionError):
            # A leader takes those of its group with it whose own parents are gone.
            (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Processes started by this one and by those, less this process; none where the system does not list them."""
    children: dict[int, list[int]] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            with (
                suppress(ValueError, OSError),
                open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file,
            ):
                # The name, in parentheses, may hold anything; state and parent come after it.
                children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found, begun = list[int](), [root]
    while begun:
        mine = [pid for pid in children.get(begun.pop(), ()) if pid != os.getpid()]
        found += mine
        begun += mine
    return found


if __name__ == "__main__":
    _watch(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4]))
