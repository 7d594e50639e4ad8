"""Run phases, each in its own process with a time limit, and write down each result at once.

A phase is a command. Its figures are the last JSON object that it printed on a line of its own, so a phase which prints
them as it goes loses none when it is stopped. A result is one line of `results.jsonl`, written to the disk before the
next phase begins. Phases that may share the device run side by side. All others run alone, so that no figure contains
the work of another phase.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import psutil

Status = Literal["ok", "failed", "timeout", "cut", "skipped"]
"""`cut` is a phase that the end of the budget stopped before its own limit."""

POLL_S = 0.05
LAST_LINES = 25
LOG_BYTES = 60_000
"""Bytes of each phase's output that `log.txt` keeps: the last ones."""
CLOSING_S = 3.0
"""Seconds of the budget that are kept for stopping processes and for writing tables."""
GONE_WITHIN_S = 10.0
"""Seconds to wait until killed processes are gone, and have given their memory back."""


@dataclass(frozen=True)
class Phase:
    """A command with its limits.

    Attributes:
        name: The name for `--only`, the results and the tables.
        command: Arguments of the Python interpreter.
        limit_s: Seconds after which the phase is stopped.
        least_s: With fewer seconds left, the phase is not started.
        shares: Whether the phase may run beside others that share the device too.
        missing: Why the phase cannot run here, or an empty string.
        about: Facts for the tables: at least `kind`.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    least_s: float = 10.0
    shares: bool = False
    missing: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The end of a phase. `error` says why it is not ok, with the last lines of its output if it ran."""

    phase: str
    status: Status
    seconds: float
    figures: Mapping[str, Any]
    error: str
    about: Mapping[str, Any]


class Running:
    """A phase that has begun. Its processes are one session, and its output goes to files."""

    def __init__(self, phase: Phase, folder: Path, left_s: float) -> None:
        self.phase, self._left_s = phase, left_s
        self._killed: list[psutil.Process] = []
        self._gone_by: float | None = None
        self._paths = folder / f"{phase.name}.out", folder / f"{phase.name}.err"
        self._began = time.monotonic()
        with open(self._paths[0], "wb") as out, open(self._paths[1], "wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *phase.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def result(self) -> Result | None:
        """Return the result if the phase has ended or reached its limit, which stops it. Otherwise return None."""
        code, seconds = self._process.poll(), time.monotonic() - self._began
        if code is None and seconds < min(self.phase.limit_s, self._left_s):
            return None
        if code is None and seconds < self.phase.limit_s:
            return self.stop("cut", f"stopped after {seconds:.0f} s: the budget was over")
        if code is None:
            return self.stop("timeout", f"stopped after {seconds:.0f} s, its limit")
        return self.stop("ok" if code == 0 else "failed", "" if code == 0 else f"exit code {code}")

    def stop(self, status: Status, why: str) -> Result:
        """Kill what is left of the phase, and return its result."""
        seconds = time.monotonic() - self._began
        self.kill()
        if not self._is_gone():
            why, status = f"{why or 'it ended'}, and its processes could not be killed", "failed"
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self._paths)
        said = (line for line in (err or out).splitlines() if line.strip() and not line.startswith("{"))
        last = list(said)[-LAST_LINES:]
        error = "" if status == "ok" else "\n".join([why, *last])
        return Result(self.phase.name, status, round(seconds, 1), last_object(out), error, self.phase.about)

    def kill(self) -> None:
        """Kill the process and all its descendants, also those with sessions of their own, without waiting."""
        self._gone_by = self._gone_by or time.monotonic() + GONE_WITHIN_S
        with suppress(psutil.NoSuchProcess):
            self._killed += psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for descendant in self._killed:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()

    def _is_gone(self) -> bool:
        """Wait until all killed processes are gone. Return False if one is not: a driver may hold it for ever."""
        assert self._gone_by is not None
        try:
            self._process.wait(max(0.0, self._gone_by - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return not psutil.wait_procs(self._killed, max(0.0, self._gone_by - time.monotonic()))[1]

    def output(self) -> str:
        """Return the end of what the phase printed."""
        texts = [path.read_bytes()[-LOG_BYTES:].decode(errors="replace") for path in self._paths]
        return "".join(f"--- {name} ---\n{text}\n" for name, text in zip(("stdout", "stderr"), texts, strict=True))


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object on a line of its own, or {}."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
    return {}


class Record:
    """The files in which results are kept: `results.jsonl`, `log.txt`, and what `write_tables` writes."""

    def __init__(self, folder: Path, write_tables: Callable[[Path, Sequence[Mapping[str, Any]]], None]) -> None:
        self.folder = folder
        self._write_tables = write_tables
        self._lines = folder / "results.jsonl"

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the last result of each phase, also of earlier runs, in the order of their first results."""
        found: dict[str, dict[str, Any]] = {}
        if self._lines.exists():
            for line in self._lines.read_text(encoding="utf-8").splitlines():
                # A machine that lost its power may leave half a line.
                with suppress(json.JSONDecodeError):
                    result = json.loads(line)
                    found[result["phase"]] = result
        return found

    def add(self, result: Result, output: str = "") -> None:
        """Write the result to the disk, then the tables with all results."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        append(self._lines, json.dumps({**vars(result), "at": at}) + "\n")
        if output:
            append(self.folder / "log.txt", f"===== {result.phase}: {result.status} at {at} =====\n{output}\n")
        self._write_tables(self.folder, list(self.results().values()))


def append(path: Path, text: str) -> None:
    """Append to a file, and wait until the disk has it."""
    file: IO[str]
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def run_phases(phases: Iterable[Phase], record: Record, budget_s: float, jobs: int) -> Iterator[Result]:
    """Run the phases in their order, and yield each result once it is written down.

    A phase that does not fit into what is left of `budget_s` is skipped, and later ones may still fit. At most `jobs`
    phases that share the device run at a time. If the caller stops, by an exception, running phases are killed, and
    written down as failed.
    """
    deadline = time.monotonic() + budget_s - CLOSING_S
    waiting, running = list(phases), list[Running]()
    work = record.folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            if waiting and may_start(waiting[0], [one.phase for one in running], jobs):
                phase = waiting.pop(0)
                why_not = phase.missing or too_late(phase, deadline - time.monotonic())
                if why_not:
                    skipped = Result(phase.name, "skipped", 0.0, {}, why_not, phase.about)
                    record.add(skipped)
                    yield skipped
                else:
                    running.append(Running(phase, work, deadline - time.monotonic()))
                continue
            time.sleep(POLL_S)
            for one in list(running):
                result = one.result()
                if result is not None:
                    running.remove(one)
                    record.add(result, one.output())
                    yield result
    finally:
        # All of them at first: waiting for one would let the others go on.
        for one in running:
            one.kill()
        for one in running:
            record.add(one.stop("failed", "the whole run was stopped"), one.output())


def may_start(phase: Phase, running: Sequence[Phase], jobs: int) -> bool:
    """Return whether a phase may start beside those that run."""
    if not running or phase.missing:
        return True
    return phase.shares and all(other.shares for other in running) and len(running) < jobs


def too_late(phase: Phase, left_s: float) -> str:
    """Return why there is no time for a phase, or an empty string."""
    if left_s >= phase.least_s:
        return ""
    return f"no time: {max(left_s, 0):.0f} s of the budget are left, and it needs {phase.least_s:.0f} s or more"
