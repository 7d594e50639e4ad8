"""What runs in a child process: core's engine `in_process` behind a pipe.

`python -m spurline_async_rl.engines.child.main PARENT_PID`. Plugins are loaded anew from their names, the config
comes as JSON. The process ends when its stdin does, which is when the parent closes it or dies, however that happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from spurline.config.loading import load_config
from spurline.data.tokenizer import load_tokenizer
from spurline.errors import DataError, SpurlineError, UserError
from spurline.protocols.rollout_engine import WeightBucket
from spurline.rl.engines.configs import InProcessEngineConfig
from spurline.rl.engines.in_process.engine import InProcessEngine
from spurline.rl.engines.in_process.response import Written
from spurline_async_rl.engines.child.wire import MAX_LINE_BYTES, decode, encode, unpack_request
from spurline_async_rl.engines.commands import Command, LoadBucket, from_plain
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.weights.disk import read_file
from spurline_async_rl.weights.shared_memory import SegmentReader

_PR_SET_PDEATHSIG = 1


class Child:
    """Does what the lines say; every call is a task, so that requests run side by side. out: answers go there."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._unsent: list[bytes] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._engine: InProcessEngine | None = None
        self._readers = {"shared_memory": SegmentReader().read, "disk": read_file}

    async def run(self, lines: asyncio.StreamReader) -> None:
        """Until there are no more lines."""
        while line := await lines.readline():
            message = decode(line)
            number = message["id"]
            if message["do"] == "abort":
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            self._tasks[number] = asyncio.create_task(self._answer(message))
            self._tasks[number].add_done_callback(lambda _, number=number: self._tasks.pop(number))
        if self._engine is not None:
            await self._engine.close()

    async def _answer(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        try:
            if message["do"] == "generate":
                # Its answer comes with its last tokens, so that a death cannot come between the two.
                await self._running.generate(
                    unpack_request(message["request"]), lambda news: self._send(number, **_columns(news))
                )
            else:
                await self._do(message)
                self._send(number, answer=None)
        except Exception as error:  # noqa: BLE001 (not swallowed: told to the parent)
            text = str(error) if isinstance(error, SpurlineError) else f"{type(error).__name__}: {error}"
            self._send(number, error=text, kind=_kind(error))

    async def _do(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "start":
                await self._start(message["run"], ChildProcessEngineConfig.model_validate(message["config"]))
            case "control":
                await self._opened(from_plain(message["command"])).apply(self._running)
            case other:
                raise AssertionError(f"nobody sends '{other}'")

    @property
    def _running(self) -> InProcessEngine:
        assert self._engine is not None, "not started"
        return self._engine

    async def _start(self, run: Mapping[str, Any], config: ChildProcessEngineConfig) -> None:
        if config.num_threads is not None:
            import torch

            torch.set_num_threads(config.num_threads)
        loaded = load_config(run, recorded=True)
        engine = InProcessEngineConfig(
            deterministic=config.deterministic,
            max_batch=config.max_batch,
            max_cache_tokens=config.max_cache_tokens,
            timeout_s=config.generate_timeout_s,
            device=config.device,
            precision=config.precision,
            kv_cache=config.kv_cache,
        )
        self._engine = loaded.host.registry.create(
            "rollout_engine", engine, run=loaded.config, tokenizer=load_tokenizer(loaded.config.model)
        )
        await self._running.load()

    def _opened(self, command: Command) -> Command:
        """The command with the weights themselves, where it brings some."""
        if not isinstance(command, LoadBucket):
            return command
        bucket = command.bucket
        tensors = tuple(tensor for _, tensor in self._readers[bucket.transport](bucket))
        return LoadBucket(WeightBucket("in_process", bucket.places, tensors=tensors))

    def _send(self, number: int, **message: Any) -> None:
        """All lines of one turn of the loop, such as those of a decode step, in one write."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(encode({"id": number, **message}))

    def _flush(self) -> None:
        self._out.write(b"".join(self._unsent))
        self._unsent.clear()
        self._out.flush()


def _kind(error: Exception) -> str:
    """As of the parent's `_ERRORS`."""
    return "data" if isinstance(error, DataError) else "user" if isinstance(error, UserError) else "failed"


def _columns(news: Written) -> dict[str, Any]:
    columns = news._asdict()
    reason = columns.pop("finish_reason")
    return columns if reason is None else {**columns, "answer": reason}


async def _main(out: BinaryIO) -> None:
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    await Child(out).run(lines)


def _end_with(parent: int) -> None:
    """Ask Linux to kill this process with its parent: the end of stdin is of no use while a computation hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent was gone before this process began")


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(_main(answers))
