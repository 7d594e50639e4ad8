"""One child process as a member of the pool: start it, talk to it, notice its death, end it.

Place on the way: pool -> calls as lines on the child's stdin -> answers and tokens as lines on its stdout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from spurline.config.run_config import RunConfig
from spurline.errors import DataError, RunFailedError, UserError
from spurline.protocols.rollout_engine import GenerationRequest
from spurline.rl.trajectory import FinishReason
from spurline_async_rl.engines.child.wire import MAX_LINE_BYTES, decode, encode, pack_request
from spurline_async_rl.engines.commands import Command
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.engines.member import EngineDiedError, Progress

_LOG_BYTES = 2000
"""Of the end of its log, for messages."""


class ChildMember:
    """An `EngineMember`."""

    transports: Sequence[str] = ("shared_memory", "disk")

    def __init__(self, name: str, config: ChildProcessEngineConfig, run: RunConfig) -> None:
        self.name = name
        self._config = config
        self._run = run
        self._log = run.run_dir / "engines" / f"{name.replace(' ', '-')}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._end = ""
        self._ids = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._progress: dict[int, Progress] = {}

    async def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                # -P: a module in the working directory must not hide one of the same name elsewhere.
                *(sys.executable, "-P", "-m", "spurline_async_rl.engines.child.main", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                limit=MAX_LINE_BYTES,
                # Ctrl-C in a terminal is this process's to handle.
                start_new_session=True,
            )
        self.name = f"{self.name} (process {self._process.pid})"
        self._reader = asyncio.create_task(self._read(self._process))
        run = self._run.model_dump(mode="json", serialize_as_any=True)
        await self._call("start", run=run, config=self._config.model_dump(mode="json"))

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        try:
            return await self._call("generate", progress, request=pack_request(request))
        except EngineDiedError:
            raise
        except RunFailedError as error:
            # An engine that has failed once generates no further token.
            raise EngineDiedError(str(error)) from error

    async def control(self, command: Command) -> None:
        await self._call("control", command=command.to_plain())

    async def wait_dead(self) -> str:
        assert self._reader is not None
        # What it wrote last is read before it counts as dead.
        await asyncio.wait({self._reader})
        return self._end

    async def close(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            # It ends by itself when its stdin does.
            await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if self._reader is not None:
                await asyncio.wait({self._reader})

    async def _call(self, what: str, progress: Progress | None = None, **arguments: Any) -> Any:
        """Its answer. Raises what the child says it raises, and EngineDiedError when it ends before."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self._end:
            raise EngineDiedError(f"{self.name} ended: {self._end}")
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if progress is not None:
            self._progress[number] = progress
        self._send({"id": number, "do": what, **arguments})
        try:
            return await answer
        except asyncio.CancelledError:
            self._send({"id": number, "do": "abort"})
            raise
        finally:
            del self._answers[number]
            self._progress.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # To a dead process nothing is written; `_read` finds that out.
        if not self._process.stdin.is_closing():
            self._process.stdin.write(encode(message))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Take answers until the child ends; then everyone who waits hears how it did."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._take(decode(line))
            code = await process.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except Exception as error:  # noqa: BLE001 (not swallowed: it is why the engine counts as dead)
            how = f"its answers cannot be read: {type(error).__name__}: {error}"
        self._end = f"{how}; {last_words(self._log)}"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDiedError(f"{self.name} ended: {self._end}"))

    def _take(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        progress = self._progress.get(number)
        if "token_ids" in message and progress is not None:
            for column in ("token_ids", "logprobs", "raw_logprobs", "versions"):
                getattr(progress, column).extend(message[column])
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(_ERRORS[message["kind"]](message["error"]))
        elif "answer" in message:
            answer.set_result(message["answer"])

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self._config.num_threads is not None:
            # Before torch is imported, or it makes a pool for every core.
            environment["OMP_NUM_THREADS"] = str(self._config.num_threads)
        return environment


_ERRORS = {"data": DataError, "user": UserError, "failed": RunFailedError}
"""Kinds of errors a child tells."""


def last_words(log: Path) -> str:
    """The end of a log, and where all of it is."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        text = file.read().decode(errors="replace").strip()
    return f"end of {log}:\n{text}" if text else f"{log} is empty"
