"""A second signal ends a process, whatever that is doing. The programs here are ended by nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from run_helpers import wait_for

from spurline.run.endings import second_signal

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is left")]

BEGIN = """
import os, signal, subprocess, sys, threading, time
from collections import deque
from itertools import repeat
sys.path.insert(0, {folder!r})
from second_signal import end_at_second_signal

def child(code, **options):
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, text=True, **options)

signal.signal(signal.SIGINT, signal.default_int_handler)
end_at_second_signal({grace_s}, {together_s})
"""
IN_C = """
signal.signal(signal.SIGINT, lambda *_: None)
print("ready", flush=True)
# Takes no signal and never lets another thread run.
deque(repeat(0), maxlen=0)
"""
GOES_ON = """
signal.signal(signal.SIGINT, lambda *_: None)
print("ready", flush=True)
while True:
    time.sleep(100)
"""
ENDS_IN_ORDER = """
try:
    print("ready", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    try:
        print("closing", flush=True)
        time.sleep(0.2)
    except KeyboardInterrupt:
        time.sleep(0.2)
sys.exit(130)
"""
FORK = """
if os.fork() == 0:
    print("fork", flush=True)
    while True:
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            pass
"""
FAMILY = """
nested = child("import time; time.sleep(100)")
other = child(
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "p = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(100)']);"
    "print(p.pid, flush=True); time.sleep(100)",
    start_new_session=True,
)
print(nested.pid, other.pid, other.stdout.readline().strip(), flush=True)
"""


class Started:
    """A program that calls `end_at_second_signal` first, in a group of its own, as a shell has it."""

    def __init__(self, program: str, grace_s: float, together_s: float) -> None:
        folder = str(Path(second_signal.__file__).parent)
        code = BEGIN.format(folder=folder, grace_s=grace_s, together_s=together_s) + program
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        # A process that has begun a moment ago does not tell its command yet.
        wait_for(self._find_watcher, "the watcher")
        return line

    def ctrl_c(self) -> None:
        """All of the group get the signal. Returns when another one would not be taken for the same."""
        os.killpg(self.process.pid, signal.SIGINT)
        wait_for(lambda: not self._has_pending(signal.SIGINT), "the delivery of the signal")

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; its watcher ends with it."""
        _, err = self.process.communicate(timeout=30)
        wait_for(lambda: not _is_alive(self.watcher), "the end of the watcher", 25)
        return self.process.returncode, err

    def _find_watcher(self) -> bool:
        found = [pid for pid in second_signal._descendants(self.process.pid) if b"second_signal" in _command(pid)]
        self.watcher = found[0] if found else 0
        return bool(found)

    def _has_pending(self, number: signal.Signals) -> bool:
        if self.process.poll() is not None:
            return False
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (pending,) = (line.split()[1] for line in lines if line.startswith("ShdPnd:"))
        return bool(int(pending, 16) >> number - 1 & 1)


Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    every: list[Started] = []

    def begin(program: str, grace_s: float, together_s: float = 0) -> Started:
        every.append(Started(program, grace_s, together_s))
        return every[-1]

    yield begin
    for started in every:
        with suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.communicate(timeout=30)


@pytest.mark.parametrize("program", [IN_C, GOES_ON])
def test_what_is_stuck_is_killed_after_the_second_signal(start: Start, program: str) -> None:
    started = start(program, 0.2)
    assert started.said() == "ready"
    for _ in range(2):
        started.ctrl_c()
    code, err = started.end()
    assert code == -signal.SIGKILL
    assert err.endswith("\nKilled 0.2 s after the second signal, still running, with all that it had started. " + LAST)


def test_a_third_signal_ends_it_at_once(start: Start) -> None:
    started = start(IN_C, 1000)
    assert started.said() == "ready"
    for _ in range(3):
        started.ctrl_c()
    code, err = started.end()
    assert code == -signal.SIGKILL
    assert err == "\nKilled at the third signal, with all that it had started. " + LAST


def test_what_ends_in_order_is_left_alone(start: Start) -> None:
    started = start(ENDS_IN_ORDER, 1000)
    assert started.said() == "ready"
    started.ctrl_c()
    assert started.said() == "closing"
    started.ctrl_c()
    assert started.end() == (130, "")


def test_all_that_it_has_started_ends_with_it(start: Start) -> None:
    started = start(FAMILY + IN_C, 0)
    family = [int(pid) for pid in started.said().split()]
    assert len(family) == 3
    assert started.said() == "ready"
    for _ in range(2):
        started.ctrl_c()
    assert started.end()[0] == -signal.SIGKILL
    wait_for(lambda: not any(map(_is_alive, family)), "the end of all that it had started", 25)


def test_one_ctrl_c_that_forks_get_too_is_one(start: Start) -> None:
    started = start(FORK + ENDS_IN_ORDER, 0)
    assert {started.said(), started.said()} == {"ready", "fork"}
    started.ctrl_c()
    assert started.process.wait(30) == 130


def test_signals_that_come_together_are_one_request(start: Start) -> None:
    started = start(IN_C, 0, together_s=1000)
    assert started.said() == "ready"
    for _ in range(3):
        started.ctrl_c()
    with pytest.raises(subprocess.TimeoutExpired):
        started.process.wait(0.3)


def test_a_terminal_that_closes_may_say_so_again_and_again(start: Start) -> None:
    # print is not for handlers: one that interrupts another's raises an error.
    started = start("signal.signal(signal.SIGHUP, lambda *_: os.write(1, b'heard\\n'))" + GOES_ON, 1000)
    assert started.said() == "ready"
    for _ in range(3):
        os.kill(started.process.pid, signal.SIGHUP)
        assert started.said() == "heard"
    with pytest.raises(subprocess.TimeoutExpired):
        started.process.wait(0.3)
    # The first one counts.
    for _ in range(2):
        started.ctrl_c()
    assert started.end()[0] == -signal.SIGKILL


LAST = "What was saved stands.\n"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
