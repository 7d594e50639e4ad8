"""Run a program. When it ends, end all processes that it has started.

The run starts one supervisor for the program of each attempt: `python -I -S supervisor.py RUN GRACE MEMORY PROGRAM ...`
with the arguments of `main`. On Linux the supervisor is the subreaper of all descendants of the program, including
those that leave the program's session or lose their parent. It ends all of them when the program ends, when it gets
SIGTERM itself, or when the run dies. If the supervisor is killed, the kernel kills the program, and the module `agents`
kills the other processes. On other systems the supervisor ends only the program's process group.

The supervisor keeps only the end of the program's output, so that a long output fills neither memory nor disk. It exits
with the program's exit code, or with 128 + the number of the signal that killed the program. It imports only the
standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress

STDOUT_KEPT = 2**20
"""Number of bytes that are kept from the end of standard output."""
STDERR_KEPT = 2000
CANNOT_BE_RUN = 127
_READ = 2**16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ON_LINUX = sys.platform == "linux"


class Tail:
    """A thread that reads a pipe to its end and keeps the last bytes."""

    def __init__(self, kept: int) -> None:
        self._reader, self.writer = os.pipe()
        self._kept = kept
        self._data = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """Begin to read. Call this after the fork, when the program has the pipe's other end."""
        os.close(self.writer)
        self._thread.start()

    def copy_to(self, target: int) -> None:
        """Wait up to 5 s for bytes that are still in the pipe, and write the kept bytes to this file descriptor."""
        self._thread.join(5.0)
        data = memoryview(bytes(self._data[-self._kept :]))
        while data:
            data = data[os.write(target, data) :]

    def _read(self) -> None:
        while chunk := os.read(self._reader, _READ):
            self._data += chunk
            if len(self._data) > 2 * self._kept:
                del self._data[: -self._kept]


def main(run: int, grace_s: float, memory_bytes: int, command: list[str]) -> int:
    """Run a program, end its processes, and return its exit code.

    Args:
        run: Process id of the parent.
        grace_s: Seconds that the program may take to end by itself after SIGTERM.
        memory_bytes: Address space of each process of the program, or 0 for no limit.
        command: The program and its arguments.
    """
    if _ON_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != run:
            return 128 + signal.SIGTERM
    printed, complaints = Tail(STDOUT_KEPT), Tail(STDERR_KEPT)
    # Block SIGTERM until its handler is set. Before that, SIGTERM would end the supervisor but not the program.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    supervisor, program = os.getpid(), os.fork()
    if program == 0:
        _become(command, supervisor, printed.writer, complaints.writer, memory_bytes)
    with suppress(OSError):
        # The program makes the same call, so the group exists no matter which process is faster.
        os.setpgid(program, program)
    signal.signal(signal.SIGALRM, lambda *_: _kill(program))
    signal.signal(signal.SIGTERM, lambda *_: _ask_to_end(program, grace_s))
    try:
        printed.start()
        complaints.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        code = _wait_for(program)
    finally:
        # No signal may interrupt the cleanup.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
        _signal_group(program, signal.SIGKILL)
        _end_descendants()
    complaints.copy_to(sys.stderr.fileno())
    printed.copy_to(sys.stdout.fileno())
    return code


def _become(command: list[str], supervisor: int, stdout: int, stderr: int, memory_bytes: int) -> None:
    """Replace this process, which is a new child of the supervisor, with the program."""
    try:
        os.setpgid(0, 0)
        if _ON_LINUX:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(CANNOT_BE_RUN)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        # Python ignores these signals. Without this, the program would ignore them too.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execvp(command[0], command)
    except Exception as error:  # noqa: BLE001 - the error is reported, and this copy of the supervisor exits
        os.write(2, f"{command[0]} cannot be run: {error}\n".encode(errors="replace"))
    finally:
        os._exit(CANNOT_BE_RUN)


def _ask_to_end(program: int, grace_s: float) -> None:
    _signal_group(program, signal.SIGTERM)
    # A stopped process does not react to SIGTERM.
    _signal_group(program, signal.SIGCONT)
    signal.setitimer(signal.ITIMER_REAL, max(grace_s, 1e-3))


def _wait_for(program: int) -> int:
    """Wait for the program and return its exit code. Reap descendants that have lost their parent."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    """Kill descendants until none is left, even if they fork fast. Orphans become children of this process."""
    pause_s = 0.0
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            continue
        for process in _descendants():
            _kill(process)
        time.sleep(pause_s)
        # Wait longer each time: a process may wait for a disk before it ends, or belong to another user.
        pause_s = min(pause_s + 0.001, 0.1)


def _descendants() -> list[int]:
    """Return the process ids of all descendants, the nearest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _ON_LINUX else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The line is: pid (name) state parent ... The name may contain spaces and parentheses.
                children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, ())
    return found[1:]


def _kill(process: int) -> None:
    # The process may have ended, or belong to another user.
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    # The group may be gone. Some systems report PermissionError if all its processes have ended but are not reaped.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
