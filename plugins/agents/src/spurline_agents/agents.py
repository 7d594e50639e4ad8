"""Run the agent of an attempt, which is a Python function or a program.

If an attempt runs out of time, its async function is cancelled, or a supervisor ends all processes of its program. A
plain function cannot be stopped. Its thread continues, but the server refuses its further requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
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

from spurline.errors import ConfigError, PluginError, RunFailedError, listing
from spurline_concurrency.calls import in_thread, is_async
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError

CANCEL_TIMEOUT_S = 20.0
"""Seconds that an agent or a request may take to end once it is cancelled."""
TERM_TIMEOUT_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a program."""
_KILL_TIMEOUT_S = 10.0
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_HARMLESS = """
PATH HOME USER LOGNAME SHELL PWD HOSTNAME TMPDIR TMP TEMP TERM TZ LANG LANGUAGE LD_LIBRARY_PATH DYLD_LIBRARY_PATH
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_CONFIG_DIRS XDG_DATA_HOME XDG_DATA_DIRS XDG_STATE_HOME XDG_RUNTIME_DIR
PYTHONPATH PYTHONHOME PYTHONSAFEPATH PYTHONUNBUFFERED PYTHONUTF8 PYTHONIOENCODING PYTHONHASHSEED PYTHONWARNINGS
PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONNOUSERSITE VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV
DISPLAY WAYLAND_DISPLAY DOCKER_HOST DOCKER_CONTEXT PLAYWRIGHT_BROWSERS_PATH
NODE_PATH NVM_DIR JAVA_HOME GOPATH GOROOT CARGO_HOME RUSTUP_HOME
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS
HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS TOKENIZERS_PARALLELISM
CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE
"""
"""Environment variables that every program gets. Others may contain keys and tokens, so `pass_env` must name them."""


@dataclass(frozen=True)
class Session:
    """The data that an agent gets for one attempt at one prompt."""

    base_url: str
    """Base URL of the endpoint, for any OpenAI client. It ends with `/v1`."""
    api_key: str = field(repr=False)
    """The key of this attempt. The model's answers to requests with this key are the turns of the attempt's trajectory.
    After the end of the attempt, such requests get an error."""
    model: str
    row: Mapping[str, Any]
    """The dataset row."""
    messages: Sequence[Mapping[str, Any]]
    """The row's conversation up to the answer; empty if the row is not a chat."""
    prompt: str | None
    """The text to continue, if the row is plain text."""
    reference: str | None
    """The expected answer, if the row has one."""
    uid: str
    """The id of the prompt."""
    sample: int
    """The number of this attempt at the prompt, from 0."""
    location: str
    """Position of the row in its data, for error messages."""

    @property
    def anthropic_base_url(self) -> str:
        """Return the base URL for any Anthropic client, which adds `/v1` itself."""
        return self.base_url.removesuffix("/v1")


Agent = Callable[[Session], Awaitable[Any]]
"""A function that makes an attempt and returns the agent's result. It must end when it is cancelled."""


def function_agent(path: str) -> Agent:
    """Return the agent at `module:function` or `file.py:function`. The function may be async."""
    function = load_function(path, "environment's agent")
    return function if is_async(function) else partial(in_thread, function)


def command_agent(command: Sequence[str], pass_env: Collection[str] = (), memory_gb: float | None = None) -> Agent:
    """Return an agent that starts a program for each attempt.

    Args:
        command: The program and its arguments.
        pass_env: Environment variables that the program gets in addition to those that every program gets.
        memory_gb: GiB of address space that each process of the program may take. If None, there is no limit.

    Raises:
        PluginError: If the program is not found.
        ConfigError: If a variable of `pass_env` is not set.
    """
    if shutil.which(command[0]) is None:
        raise PluginError(
            f"The environment's command names the program '{command[0]}', which is not on the PATH or cannot be "
            "executed. Install it, or give its full path."
        )
    return partial(_run_program, command, agent_variables(pass_env, os.environ), int((memory_gb or 0) * 2**30))


async def _run_program(
    command: Sequence[str], variables: Mapping[str, str], memory_bytes: int, session: Session
) -> Any:
    """Run the program, and return the JSON value of the last line that it prints, or None if it prints nothing."""
    # The program gets the address and the key as environment variables, so the JSON leaves them out.
    task = {name: value for name, value in vars(session).items() if name not in ("base_url", "api_key")}
    endpoints = {"OPENAI_BASE_URL": session.base_url, "ANTHROPIC_BASE_URL": session.anthropic_base_url}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), session.api_key)
    # A full pipe would block the program, so files are used instead.
    with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as complaints:
        given.write(json.dumps(task, default=str).encode() + b"\n")
        given.seek(0)
        supervisor = (sys.executable, "-I", "-S", _SUPERVISOR, str(os.getpid()), str(TERM_TIMEOUT_S), str(memory_bytes))
        process = await asyncio.create_subprocess_exec(
            *(*supervisor, *command),
            stdin=given,
            stdout=printed,
            stderr=complaints,
            env={**variables, **endpoints, **keys},
            # Otherwise Ctrl-C would end the program before the run can end it.
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            await _end(process, session.api_key)
        stderr = _text_of(complaints)
        if code != 0:
            raise AttemptFailedError(f"The agent's program ended with {_ending(code)}. {stderr}".strip())
        lines = [line for line in _text_of(printed).splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError) as error:
        raise AttemptFailedError(
            f"The last line that the agent's program printed is not JSON ({error}): {lines[-1][:200]!r}. Print the "
            f'rewards, such as 1.0 or {{"solved": 1.0}}, last. {stderr}'.strip()
        ) from error


def agent_variables(pass_env: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `environment` that are harmless or named in `pass_env`.

    Raises:
        ConfigError: If a variable of `pass_env` is not set.
    """
    if missing := [name for name in pass_env if name not in environment]:
        raise ConfigError.at(
            "source.environment.pass_env",
            f"names environment variables that are not set: {listing(missing)}. Set them before the run starts, or "
            "remove them.",
        )
    return {name: value for name, value in environment.items() if name in pass_env or _is_harmless(name, value)}


def _is_harmless(name: str, value: str) -> bool:
    # The address of a proxy may contain a password, with or without `http://` before it.
    has_login = re.search("://[^/]*@", value) or ("@" in value and name.lower().endswith("_proxy"))
    return (name in _HARMLESS.split() or name.startswith("LC_")) and not has_login


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _ending(code: int) -> str:
    """Describe the exit code of the supervisor.

    If the program was killed, the code is 128 + the signal's number. It is negative if the supervisor was killed.
    """
    if code < 0:
        return f"its supervisor, which was killed by {signal.Signals(-code).name}"
    with suppress(ValueError):
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


async def _end(process: asyncio.subprocess.Process, api_key: str) -> None:
    """Let the supervisor end the program and its processes, first with SIGTERM and later with SIGKILL."""
    if process.returncode is None:
        for number in (signal.SIGTERM, signal.SIGCONT):
            with suppress(ProcessLookupError):
                process.send_signal(number)
        try:
            async with asyncio.timeout(TERM_TIMEOUT_S + _KILL_TIMEOUT_S):
                await process.wait()
        except TimeoutError as error:
            raise RunFailedError(
                f"The agent's program was killed, but some of its processes still run {_KILL_TIMEOUT_S:g} s later. "
                f"They are children of process {process.pid}, which still tries to kill them."
            ) from error
    if process.returncode is not None and process.returncode < 0:
        left: list[int] = []
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                # The supervisor was killed, so it could not end these processes. Only processes of this attempt have
                # the variable. A process that has cleared its environment is not found.
                while left := _processes_with(f"OPENAI_API_KEY={api_key}".encode()):
                    for pid in left:
                        with suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise RunFailedError(
                f"The supervisor of the agent's program was killed, and processes {left} of the program still run "
                f"{_KILL_TIMEOUT_S:g} s later."
            ) from error


def _processes_with(variable: bytes) -> list[int]:
    """Return the ids of processes that have this variable in their environment, or [] on systems without /proc."""
    found: list[int] = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        # A process may have ended, or belong to another user.
        with suppress(OSError):
            if variable in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
