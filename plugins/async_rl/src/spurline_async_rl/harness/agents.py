"""Run the agent of an attempt: a Python function, or a program in a process group of its own.

Place on the way: Session -> this -> what the agent returns -> named rewards. It is not told when its attempt runs out
of time: an async function is cancelled, a plain one is left behind on its thread, where its requests are refused, a
program is ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from spurline.errors import PluginError, RunFailedError
from spurline.protocols.environment import AttemptFailedError
from spurline.rl.concurrency import in_thread, is_async
from spurline.rl.functions import load_function

CANCEL_TIMEOUT_S = 20.0
"""Seconds that a cancelled part of an attempt may take to end; less than the attempt itself has to."""
TERM_TIMEOUT_S = 5.0
"""Seconds a program may take to end by itself when it is told to."""
_KILL_TIMEOUT_S = 10.0
_STDOUT_KEPT = 2**20
_STDERR_KEPT = 2000
REWARD = "reward"
"""The term that a single number is."""


@dataclass(frozen=True)
class Session:
    """One attempt at one prompt, as its agent sees it.

    base_url, api_key, model: for any OpenAI client. The address is this attempt's own: all that is asked there becomes
    its trajectory, and nothing can be asked there when the attempt has ended.
    row: the dataset row. messages: its conversation up to the answer; empty where the row is no chat. prompt: the text
    to go on from where the row is plain text. reference: the expected answer where the row has one.
    uid, sample: the prompt, and which of its attempts this is, from 0. location: where the row is, for messages.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    prompt: str | None
    reference: str | None
    uid: str
    sample: int
    location: str


Agent = Callable[[Session], Awaitable[Any]]
"""Makes an attempt: gives what the agent returns, or raises; ends when it is cancelled."""


def function_agent(path: str) -> Agent:
    """`module:function` or `file.py:function`, async or not."""
    function = load_function(path, "environment's agent")
    return function if is_async(function) else partial(in_thread, function)


def command_agent(command: Sequence[str]) -> Agent:
    """A program with its arguments. Raises PluginError when there is none of that name."""
    if shutil.which(command[0]) is None:
        raise PluginError(
            f"The environment's command names the program '{command[0]}', which is not on the PATH or cannot be "
            "executed. Install it, or give its whole path."
        )
    return partial(_run_program, command)


async def _run_program(command: Sequence[str], session: Session) -> Any:
    """The value of the last line that the program prints."""
    # The rest, address and key, is in its environment.
    task = {name: value for name, value in vars(session).items() if name not in ("base_url", "api_key")}
    # Files, not pipes: what a program leaves running would hold a pipe open, and a full one would hold it up.
    with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as complaints:
        given.write(json.dumps(task, default=str).encode() + b"\n")
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(*_ENDING_WITH_THIS, *command),
            stdin=given,
            stdout=printed,
            stderr=complaints,
            env={**os.environ, "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key},
            # A group of its own: what the program starts ends with it, and Ctrl-C is the run's to handle.
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            await _end_group(process)
        last_words = _end_of(complaints, _STDERR_KEPT)
        if code != 0:
            raise AttemptFailedError(f"The agent's program ended with exit code {code}. {last_words}".strip())
        lines = [line for line in _end_of(printed, _STDOUT_KEPT).splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError as error:
        raise AttemptFailedError(
            f"The last line that the agent's program printed is not JSON ({error}): {lines[-1][:200]!r}. Print the "
            f'rewards, such as 1.0 or {{"solved": 1.0}}, last. {last_words}'.strip()
        ) from error


def terms_of(value: Any, who: str) -> dict[str, float]:
    """Named finite terms. Raises AttemptFailedError naming `who` for anything else."""
    given = value if isinstance(value, Mapping) else {REWARD: value}
    if not given:
        raise AttemptFailedError(f"{who} has returned no reward. Give at least one term.")
    terms: dict[str, float] = {}
    for name, number in given.items():
        if not isinstance(number, (int, float, np.number, np.bool_)):
            hint = " Does it lack a return statement?" if number is None else ""
            raise AttemptFailedError(
                f"{who} has returned {number!r:.200} as '{name}'; return a number, or numbers by name.{hint}"
            )
        if not math.isfinite(number):
            raise AttemptFailedError(f"{who} has returned {number} as '{name}'; it must be finite.")
        terms[str(name)] = float(number)
    return terms


_ENDING_WITH_THIS = (
    (
        sys.executable,
        "-I",
        "-S",
        "-c",
        (
            "import ctypes, os, signal, sys\n"
            "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
            "os.execvp(sys.argv[1], sys.argv[1:])"
        ),
    )
    if sys.platform == "linux"
    else ()
)
"""Becomes the program, after having asked Linux to kill it when this process dies (PR_SET_PDEATHSIG), also by kill
-9."""


def _end_of(file: IO[bytes], count: int) -> str:
    """The last `count` bytes of what was written, as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - count))
    return file.read().decode(errors="replace").strip()


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End the program and all that it has started: asked first, then killed."""
    try:
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(TERM_TIMEOUT_S):
                    await process.wait()
    finally:
        # Also after a good end: what it left behind would outlive the run.
        _signal_group(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            await process.wait()
    except TimeoutError as error:
        raise RunFailedError(
            f"The agent's program (process {process.pid}) was killed, but has not ended {_KILL_TIMEOUT_S:g} s later."
        ) from error


def _signal_group(group: int, number: signal.Signals) -> None:
    # The group is gone, or, on some systems, made of processes that have ended but are not waited for yet.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
