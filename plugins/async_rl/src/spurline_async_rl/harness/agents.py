"""Run the agent of an attempt: a Python function, or a program in a process group of its own.

Place on the way: Session -> this -> what the agent returns. It is not told when its attempt runs out of time: an async
function is cancelled, a plain one is left behind on its thread, where its requests are refused, a program is ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

from spurline.builtin.user_functions import load_function
from spurline.errors import PluginError, RunFailedError
from spurline.protocols.environment import AttemptFailedError
from spurline.rl.thread_calls import in_thread, is_async
from spurline_async_rl.harness.session import Session

TERM_TIMEOUT_S = 5.0
"""Seconds a program may take to end by itself when it is told to."""
_KILL_TIMEOUT_S = 10.0
_STDOUT_KEPT = 2**20
_STDERR_KEPT = 2000


class Agent(Protocol):
    """Makes attempts."""

    async def call(self, session: Session) -> Any:
        """What the agent returns, or raises. Ends when it is cancelled."""
        ...


class FunctionAgent:
    """`module:function`, async or not."""

    def __init__(self, path: str) -> None:
        self._function = load_function(path, "environment's agent")

    async def call(self, session: Session) -> Any:
        if is_async(self._function):
            return await self._function(session)
        return await in_thread(self._function, session)


class CommandAgent:
    """A program with its arguments. Raises PluginError when there is none of that name."""

    def __init__(self, command: Sequence[str]) -> None:
        if shutil.which(command[0]) is None:
            raise PluginError(
                f"The environment's command names the program '{command[0]}', which is not on the PATH or cannot be "
                "executed. Install it, or give its whole path."
            )
        self._command = list(command)

    async def call(self, session: Session) -> Any:
        """The value of the last line that the program prints."""
        # Files, not pipes: what a program leaves running would hold a pipe open, and a full one would hold it up.
        with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as complaints:
            given.write(json.dumps(_task(session), default=str).encode() + b"\n")
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *(*_ENDING_WITH_THIS, *self._command),
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
            return self._value(_end_of(printed, _STDOUT_KEPT), last_words)

    def _value(self, output: str, last_words: str) -> Any:
        lines = [line for line in output.splitlines() if line.strip()]
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError as error:
            raise AttemptFailedError(
                f"The last line that the agent's program printed is not JSON ({error}): {lines[-1][:200]!r}. Print the "
                f'rewards, such as 1.0 or {{"solved": 1.0}}, last. {last_words}'.strip()
            ) from error


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


def _task(session: Session) -> dict[str, Any]:
    """What a program is told; address and key are in its environment."""
    fields = {field.name: getattr(session, field.name) for field in dataclasses.fields(session)}
    return {name: value for name, value in fields.items() if name not in ("base_url", "api_key")}


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
