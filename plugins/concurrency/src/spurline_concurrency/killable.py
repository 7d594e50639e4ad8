"""Call a function in processes that are killed when a call takes too long or too much memory.

A child process imports the function once, and forks itself into workers (`worker_processes`). So a killed worker is
replaced at once. Arguments are pickled. Results are JSON: a worker may have run code that a model wrote, and unpickling
results of that code would let it run code here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from spurline.errors import ConfigError, Problem, RunFailedError
from spurline_concurrency.calls import AttemptFailedError
from spurline_concurrency.child import ChildProcess
from spurline_concurrency.worker_processes import SPURLINE_ERRORS, Outcome, WorkerSettings

START_TIMEOUT_S = 120.0
"""Seconds that importing the function may take."""
MEMORY_LIMIT_BYTES = 8 << 30
"""Default memory limit of a worker, so that a result with billions of digits cannot take the machine down."""
_GRACE_S = 5.0
"""Seconds that a worker may take for its answer after the time limit of an async call, but at most that limit again.
Then it is killed, because a call blocks its event loop or ignores a cancellation."""
_LONGEST_S = 1e6
"""The longest time limit. Timers refuse very large numbers."""
_LONGEST_ANSWER = 1 << 30
_CLOSE_PATIENCE_S = 2.0
"""Seconds that the child has to end by itself when the pool is closed. It may be importing something large."""
_ONE_THREAD = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""Libraries use one thread: workers already compute in parallel, and a fork would lose a library's threads."""


class TookTooLong(AttemptFailedError):  # noqa: N818 - not an error for every caller
    """The call exceeded its limit of time or memory."""


_ERRORS: dict[str, type[Exception]] = {
    **{kind.__name__: kind for kind in (*SPURLINE_ERRORS, TookTooLong)},
    "killed": TookTooLong,
    "died": AttemptFailedError,
}
"""The class of the error that each outcome other than `value` becomes."""


@dataclass(eq=False)
class _Worker:
    """A connection to a worker. `calls` has the awaited answer of each unanswered call, by the call's number."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict[int, "asyncio.Future[Outcome]"])
    is_killed: bool = False


class KillablePool:
    """Processes that call one function. Any thread and event loop may use the pool.

    The processes start with `start` or with the first call, and again if they die. Each makes one call of a plain
    function at a time. All calls of an async function share one process. If it dies, each of its calls is repeated in a
    separate process, so only a call that kills its process fails. If it is killed because calls take too long, only
    these calls are repeated separately, and the other calls share a new process.

    Args:
        function: `module:function`. If `argument` is given, this function is called with it once, and returns the
            function to call. The results of the calls must be JSON-serializable.
        timeout_s: Seconds that one call may take.
        workers: The largest number of processes, each with one call at a time.
        import_timeout_s: Seconds that the import may take.
        memory_bytes: Memory that one worker may take.
    """

    def __init__(
        self,
        function: str,
        timeout_s: float,
        workers: int = 1,
        *,
        argument: str | None = None,
        import_timeout_s: float = START_TIMEOUT_S,
        memory_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self._settings = WorkerSettings(
            function=function,
            argument=argument,
            timeout_s=min(timeout_s, _LONGEST_S),
            import_timeout_s=min(import_timeout_s, _LONGEST_S),
            memory_bytes=memory_bytes,
            python_path=os.environ.get("PYTHONPATH"),
        )
        self._killed: Outcome = ("killed", self._settings.late)
        self._grace_s = min(_GRACE_S, self._settings.timeout_s)
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        """Only this loop uses the attributes below."""
        self._child: ChildProcess | None = None
        self._ready: asyncio.Future[Outcome] | None = None
        self._requests = socket.socket()
        self._numbers = count()
        self._workers: dict[_Worker, asyncio.Task[None]] = {}
        """Each worker with the task that reads its answers."""
        self._idle: list[_Worker] = []
        self._places = asyncio.Semaphore(workers)
        self._shared: _Worker | None = None
        self._sharing = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="spurline-killable-pool", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the child, and wait until it has imported the function.

        Raises:
            PluginError: If the import fails or takes too long.
            SpurlineError: If the import raises a SpurlineError.
        """
        asyncio.run_coroutine_threadsafe(self._started(), self._loop).result()

    async def call_async(self, *arguments: Any) -> Any:
        """Return the function's result. A caller that is cancelled while it waits for a worker makes no call.

        Raises:
            TookTooLong: If the call exceeds its limit of time or memory.
            AttemptFailedError: If the function raises, or its process dies.
            SpurlineError: If the function raises a SpurlineError.
            PluginError: If the function cannot be imported.
            RunFailedError: If the pool is closed.
        """
        packed = base64.b64encode(pickle.dumps(arguments))
        if self._is_closed:
            raise self._error()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(packed), self._loop))

    def close(self) -> None:
        """End every process. Calls that have not returned fail."""
        if not self._is_closed:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        self._is_closed = True
        # The child ends by itself when this socket is closed.
        self._requests.close()
        for worker in list(self._workers):
            self._kill(worker)
        if self._child is not None:
            await asyncio.to_thread(self._child.end, _CLOSE_PATIENCE_S)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _started(self) -> bool:
        """Return whether the function is async, once the child has imported it."""
        if self._is_closed:
            raise self._error()
        if self._ready is None:
            # `_ready` stays None if this fails, so the next call tries again.
            self._ready = self._start_child()
        return self._value_of(await asyncio.shield(self._ready))

    def _start_child(self) -> asyncio.Future[Outcome]:
        ready: asyncio.Future[Outcome] = self._loop.create_future()
        self._requests.close()
        self._requests, theirs = socket.socketpair()
        began, files = time.monotonic(), [theirs.fileno()]
        # The output of calls goes to the standard error, if there is one.
        with suppress(OSError):
            files.append(os.dup(2))
        settings = replace(self._settings, files=tuple(files))

        def note_end(child: ChildProcess) -> None:
            self._child = self._ready = None
            self._requests.close()
            if not ready.done():
                how = f"ended its process: exit code {child.exit_code}. {child.last_words()}"
                if time.monotonic() - began >= settings.import_timeout_s:
                    how = f"takes longer than {settings.import_timeout_s:g} s. Move slow work into the first call. The "
                    how += f"import was here:\n{child.last_words()}"
                ready.set_result(("PluginError", f"Importing {settings.name} {how}"))

        try:
            self._child = ChildProcess(
                "spurline_concurrency.worker_processes",
                (json.dumps(asdict(settings)),),
                take=lambda messages: self._loop.call_soon_threadsafe(ready.set_result, messages[0]["ready"]),
                on_end=lambda child: self._loop.call_soon_threadsafe(note_end, child),
                environment=_ONE_THREAD,
                pass_fds=files,
            )
        finally:
            theirs.close()
            for output in files[1:]:
                os.close(output)
        return ready

    async def _call(self, packed: bytes) -> Any:
        outcome = None
        while outcome is None and await self._started():
            async with self._sharing:
                worker = self._shared = self._shared or await self._fork()
            began = time.monotonic()
            outcome = await self._make(worker, packed, self._grace_s)
            if outcome[0] == "killed" and time.monotonic() - began < self._settings.timeout_s:
                # The worker was killed because another call took too long. Make this call again.
                outcome = None
        if outcome is None or outcome[0] in ("killed", "died"):
            await self._places.acquire()
            # If the caller is cancelled, the call continues, so that the worker can be used again.
            outcome = await asyncio.shield(self._make_alone(packed))
        return self._value_of(outcome)

    async def _make_alone(self, packed: bytes) -> Outcome:
        """Make a call in a worker that makes no other call at the same time."""
        try:
            grace_s = self._grace_s if await self._started() else 0.0
            worker = self._idle.pop() if self._idle else await self._fork()
            outcome = await self._make(worker, packed, grace_s)
            # A worker may die after its answer.
            if worker in self._workers:
                self._idle.append(worker)
            return outcome
        finally:
            self._places.release()

    async def _make(self, worker: _Worker, packed: bytes, grace_s: float) -> Outcome:
        """Make a call, and kill the worker if it does not answer in time."""
        number = next(self._numbers)
        answer = worker.calls[number] = self._loop.create_future()
        worker.writer.write(b"%d %s\n" % (number, packed))
        try:
            async with asyncio.timeout(self._settings.timeout_s + grace_s):
                return await answer
        except TimeoutError:
            self._kill(worker)
            return self._killed
        finally:
            worker.calls.pop(number, None)

    async def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        # If the child has just died, nobody holds the other end, so the worker counts as lost.
        with theirs, suppress(OSError):
            socket.send_fds(self._requests, [b"w"], [theirs.fileno()])
        worker = _Worker(*await asyncio.open_connection(sock=ours, limit=_LONGEST_ANSWER))
        self._workers[worker] = self._loop.create_task(self._listen(worker))
        return worker

    async def _listen(self, worker: _Worker) -> None:
        """Read the worker's answers until the worker ends. Its unanswered calls then fail."""
        how = "the process that watches it has ended"
        with suppress(OSError):
            async for line in worker.reader:
                try:
                    message = json.loads(line)
                except ValueError:
                    # The worker died while it wrote this line, or the line is the empty one that follows.
                    continue
                if "ended" in message:
                    how = message["ended"]
                else:
                    _settle(worker.calls.get(message["id"]), message["outcome"])
        died = ("died", f"The worker process of {self._settings.name} died: {how}")
        outcome = self._killed if worker.is_killed else died
        self._kill(worker)
        for answer in worker.calls.values():
            _settle(answer, outcome)

    def _kill(self, worker: _Worker) -> None:
        """Close the worker's channel. The child then kills the process, if it has not ended."""
        worker.is_killed = True
        worker.writer.transport.abort()
        self._workers.pop(worker, None)
        if worker in self._idle:
            self._idle.remove(worker)
        if worker is self._shared:
            self._shared = None

    def _value_of(self, outcome: Outcome) -> Any:
        """Return the value of an outcome, or raise its error."""
        kind, value = outcome
        if kind == "value":
            return value
        if self._is_closed:
            raise self._error()
        raise ConfigError([Problem(*each) for each in value]) if kind == "ConfigError" else _ERRORS[kind](value)

    def _error(self) -> RunFailedError:
        return RunFailedError(f"The pool of worker processes of {self._settings.name} is closed.")


def _settle(answer: asyncio.Future[Outcome] | None, outcome: Outcome) -> None:
    # The caller may have been cancelled.
    if answer is not None and not answer.done():
        answer.set_result(outcome)
