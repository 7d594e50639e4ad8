"""Rollout engine `child_process`, which runs engine `in_process` in child processes.

Generation then never delays the event loop or the training of the parent process. `ChildMember` in the parent process
and `Child` in the child process exchange messages.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from spurline.config.loading import load_config
from spurline.config.run_config import RunConfig
from spurline.errors import BucketLostError, DataError, RunFailedError, SpurlineError, UserError
from spurline_async_rl.engines.commands import Command, FinishUpdate, LoadBucket, from_plain
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.engines.gpus import VISIBLE, shared_gpu
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress
from spurline_async_rl.weights.reading import BucketReader
from spurline_concurrency.calls import in_thread
from spurline_concurrency.child import ChildProcess, Parent
from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_rl.engines.configs import DecodingConfig, InProcessEngineConfig
from spurline_rl.engines.in_process.engine import InProcessEngine
from spurline_rl.engines.in_process.response import Written
from spurline_rl.protocols.rollout_engine import GenerationRequest, Sampling
from spurline_rl.trajectory import FinishReason
from spurline_text.tokenizer import load_tokenizer

_ERRORS = {"data": DataError, "user": UserError, "lost": BucketLostError, "failed": RunFailedError}
"""The classes of errors in a child, by the `kind` in the message that reports the error."""


class ChildMember:
    """An `EngineMember` whose engine is in a child process."""

    transports: Sequence[str] = ("shared_memory", "collective", "disk")
    num_workers = 1
    weights_dtype: str | None = "float32"

    def __init__(self, number: int, config: ChildProcessEngineConfig, run: RunConfig) -> None:
        self.name = name = f"engine {number}"
        # torch reads OMP_NUM_THREADS when the child imports it.
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
        # The prompt of all requests until another one is sent.
        self._prompt: list[int] | None = None

    async def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        self._child = ChildProcess(
            __name__,
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
            if self._child is not None and prompt != self._prompt:
                # The attempts of a group have the same prompt, and mostly come one after another.
                self._child.send({"do": "prompt", "prompt_ids": prompt})
                self._prompt = prompt
            plain = {**vars(request), "prompt_ids": None, "sampling": vars(request.sampling)}
            return await self._call("generate", progress, request=plain)
        except EngineDiedError:
            raise
        except RunFailedError as error:
            # The engine in the child cannot generate any more.
            raise EngineDiedError(str(error)) from error

    async def control(self, command: Command) -> None:
        await self._call("control", command=command.to_plain())

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._end

    async def close(self) -> None:
        if self._child is None:
            return
        # The child process ends by itself when its input ends.
        self._child.close_input()
        try:
            await self._dead.wait()
        finally:
            self._child.kill()
            await self._dead.wait()
            self._child.end()

    async def _call(self, what: str, progress: Progress | None = None, **arguments: Any) -> Any:
        """Return the child's answer. Raises the child's error, or EngineDiedError if the child ends first."""
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
                support = np.frombuffer(b64decode(message.get("support", "")), "<i4")
                progress.add(message["token_ids"], message["logprobs"], message["version"], support)
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


class Child:
    """Carries out the parent's messages in the child process. Each message has a task, so requests run concurrently."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._unsent: list[dict[str, Any]] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.engine: InProcessEngine | None = None
        self._reader = BucketReader()
        self._prompt: Sequence[int] = ()

    async def run(self) -> None:
        messages = self._parent.messages()
        while arrived := await in_thread(lambda: next(messages, None)):
            for message in arrived:
                self.take(message)
        if self.engine is not None:
            await self.engine.close()

    def take(self, message: Mapping[str, Any]) -> None:
        """Start a task for this message, cancel an earlier task, or note the prompt of later requests."""
        if message["do"] == "prompt":
            self._prompt = message["prompt_ids"]
            return
        number = message["id"]
        if message["do"] == "abort":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        if message["do"] == "generate":
            message["request"]["prompt_ids"] = self._prompt
        self._tasks[number] = asyncio.create_task(self._answer(message))
        self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, message: Mapping[str, Any]) -> None:
        number = message["id"]
        try:
            if message["do"] == "generate":
                assert self.engine is not None, "not started"
                await self.engine.generate(_request(message["request"]), partial(self._tell, number))
            else:
                if message["do"] == "start":
                    await self._start(message["run"], ChildProcessEngineConfig.model_validate(message["config"]))
                else:
                    await self._control(from_plain(message["command"]))
                self._send(number, answer=None)
        except Exception as error:  # noqa: BLE001 - sent to the parent
            text = str(error) if isinstance(error, SpurlineError) else f"{type(error).__name__}: {error}"
            kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "failed")
            self._send(number, error=text, kind=kind)

    async def _start(self, run: Mapping[str, Any], config: ChildProcessEngineConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_config(run, recorded=True)
        here = "cuda" if torch.cuda.is_available() else "cpu"
        given = config.model_dump(include={*DecodingConfig.model_fields} - {"name"})
        device = here if config.device == "auto" else config.device
        engine = InProcessEngineConfig(**{**given, "device": device, "timeout_s": config.generate_timeout_s})
        made = loaded.host.registry.create(
            "rollout_engine", engine, run=loaded.config, tokenizer=load_tokenizer(loaded.config.model)
        )
        self.engine = made
        await made.load()
        if engine.device == "cuda":
            self._reader = BucketReader(device=torch.device("cuda", torch.cuda.current_device()))

    async def _control(self, command: Command) -> None:
        if isinstance(command, LoadBucket):
            bucket = command.bucket
            # Reading takes a while, so it runs on a thread.
            weights = await in_thread(lambda: list(self._reader.read(bucket)))
            places = tuple(TensorPlace.of(name, tensor) for name, tensor in weights)
            command = LoadBucket(WeightBucket("in_process", places, tensors=tuple(tensor for _, tensor in weights)))
        await command.apply(self.engine)
        if isinstance(command, FinishUpdate):
            self._reader.end_update()

    def _tell(self, number: int, news: Written) -> None:
        (version,) = set(news.versions)
        tokens: dict[str, Any] = {"token_ids": news.token_ids, "logprobs": news.logprobs, "version": version}
        if news.support:
            tokens["support"] = b64encode(np.stack(news.support).astype("<i4").tobytes()).decode("ascii")
        if (experts := news.routed_experts) is not None:
            values = b64encode(np.ascontiguousarray(experts, "<i2").tobytes()).decode("ascii")
            tokens["experts"] = {"shape": list(experts.shape), "int16": values}
        if news.finish_reason is not None:
            tokens["answer"] = news.finish_reason
        self._send(number, **tokens)

    def _send(self, number: int, **message: Any) -> None:
        """Send a message together with all other messages of the same iteration of the event loop."""
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
    """Serve until the parent closes the input of this process."""
    asyncio.run(Child(parent).run())
