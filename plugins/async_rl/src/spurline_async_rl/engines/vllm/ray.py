"""Run vLLM engines in Ray actors.

`RayEngine` is in the controller, and sends requests to an `EngineActor` on any node. The actor runs an `AsyncEngine`.
All tokens and errors of an actor come back through one stream, in order and in batches. This module is imported only
with `placement: ray`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from spurline.config.run_config import RunConfig
from spurline_async_rl.engines.commands import Command
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.response import Delta
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.launch import EngineSpec
from spurline_concurrency.calls import in_thread
from spurline_ranks.cluster import cluster_request
from spurline_ranks.cluster_room import Place, each_needs, placed, room_for
from spurline_ranks.logs import write_into
from spurline_ranks.ray_cluster import RayCluster
from spurline_rl.protocols.rollout_engine import GenerationRequest

_GATHERING_S = 0.1
"""Seconds for which an actor collects tokens for one message, because each message costs the controller 0.5 ms."""


class EngineCluster:
    """Reserves and releases resources for engines on the Ray cluster. A `Place` has the resources of one engine."""

    def __init__(self, config: VllmEngineConfig, run: RunConfig):
        need = config.cluster_need(run)
        assert need is not None, config.placement
        self._need = need
        self._request = cluster_request(run)
        self._cluster = RayCluster(self._request)
        self._lock = threading.Lock()
        self._places: list[Place] | None = None
        self._failure: Exception | None = None
        self._closing = threading.Event()

    async def reserve(self) -> Place:
        """Return reserved resources for one engine. A replacement of a dead engine may have to wait for free resources.

        Raises:
            ConfigError: If the cluster is too small for the engines that start with the run.
        """
        if (place := await in_thread(self._take)) is not None:
            return place
        each = each_needs(self._need, self._cluster.nodes())
        group = self._cluster.reserve([each])
        try:
            await group.ready()
        except BaseException:
            self._cluster.release(group)
            raise
        return placed(group, [each], self._cluster.nodes())

    def release(self, place: Place) -> None:
        self._cluster.release(place.group)

    def actor_options(self, place: Place) -> dict[str, Any]:
        return self._cluster.actor_options(place.group, 0, place.bundles[0])

    async def close(self) -> None:
        """Release the unused places, and refuse further reservations."""
        self._closing.set()
        await in_thread(self._leave)

    def engine(self, spec: EngineSpec, number: int) -> RayEngine:
        """Return an engine that has not been started."""
        folder = self._request.log_dir
        return RayEngine(spec, self, None if folder is None else f"{folder}/engine-{number}.log")

    def _take(self) -> Place | None:
        """Return a place that was reserved for the start of the run, or None if all of them are taken."""
        with self._lock:
            if self._closing.is_set():
                raise EngineDiedError("the engine was closed before there was room for it")
            if self._failure is not None:
                raise self._failure
            if self._places is None:
                self._cluster.open()
                setting, limit_s = "source.engine.engines", self._request.room_timeout_s
                try:
                    self._places = room_for(self._cluster, self._need, setting, limit_s, given_up=self._closing.is_set)
                except Exception as error:
                    # The starts of all other engines raise the same error.
                    self._failure = error
                    raise
            return self._places.pop(0) if self._places else None

    def _leave(self) -> None:
        # Wait for the thread of a cancelled start, which may hold the lock and still reserve places.
        with self._lock:
            for place in self._places or ():
                self.release(place)
            self._places = []
            self._cluster.close()


News = Delta | Exception | None
"""Tokens of a request, an error, or None, which marks the end of a command."""


class EngineActor:
    """The Ray actor of an engine. All methods are called through Ray."""

    def __init__(self, spec: EngineSpec, log: str | None):
        if log is not None:
            write_into(log)
            spec = replace(spec, log=Path(log))
        self._engine = AsyncEngine(spec)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events: list[tuple[str, News]] = []
        self._more, self._urgent = asyncio.Event(), asyncio.Event()

    async def start(self) -> tuple[int, int, str, str]:
        """Return the length of the context, the size of the vocabulary, the dtype, and where the engine runs."""
        import ray

        await self._engine.start()
        engine, node = self._engine, ray.get_runtime_context().get_node_id()
        where = f"{engine.where} on Ray node {node[:8]}"
        return engine.max_model_len, engine.vocabulary, engine.weights_dtype, where

    async def events(self) -> AsyncGenerator[list[tuple[str, News]], None]:
        """Yield lists of (id of a request or command, its news), until the actor ends."""
        while True:
            await self._more.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), _GATHERING_S)
            self._more.clear()
            self._urgent.clear()
            events, self._events = self._events, []
            yield events

    async def submit(self, request_id: str, request: GenerationRequest, salt: str, each_step: bool) -> None:
        deltas = self._engine.generate(request_id, request, salt, each_step=each_step)
        self._tasks[request_id] = asyncio.create_task(self._generate(request_id, deltas))

    async def abort(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def control(self, command: Command, mark: str) -> None:
        await self._engine.control(command)
        self._tell(mark, None)

    async def wait_ended(self) -> str:
        return await self._engine.wait_ended()

    async def close(self) -> None:
        await self._engine.close()
        # Ray would kill the resource tracker. Stop it first, so that it frees the engine's shared memory.
        tracker: Any = resource_tracker._resource_tracker
        await in_thread(tracker._stop)

    async def _generate(self, request_id: str, deltas: AsyncGenerator[Delta, None]) -> None:
        try:
            async for delta in deltas:
                self._tell(request_id, delta)
        except Exception as error:  # noqa: BLE001 - raised in the controller
            self._tell(request_id, error)
        finally:
            del self._tasks[request_id]

    def _tell(self, key: str, news: News) -> None:
        self._events.append((key, news))
        self._more.set()
        if not isinstance(news, Delta) or news.finish_reason is not None:
            self._urgent.set()


class RayEngine:
    """The handle of an engine in an actor, with the methods of `AsyncEngine`."""

    max_model_len: int
    vocabulary: int
    weights_dtype: str
    where = "a Ray actor"

    def __init__(self, spec: EngineSpec, cluster: EngineCluster, log: str | None = None):
        self._spec = spec
        self._log = log
        self.num_workers = spec.config.tensor_parallel_size
        self._cluster = cluster
        self._place: Place | None = None
        self._actor: Any = None
        self._inboxes: dict[str, asyncio.Queue[News]] = {}
        self._marks = (f"command {number}" for number in itertools.count())
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        import ray

        place = self._place = await self._cluster.reserve()
        actor_class: Any = ray.remote(EngineActor)
        options = self._cluster.actor_options(place)
        self._actor = actor_class.options(**options).remote(self._spec, self._log)
        self.max_model_len, self.vocabulary, self.weights_dtype, self.where = await self._ask("start")
        self._reader = asyncio.create_task(self._read(), name="spurline-ray-events")

    async def generate(
        self, request_id: str, request: GenerationRequest, salt: str, *, each_step: bool = False
    ) -> AsyncGenerator[Delta, None]:
        inbox = self._inboxes[request_id] = asyncio.Queue()
        ended = False
        # Read tokens even before `submit` returns. Otherwise they could be counted as tokens of later weights.
        submitting = asyncio.ensure_future(self._ask("submit", request_id, request, salt, each_step))
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
            # The actor is None if the pool has closed this engine.
            if not ended and self._actor is not None:
                self._actor.abort.remote(request_id)

    async def control(self, command: Command) -> None:
        mark = next(self._marks)
        self._inboxes[mark] = asyncio.Queue()
        try:
            await self._ask("control", command, mark)
            # The mark comes after all earlier tokens in the stream, so the readers of these tokens are woken first.
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
        import ray

        actor, self._actor = self._actor, None
        try:
            if actor is not None:
                # A dead actor raises an error.
                with contextlib.suppress(Exception):
                    await actor.close.remote()
        finally:
            if self._reader is not None:
                self._reader.cancel()
            if actor is not None and ray.is_initialized():
                # This kills the processes of the actor too.
                ray.kill(actor)
            if self._place is not None and ray.is_initialized():
                self._cluster.release(self._place)
                self._place = None

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor and return its answer. Raises EngineDiedError if the actor has died."""
        from ray.exceptions import RayActorError, RayTaskError

        if self._actor is None:
            raise EngineDiedError(f"the actor was closed before {method}")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayActorError as error:
            log = "" if self._log is None else f" Its log is {self._log}."
            raise EngineDiedError(f"{self.where} has died: {error}.{log}") from error
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else EngineDiedError(str(error)) from None

    async def _read(self) -> None:
        try:
            async for batch in self._actor.events.remote():
                for key, news in await batch:
                    if key in self._inboxes:
                        self._inboxes[key].put_nowait(news)
        except Exception as error:  # noqa: BLE001 - raised by all waiting calls
            for inbox in self._inboxes.values():
                inbox.put_nowait(EngineDiedError(f"{self.where} has died: {type(error).__name__}: {error}"))


def _tell_failure(inbox: asyncio.Queue[News], submitted: asyncio.Future[Any]) -> None:
    """Pass the error of a submission to the reader of the request's tokens."""
    error = None if submitted.cancelled() else submitted.exception()
    if isinstance(error, Exception):
        inbox.put_nowait(error)
