"""Rollout engine `child_process`: engine `in_process` in processes of its own.

Place on the way: pool -> `ChildMember` -> messages -> `main.py` in the child -> the Hugging Face model. Generation thus
never holds up the event loop or the training of this process.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from spurline.child import ChildProcess
from spurline.config.run_config import RunConfig
from spurline.errors import BucketLostError, DataError, RunFailedError, UserError
from spurline_async_rl.engines.commands import Command
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.engines.gpus import VISIBLE, shared_gpu
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.trajectory import FinishReason

_ERRORS = {"data": DataError, "user": UserError, "lost": BucketLostError, "failed": RunFailedError}
"""Errors of a child, by the kind that its message names."""


class ChildMember:
    """An `EngineMember`."""

    transports: Sequence[str] = ("shared_memory", "collective", "disk")
    num_workers = 1
    weights_dtype: str | None = "float32"

    def __init__(self, number: int, config: ChildProcessEngineConfig, run: RunConfig) -> None:
        self.name = name = f"engine {number}"
        # Must be set before torch is imported, which else makes a thread for every core.
        self._environment = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
        if (gpu := shared_gpu(run, number)) is not None:
            self._environment[VISIBLE] = gpu
        self._config = config
        self._run = run
        self._log = run.run_dir / "engines" / f"{name.replace(' ', '-')}.log"
        self._child: ChildProcess | None = None
        self._dead = asyncio.Event()
        self._end = ""
        self._ids = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._progress: dict[int, Progress] = {}

    async def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        self._child = ChildProcess(
            "spurline_async_rl.engines.child.main",
            take=lambda messages: loop.call_soon_threadsafe(self._take, messages),
            on_end=lambda child: loop.call_soon_threadsafe(self._note_end, child.how_it_ended, child.last_words()),
            log=self._log,
            environment=self._environment,
        )
        self.name = f"{self.name} (process {self._child.pid})"
        run = self._run.model_dump(mode="json", serialize_as_any=True)
        await self._call("start", run=run, config=self._config.model_dump(mode="json"))

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        try:
            prompt: list[int] = np.asarray(request.prompt_ids, np.int64).tolist()
            plain = {**vars(request), "prompt_ids": prompt, "sampling": vars(request.sampling)}
            return await self._call("generate", progress, request=plain)
        except EngineDiedError:
            raise
        except RunFailedError as error:
            # The engine in the child has failed for good.
            raise EngineDiedError(str(error)) from error

    async def control(self, command: Command) -> None:
        await self._call("control", command=command.to_plain())

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._end

    async def close(self) -> None:
        if self._child is None:
            return
        # It ends by itself when its input ends.
        self._child.close_input()
        try:
            await self._dead.wait()
        finally:
            self._child.kill()
            await self._dead.wait()
            self._child.end()

    async def _call(self, what: str, progress: Progress | None = None, **arguments: Any) -> Any:
        """Return the child's answer. Raises the child's error, or EngineDiedError if the child ends before."""
        assert self._child is not None
        if self._dead.is_set():
            raise EngineDiedError(f"{self.name} ended: {self._end}")
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if progress is not None:
            self._progress[number] = progress
        self._child.send({"id": number, "do": what, **arguments})
        try:
            return await answer
        except asyncio.CancelledError:
            self._child.send({"id": number, "do": "abort"})
            raise
        finally:
            del self._answers[number]
            self._progress.pop(number, None)

    def _take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            number = message["id"]
            progress = self._progress.get(number)
            if "token_ids" in message and progress is not None:
                progress.add(*(message[name] for name in ("token_ids", "logprobs", "raw_logprobs", "version")))
                if experts := message.get("experts"):
                    values = np.frombuffer(b64decode(experts["int16"]), "<i2").astype(np.int16)
                    progress.experts.add(len(progress.experts), values.reshape(experts["shape"]))
            answer = self._answers.get(number)
            if answer is None or answer.done():
                continue
            if "error" in message:
                answer.set_exception(_ERRORS[message["kind"]](message["error"]))
            elif "answer" in message:
                answer.set_result(message["answer"])

    def _note_end(self, how: str, last_words: str) -> None:
        self._end = f"{how}; " + (f"end of {self._log}:\n{last_words}" if last_words else f"{self._log} is empty")
        self._dead.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDiedError(f"{self.name} ended: {self._end}"))


class ChildProcessEngine(EnginePool):
    """A `RolloutEngine` that `TakesWeights`. The engines' output goes to `engines/` in the run directory."""

    def __init__(self, config: ChildProcessEngineConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(
            config,
            lambda number: ChildMember(number, config, run),
            transports=ChildMember.transports,
            tokenizer=tokenizer,
        )
