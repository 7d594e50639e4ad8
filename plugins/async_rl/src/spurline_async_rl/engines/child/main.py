"""Serve engine `in_process` in a child process, by messages of its parent.

Plugins are loaded from their names, and the config comes as JSON. The process ends when there are no more messages.
"""

from __future__ import annotations

import asyncio
import json
import sys
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from spurline.child import Parent
from spurline.config.loading import load_config
from spurline.errors import BucketLostError, DataError, SpurlineError, UserError
from spurline_async_rl.engines.commands import Command, FinishUpdate, LoadBucket, from_plain
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.weights.collective import BroadcastReader
from spurline_async_rl.weights.disk import read_file
from spurline_async_rl.weights.shared_memory import MemoryReader
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.concurrency import in_thread
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.engines.in_process.response import Written
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_text.tokenizer import load_tokenizer

_MAX_LINE_BYTES = 1 << 28
"""The longest message: millions of prompt tokens."""


class Child:
    """Does what the messages say; every call is a task, so that requests run side by side."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._unsent: list[dict[str, Any]] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.engine: InProcessEngine | None = None
        self._broadcasts = BroadcastReader()
        self._readers = {
            "shared_memory": MemoryReader().read,
            "disk": read_file,
            # Replaced once it is known where the engine is.
            "collective": lambda bucket: self._broadcasts.read(bucket),
        }

    async def run(self) -> None:
        lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
        while line := await lines.readline():
            self.take(json.loads(line))
        if self.engine is not None:
            await self.engine.close()

    def take(self, message: Mapping[str, Any]) -> None:
        """Begin to do what this message says, or abort an earlier one."""
        number = message["id"]
        if message["do"] == "abort":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        self._tasks[number] = asyncio.create_task(self._answer(message))
        self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        try:
            if message["do"] == "generate":
                await self._running.generate(_request(message["request"]), partial(self._tell, number))
            else:
                if message["do"] == "start":
                    await self._start(message["run"], ChildProcessEngineConfig.model_validate(message["config"]))
                else:
                    await self._control(from_plain(message["command"]))
                self._send(number, answer=None)
        except Exception as error:  # noqa: BLE001 (not swallowed: told to the parent)
            text = str(error) if isinstance(error, SpurlineError) else f"{type(error).__name__}: {error}"
            kinds = {"data": DataError, "user": UserError, "lost": BucketLostError}
            kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "failed")
            self._send(number, error=text, kind=kind)

    @property
    def _running(self) -> InProcessEngine:
        assert self.engine is not None, "not started"
        return self.engine

    async def _start(self, run: Mapping[str, Any], config: ChildProcessEngineConfig) -> None:
        import torch

        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_config(run, recorded=True)
        # The GPU is chosen by what this process sees.
        here = "cuda" if torch.cuda.is_available() else "cpu"
        engine = InProcessEngineConfig(
            deterministic=config.deterministic,
            max_batch=config.max_batch,
            max_cache_tokens=config.max_cache_tokens,
            timeout_s=config.generate_timeout_s,
            device=here if config.device == "auto" else config.device,
            precision=config.precision,
            kv_cache=config.kv_cache,
        )
        made = loaded.host.registry.create(
            "rollout_engine", engine, run=loaded.config, tokenizer=load_tokenizer(loaded.config.model)
        )
        self.engine = made
        await made.load()
        if engine.device == "cuda":
            self._broadcasts = BroadcastReader(device=torch.device("cuda", torch.cuda.current_device()))

    async def _control(self, command: Command) -> None:
        if isinstance(command, LoadBucket):
            bucket = command.bucket
            # On a thread: weights may be on their way for a while.
            weights = await in_thread(lambda: list(self._readers[bucket.transport](bucket)))
            places = tuple(place for place in bucket.places if place.name in dict(weights))
            command = LoadBucket(WeightBucket("in_process", places, tensors=tuple(tensor for _, tensor in weights)))
        await command.apply(self._running)
        if isinstance(command, FinishUpdate):
            self._broadcasts.end_update()

    def _tell(self, number: int, news: Written) -> None:
        """Send the next tokens of a request, all of one version."""
        (version,) = set(news.versions)
        tokens: dict[str, Any] = {
            "token_ids": news.token_ids,
            "logprobs": news.logprobs,
            "raw_logprobs": news.raw_logprobs,
            "version": version,
        }
        if (experts := news.routed_experts) is not None:
            values = b64encode(np.ascontiguousarray(experts, "<i2").tobytes()).decode("ascii")
            tokens["experts"] = {"shape": list(experts.shape), "int16": values}
        if news.finish_reason is not None:
            tokens["answer"] = news.finish_reason
        self._send(number, **tokens)

    def _send(self, number: int, **message: Any) -> None:
        """Send all messages of one turn of the loop, such as the tokens of a decode step, in one write."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append({"id": number, **message})

    def _flush(self) -> None:
        self._parent.send(*self._unsent)
        self._unsent.clear()


def _request(values: Mapping[str, Any]) -> GenerationRequest:
    sampling = values["sampling"]
    lists = {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop")}
    return GenerationRequest(**{**values, "sampling": Sampling(**{**sampling, **lists})})


def main(parent: Parent) -> None:
    """Serve until the parent sends no more messages."""
    asyncio.run(Child(parent).run())
