"""vLLM engines in Ray actors: their room on the cluster, an actor, and the handle to it.

Place on the way: member -> `RayEngine`, on the controller -> `EngineActor`, on any node -> AsyncEngine. All that comes
from the engine comes back through one stream, in order: a batch of whatever has happened since the last one. Imported
only with `placement: ray`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from spurline.errors import ConfigError
from spurline.protocols.rollout_engine import Sampling, WeightBucket
from spurline.ranks.group import RankRequest, RuntimeEnv
from spurline.ranks.machine import this_machine
from spurline.ranks.ray_cluster import RayCluster
from spurline.rl.concurrency import in_thread
from spurline_async_rl.engines.commands import Command, LoadBucket
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.launch import EngineSpec
from spurline_async_rl.engines.vllm.member import Delta


class EngineCluster:
    """Room for engines on the Ray cluster, from the first `reserve` to `close`."""

    def __init__(self, config: VllmEngineConfig, ranks: RankRequest | None):
        """ranks: those of the backend, where it has some."""
        self._config = config
        runtime_env, self._gpus_of_ranks = RuntimeEnv(), 0
        if ranks is not None and ranks.launch == "ray":
            # What a run places on Ray is one job, with one environment.
            runtime_env = ranks.runtime_env
            self._gpus_of_ranks = ranks.count if ranks.device == "cuda" else 0
        self._cluster = RayCluster(runtime_env)

    async def reserve(self) -> Any:
        """A placement group for one engine, ready. Raises ConfigError when the cluster can never have room for it."""
        await in_thread(self._cluster.open)
        needs = self._needs()
        for resource, count in needs.items():
            there = self._cluster.total(resource)
            taken = self._gpus_of_ranks if resource == "GPU" else 0
            if there - taken < count * self._config.engines:
                others = f", of which ranks of the backend have {taken}" if taken else ""
                raise ConfigError.at(
                    "source.engine.engines",
                    f"is {self._config.engines}, each with {count:g} {resource}, but the Ray cluster has "
                    f"{there:g}{others}. Lower engines or tensor_parallel_size, or add nodes.",
                )
        group = self._cluster.reserve([needs], "STRICT_PACK")
        try:
            await group.ready()
        except BaseException:
            self.release(group)
            raise
        return group

    def release(self, group: Any) -> None:
        """Give its resources back."""
        self._cluster.release(group)

    def actor_options(self, group: Any) -> dict[str, Any]:
        """Options of the actor that is to run there."""
        return self._cluster.actor_options(group, 0, self._needs())

    async def close(self) -> None:
        await in_thread(self._cluster.close)

    def engine(self, spec: EngineSpec) -> RayEngine:
        """One that has not been started, for this cluster."""
        return RayEngine(spec, self)

    def _needs(self) -> dict[str, float]:
        """Resources of one engine."""
        gpus = {"GPU": self._config.tensor_parallel_size} if self._cluster.total("GPU") else {}
        return {"CPU": 1, **gpus}


News = Delta | Exception | None
"""What has happened to a request or command: tokens of the request, why it failed, or nothing for the mark behind a
command."""


class EngineActor:
    """Runs in the actor; every method is called through Ray."""

    def __init__(self, plain_spec: tuple[dict[str, Any], dict[str, Any], str, int]):
        self._engine = AsyncEngine(EngineSpec.from_plain(plain_spec))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events: list[tuple[str, News]] = []
        self._more = asyncio.Event()

    async def start(self) -> tuple[int, int, str, str, str]:
        """The longest context, the size of the vocabulary, the name for messages, the id of the node, and which machine
        it is on."""
        import ray

        await self._engine.start()
        node = ray.get_runtime_context().get_node_id()
        return self._engine.max_model_len, self._engine.vocabulary, self._engine.where, node, this_machine()

    async def events(self) -> AsyncGenerator[list[tuple[str, News]], None]:
        """The stream of news by id of request or command. It has one reader, and ends with the actor."""
        while True:
            await self._more.wait()
            self._more.clear()
            events, self._events = self._events, []
            yield events

    async def submit(self, request_id: str, prompt: list[int], sampling: Sampling, seed: int, salt: str) -> None:
        self._tasks[request_id] = asyncio.create_task(self._generate(request_id, prompt, sampling, seed, salt))

    async def abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def control(self, command: Command, mark: str) -> None:
        await self._engine.control(command)
        self._tell(mark, None)

    async def wait_ended(self) -> str:
        return await self._engine.wait_ended()

    async def close(self) -> None:
        await self._engine.close()
        # Ray kills an actor with all its children, so also the one that would free what the engine has left of its
        # shared memory. Stopped in order, it does so now.
        tracker: Any = resource_tracker._resource_tracker
        await in_thread(tracker._stop)

    async def _generate(self, request_id: str, prompt: list[int], sampling: Sampling, seed: int, salt: str) -> None:
        try:
            async for delta in self._engine.generate(request_id, prompt, sampling, seed, salt):
                self._tell(request_id, delta)
        except Exception as error:  # noqa: BLE001 (not swallowed: raised at the controller)
            self._tell(request_id, error)
        finally:
            del self._tasks[request_id]

    def _tell(self, key: str, news: News) -> None:
        self._events.append((key, news))
        self._more.set()


class RayEngine:
    """A `VllmHandle`."""

    max_model_len: int
    vocabulary: int
    where = "a Ray actor"

    def __init__(self, spec: EngineSpec, cluster: EngineCluster):
        self._spec = spec
        self._cluster = cluster
        self._group: Any = None
        self._actor: Any = None
        self._node = self._machine = ""
        self._inboxes: dict[str, asyncio.Queue[News]] = {}
        self._marks = (f"command {number}" for number in itertools.count())
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        import ray

        self._group = await self._cluster.reserve()
        actor_class: Any = ray.remote(EngineActor)
        self._actor = actor_class.options(**self._cluster.actor_options(self._group)).remote(self._spec.to_plain())
        self.max_model_len, self.vocabulary, where, self._node, self._machine = await self._ask("start")
        self.where = f"{where} on Ray node {self._node[:8]}"
        self._reader = asyncio.create_task(self._read(), name="spurline-ray-events")

    async def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, seed: int, salt: str
    ) -> AsyncGenerator[Delta, None]:
        inbox = self._inboxes[request_id] = asyncio.Queue()
        ended = False
        # Tokens may overtake the answer to this: whoever waited for it would take them for those of later weights.
        submitting = asyncio.ensure_future(self._ask("submit", request_id, list(prompt), sampling, seed, salt))
        submitting.add_done_callback(partial(_tell_failure, inbox))
        try:
            while not ended:
                delta = await inbox.get()
                if isinstance(delta, Exception):
                    ended = True
                    raise delta
                assert delta is not None, "the mark of a command among the tokens of a request"
                ended = delta.finish_reason is not None
                yield delta
        finally:
            submitting.cancel()
            del self._inboxes[request_id]
            # A pool that finds the actor dead closes it before its requests hear of that.
            if not ended and self._actor is not None:
                self._actor.abort.remote(request_id)

    async def control(self, command: Command) -> None:
        if isinstance(command, LoadBucket):
            self._check_reach(command.bucket)
        mark = next(self._marks)
        self._inboxes[mark] = asyncio.Queue()
        try:
            await self._ask("control", command, mark)
            # Behind all tokens in the stream; whoever gets the last of them is woken before this is.
            if isinstance(error := await self._inboxes[mark].get(), Exception):
                raise error
        finally:
            del self._inboxes[mark]

    async def wait_ended(self) -> str:
        try:
            return await self._ask("wait_ended")
        except EngineDiedError as error:
            return str(error)

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        try:
            if actor is not None:
                await actor.close.remote()
        except Exception as error:  # noqa: BLE001
            # It has died, which is as good.
            del error
        finally:
            self._end(actor)

    def _check_reach(self, bucket: WeightBucket) -> None:
        if bucket.machine and self._machine != bucket.machine:
            raise ConfigError.at(
                "source.weight_sync.name",
                f"is {bucket.transport}, which ends at the trainer's machine, but Ray has put an engine on node "
                f"{self._node[:8]}. Set weight_sync: disk with a folder that all nodes see.",
            )

    def _end(self, actor: Any) -> None:
        """End the actor by force; its processes end with it."""
        import ray

        if self._reader is not None:
            self._reader.cancel()
        if actor is not None and ray.is_initialized():
            ray.kill(actor)
        if self._group is not None and ray.is_initialized():
            self._cluster.release(self._group)
            self._group = None

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """The actor's answer. Raises EngineDiedError when the actor has died."""
        from ray.exceptions import RayActorError, RayTaskError

        if self._actor is None:
            raise EngineDiedError(f"the actor was closed before {method}")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayActorError as error:
            raise EngineDiedError(f"the actor of {self.where} has died: {error}") from error
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else EngineDiedError(str(error)) from None

    async def _read(self) -> None:
        """Hand on what comes, until the actor dies."""
        try:
            async for batch in self._actor.events.remote():
                for key, news in await batch:
                    if key in self._inboxes:
                        self._inboxes[key].put_nowait(news)
        except Exception as error:  # noqa: BLE001 (not swallowed: it reaches everyone who waits)
            for inbox in self._inboxes.values():
                inbox.put_nowait(EngineDiedError(f"{self.where} has died: {type(error).__name__}: {error}"))


def _tell_failure(inbox: asyncio.Queue[News], submitted: asyncio.Future[Any]) -> None:
    """A request that was not even taken ends for whoever waits for its tokens."""
    error = None if submitted.cancelled() else submitted.exception()
    if isinstance(error, Exception):
        inbox.put_nowait(error)
