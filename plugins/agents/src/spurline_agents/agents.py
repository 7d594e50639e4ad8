"""Run the agent of an attempt: a Python function, or a program with a supervisor that ends all it has started.

Place on the way: Session -> this -> what the agent returns -> named rewards. When its attempt runs out of time, an
async function is cancelled, a program is ended, and a plain function is left behind on its thread, where its requests
are refused.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from spurline.errors import PluginError, RunFailedError
from spurline_agents.variables import agent_variables, held_back_hint
from spurline_rl.concurrency import in_thread, is_async
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError

CANCEL_TIMEOUT_S = 20.0
"""Seconds that a cancelled part of an attempt may take to end; less than the attempt itself may take."""
TERM_TIMEOUT_S = 5.0
"""Seconds a program may take to end by itself when it is told to."""
_KILL_TIMEOUT_S = 10.0
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
REWARD = "reward"
"""Name of the term where an agent returns a single number."""


@dataclass(frozen=True)
class Session:
    """One attempt at one prompt, as its agent sees it."""

    base_url: str
    """The attempt's own address, for any OpenAI client: all that is asked there becomes its trajectory. It serves
    nothing once the attempt has ended."""
    api_key: str = field(repr=False)
    model: str
    row: Mapping[str, Any]
    """The dataset row."""
    messages: Sequence[Mapping[str, Any]]
    """The row's conversation up to the answer; empty where the row is no chat."""
    prompt: str | None
    """The text to go on from, where the row is plain text."""
    reference: str | None
    """The expected answer, where the row has one."""
    uid: str
    """Names the prompt."""
    sample: int
    """Number of this attempt at the prompt, from 0."""
    location: str
    """Names the row in messages."""


Agent = Callable[[Session], Awaitable[Any]]
"""Makes an attempt and returns what the agent returns. It ends when it is cancelled."""


def function_agent(path: str) -> Agent:
    """Return the agent at `module:function` or `file.py:function`, async or not."""
    function = load_function(path, "environment's agent")
    return function if is_async(function) else partial(in_thread, function)


def command_agent(command: Sequence[str], pass_env: Collection[str] = (), memory_gb: float | None = None) -> Agent:
    """Return an agent that starts a program for each attempt.

    Args:
        command: The program and its arguments.
        pass_env: Environment variables that the program gets besides the harmless ones.
        memory_gb: GiB of address space that each of its processes may take; None for no limit.

    Raises:
        PluginError: There is no program of that name.
        ConfigError: A variable of `pass_env` is not set.
    """
    if shutil.which(command[0]) is None:
        raise PluginError(
            f"The environment's command names the program '{command[0]}', which is not on the PATH or cannot be "
            "executed. Install it, or give its whole path."
        )
    return partial(_run_program, command, agent_variables(pass_env), int((memory_gb or 0) * 2**30))


async def _run_program(
    command: Sequence[str], variables: Mapping[str, str], memory_bytes: int, session: Session
) -> Any:
    """Return the value of the last line that the program prints."""
    # Address and key are in its environment.
    task = {name: value for name, value in vars(session).items() if name not in ("base_url", "api_key")}
    environment = {**variables, "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}
    # Files, not pipes: a full pipe would hold the program up.
    with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as complaints:
        given.write(json.dumps(task, default=str).encode() + b"\n")
        given.seek(0)
        supervisor = (sys.executable, "-I", "-S", _SUPERVISOR, str(os.getpid()), str(TERM_TIMEOUT_S), str(memory_bytes))
        process = await asyncio.create_subprocess_exec(
            *(*supervisor, *command),
            stdin=given,
            stdout=printed,
            stderr=complaints,
            env=environment,
            # Ctrl-C is the run's to handle.
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            await _end(process, session.base_url)
        last_words = _text_of(complaints)
        if code != 0:
            hint = held_back_hint(last_words, environment)
            raise AttemptFailedError(f"The agent's program ended with {_ending(code)}. {last_words}{hint}".strip())
        lines = [line for line in _text_of(printed).splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    # A deeply nested line.
    except (ValueError, RecursionError) as error:
        raise AttemptFailedError(
            f"The last line that the agent's program printed is not JSON ({error}): {lines[-1][:200]!r}. Print the "
            f'rewards, such as 1.0 or {{"solved": 1.0}}, last. {last_words}'.strip()
        ) from error


def terms_of(returned: Any, who: str) -> dict[str, float]:
    """Return the rewards as named finite numbers. Raises AttemptFailedError naming `who` for anything else."""
    given = returned if isinstance(returned, Mapping) else {REWARD: returned}
    if not given:
        raise AttemptFailedError(f"{who} has returned no reward. Give at least one term.")
    terms: dict[str, float] = {}
    for name, number in given.items():
        if not isinstance(number, (int, float, np.number, np.bool_)):
            hint = " Does it lack a return statement?" if number is None else ""
            raise AttemptFailedError(
                f"{who} has returned {number!r:.200} as '{name}'; return a number, or numbers by name.{hint}"
            )
        try:
            value = float(number)
        except OverflowError:
            # An integer beyond the range of floats.
            value = math.inf
        if not math.isfinite(value):
            raise AttemptFailedError(f"{who} has returned {value} as '{name}'; it must be finite.")
        terms[str(name)] = value
    return terms


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _ending(code: int) -> str:
    """Describe an exit code. The supervisor reports a signal as shells do; a negative code is its own end."""
    if code < 0:
        return f"its supervisor, which was killed by {signal.Signals(-code).name}"
    with suppress(ValueError):
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


async def _end(process: asyncio.subprocess.Process, base_url: str) -> None:
    """End the program and all that it has started: asked first, then killed by its supervisor."""
    if process.returncode is None:
        for number in (signal.SIGTERM, signal.SIGCONT):
            with suppress(ProcessLookupError):
                process.send_signal(number)
        try:
            async with asyncio.timeout(TERM_TIMEOUT_S + _KILL_TIMEOUT_S):
                await process.wait()
        except TimeoutError as error:
            raise RunFailedError(
                f"The agent's program was killed, but something of it still runs {_KILL_TIMEOUT_S:g} s later: see the "
                f"children of process {process.pid}, which goes on trying."
            ) from error
    if process.returncode is not None and process.returncode < 0:
        mark = f"OPENAI_BASE_URL={base_url}"
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await _end_unsupervised(mark.encode())
        except TimeoutError as error:
            raise RunFailedError(
                f"The supervisor of the agent's program was killed, and something of the program still runs "
                f"{_KILL_TIMEOUT_S:g} s later: see the processes that have {mark} in their environment."
            ) from error


async def _end_unsupervised(mark: bytes) -> None:
    """Kill what a supervisor that was killed has left behind, known by the variable that only this attempt has.

    What has given itself another environment is not found.
    """
    while left := [pid for pid in _process_ids() if _has_variable(pid, mark)]:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()] if sys.platform == "linux" else []


def _has_variable(pid: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        # It has ended, or belongs to somebody else.
        return False
