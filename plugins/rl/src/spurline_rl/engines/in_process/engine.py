"""Rollout engine `in_process`: generate with the Hugging Face model in this process.

Data flow: requests of environments -> the engine, on their event loop -> decode steps on one thread -> results.
This engine is for CPUs, small models and tests. A server such as vLLM is faster. The engine generates with the
backend's model, or with its own copy, into which published weights are written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline.errors import DataError, RunFailedError
from spurline.protocols.backend import Backend
from spurline_models.abilities import GenerationModel, LendsModel
from spurline_models.device_profile import DeviceProfile, device_profile
from spurline_models.experts.router_replay import ExpertRouting
from spurline_models.generation import generation_model
from spurline_models.loading import check_config, load_model
from spurline_models.machine import return_freed_memory
from spurline_models.placement.offloading import DeviceMemory, DeviceTensors
from spurline_models.probe import check_exactness
from spurline_models.streams.stream_model import StreamModel
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.engines.in_process.attention import generating
from spurline_rl.engines.in_process.decoder import Decoder, probed_decoder
from spurline_rl.engines.in_process.response import Response, Written, check_request
from spurline_rl.engines.in_process.weight_writer import WeightWriter
from spurline_rl.protocols.rollout_engine import EngineMemory, GenerationRequest, GenerationResult, TakesWeights
from spurline_text.stop_texts import StopTexts

_ADVICE = "If it is only slow, raise source.engine.timeout_s (generate_timeout_s of engine child_process)."

_Result = TypeVar("_Result")


def load_own_model(config: InProcessEngineConfig, run: RunConfig) -> GenerationModel:
    """Load a copy of the run's model.

    Raises:
        ModelError: If the engine cannot compute the model exactly.
        ConfigError: If the GPU of `config` does not exist.
    """
    profile = _profile(config, run)
    with profile.keeping_generators():
        causal = load_model(run.model, profile, run.seed)
    limit = check_config(causal, run.model.path, run.data.max_length)
    model = StreamModel(causal.requires_grad_(False).eval())
    check_exactness(model, profile, run.model.path)
    return generation_model(model, profile, limit, allow_extrapolation=run.model.allow_extrapolation)


def _profile(config: InProcessEngineConfig, run: RunConfig) -> DeviceProfile:
    return device_profile(config.copy_device(run), config.computes_in(run), setting="source.engine.device")


def _give_memory(memory: DeviceMemory, decoder: Decoder, *, keep_weights: bool) -> None:
    """Free the cache and the weights of a model. If `keep_weights` is true, the weights stay in host memory."""
    decoder.free_cache()
    on_host = decoder.model.causal.device.type == "cpu"
    if not (keep_weights and on_host):
        # Buffers stay, since updates do not contain them.
        weights = list(decoder.model.causal.parameters())
        given = DeviceTensors(weights=weights) if keep_weights else DeviceTensors(weights=(), scratch=weights)
        memory.give(given, keep_weights=False)
    if on_host:
        return_freed_memory()


class InProcessEngine(TakesWeights):
    """A `RolloutEngine` that implements `SharesWeights`. If it does not share weights, it also implements `MaySleep`.

    If `share` is not called, the engine loads its own copy of the model at the first request, and only updates change
    this copy. After `share`, call the backend only while nobody awaits `generate`, or between `pause` and `resume`.

    The engine runs on the event loop. All work on the model runs on one thread. A burst is a task that runs decode
    steps. It ends when no request is in flight. A pause, a sleep or an update also ends it, and delays the next burst.
    """

    transports = ("in_process",)

    def __init__(self, config: InProcessEngineConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase):
        self._config = config
        self._tokenizer = tokenizer
        self._open_model: Callable[[], GenerationModel] = lambda: load_own_model(config, run)
        self._open_memory = lambda: DeviceMemory(_profile(config, run))
        self._memory: DeviceMemory | None = None
        # True after a sleep that did not keep the weights, until an update brings new weights.
        self._lacks_weights = False
        self._decoder: Decoder | None = None
        self._version = 0
        self._shares = False
        self._waiting: deque[Response] = deque()
        self._in_flight: dict[Response, asyncio.Future[GenerationResult]] = {}
        self._writer: WeightWriter | None = None
        self._burst: asyncio.Task[None] | None = None
        self._holds: set[str] = set()
        self._failure: BaseException | None = None
        self._notes_experts = run.source.facts.replays_experts
        self._timeout_s = config.timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spurline-decode")

    def share(self, backend: Backend) -> None:
        assert isinstance(backend, LendsModel), f"{type(backend).__name__} lends no model, contrary to its config"
        assert not self._in_flight, f"still in flight: {[response.request.name for response in self._in_flight]}"
        self._open_model = backend.generation_model
        self._decoder = None
        self._shares = True

    def set_version(self, version: int) -> None:
        self._version = version
        if self._decoder is not None and self._config.kv_cache == "recompute":
            self._decoder.outdate()

    async def generate(
        self, request: GenerationRequest, on_tokens: Callable[[Written], None] | None = None
    ) -> GenerationResult:
        """Generate a response. `on_tokens` is called with its new tokens after every decode step."""
        check_request(request)
        if self._failure is not None:
            raise _explain(self._failure, request.name)
        stop = request.sampling.stop
        response = Response(
            request,
            prompt=np.asarray(request.prompt_ids, np.int64).tolist(),
            stop_texts=StopTexts(self._tokenizer, stop) if stop else None,
            on_tokens=on_tokens,
        )
        self._in_flight[response] = asyncio.get_running_loop().create_future()
        if request.is_urgent:
            self._waiting.appendleft(response)
        else:
            self._waiting.append(response)
        self._start_burst()
        try:
            return await self._in_flight[response]
        finally:
            if self._in_flight.pop(response, None) is not None:
                response.abandoned = True
                if not self._in_flight:
                    # The caller was cancelled and may train the model next, so no decode step may be under way.
                    await self._wait_for_burst("a cancelled request")

    async def load(self) -> Decoder:
        """Load the model unless it is loaded, and return its decoder."""
        if self._decoder is None:
            self._decoder = await self._compute("loading and probing the model", self._make_decoder)
        return self._decoder

    async def pause(self) -> None:
        await self._hold("pause")

    async def resume(self) -> None:
        self._release("pause")

    async def sleep(self, *, keep_weights: bool) -> None:
        assert not self._shares, "only the owner of shared weights can free their memory"
        await self._hold("sleep")
        async with self._updating("falling asleep"):
            decoder = await self.load()
            memory = self._memory = self._memory or self._open_memory()
            self._lacks_weights = self._lacks_weights or not keep_weights
            give = partial(_give_memory, memory, decoder, keep_weights=keep_weights)
            await self._compute("falling asleep", give)

    async def wake(self, part: EngineMemory) -> None:
        async with self._updating(f"taking the memory of its {part} again"):
            assert self._memory is not None, "it does not sleep"
            if part == "weights":
                await self._compute("taking the memory of its weights again", self._memory.take)
            elif self._lacks_weights:
                raise RunFailedError("It slept without weights, and no update has brought new weights.")
        if part == "cache":
            self._release("sleep")

    async def begin_update(self, version: int) -> None:
        assert not self._shares, "the owner of shared weights updates them, and then calls set_version"
        await self._hold("update")
        async with self._updating(f"update of the weights to version {version}"):
            decoder = await self.load()
            self._writer = await self._compute("preparing an update", WeightWriter, decoder.model.causal)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        assert self._writer is not None, "no update has begun"
        names = [place.name for place in bucket.places]
        async with self._updating():
            weights = zip(names, bucket.tensors, strict=True)
            await self._compute(f"taking over {len(names)} weights", self._writer.write, weights)

    async def finish_update(self, version: int) -> None:
        assert self._writer is not None, "no update has begun"
        async with self._updating(f"update of the weights to version {version}"):
            self._writer.finish()
        self._writer = None
        self._lacks_weights = False
        self.set_version(version)
        self._release("update")

    async def close(self) -> None:
        self._fail(RunFailedError("it was closed"))
        await self._wait_for_burst("close")
        self._decoder = None
        self._thread.shutdown(wait=False)

    async def _compute(self, what: str, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Run `work` on the thread, and return its result. If it takes too long, a RunFailedError names `what`."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RunFailedError(f"{what} did not end within {self._timeout_s:g} s. {_ADVICE}") from error

    @asynccontextmanager
    async def _updating(self, what: str = "update of the weights") -> AsyncGenerator[None]:
        """Run a part of an update or of a sleep. An error in it ends the engine."""
        if self._failure is not None:
            raise _explain(self._failure, what)
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise _explain(error, what) from error

    def _start_burst(self) -> None:
        if self._in_flight and self._burst is None and not self._holds and self._failure is None:
            self._burst = asyncio.create_task(self._decode(), name="spurline-decode")

    async def _decode(self) -> None:
        """Run decode steps until no request is in flight or `_hold` is called."""
        ended: list[Response] = []
        try:
            decoder = await self.load()
            with generating(decoder.model.causal, decoder.attention):
                while self._goes_on(ended):
                    self._deliver(ended)
                    # Let callers send their next requests first, so the requests of a step do not depend on timing.
                    await asyncio.sleep(0)
                    more, ended = decoder.take(self._waiting)
                    state = f"a decode step ({len(decoder.responses)} responses under way, {len(more)} new)"
                    ended += await self._compute(state, decoder.advance, more, self._version)
                    for response in (*decoder.responses, *ended):
                        response.tell()
                decoder.drop_abandoned()
        except Exception as error:  # noqa: BLE001 - all callers get it
            self._fail(error)
        finally:
            self._burst = None
        # The model must be free before the last response is delivered, since its caller may train at once.
        self._deliver(ended)
        self._start_burst()

    def _goes_on(self, ended: list[Response]) -> bool:
        """Return whether decoding continues: requests other than `ended` are in flight, and no hold is set."""
        held = self._holds or self._failure is not None
        return not held and len(self._in_flight) > sum(response in self._in_flight for response in ended)

    def _deliver(self, responses: list[Response]) -> None:
        for response in responses:
            waiter = self._in_flight.pop(response, None)
            if waiter is not None and not waiter.done():
                try:
                    waiter.set_result(response.result())
                except DataError as refused:
                    waiter.set_exception(refused)
        responses.clear()

    def _fail(self, failure: BaseException) -> None:
        """End the engine. Waiting and later callers get an error."""
        self._failure = self._failure or failure
        for response, waiter in self._in_flight.items():
            if not waiter.done():
                waiter.set_exception(_explain(failure, response.request.name))
        self._in_flight.clear()
        self._waiting.clear()

    async def _hold(self, why: str) -> None:
        """Wait for the decode step under way, and start no further step until `_release`."""
        self._holds.add(why)
        await self._wait_for_burst(why)
        if self._failure is not None:
            raise _explain(self._failure, why)

    def _release(self, why: str) -> None:
        self._holds.discard(why)
        self._start_burst()

    async def _wait_for_burst(self, who: str) -> None:
        if self._burst is not None:
            # A step that takes longer than `timeout_s` ends the burst before this wait ends, with a better message.
            done, _ = await asyncio.wait({self._burst}, timeout=2 * self._timeout_s)
            if not done:
                raise RunFailedError(f"{who}: the decode step under way has not ended. {_ADVICE}")

    def _make_decoder(self) -> Decoder:
        model = self._open_model()
        routing = ExpertRouting(model.causal) if self._notes_experts else None
        return probed_decoder(
            lambda kind: kind(model, self._tokenizer, self._config, routing), deterministic=self._config.deterministic
        )


def _explain(failure: BaseException, name: str) -> RunFailedError:
    """Return a new error for one caller. If tasks shared one exception, their tracebacks would be mixed up."""
    kind = "" if isinstance(failure, RunFailedError) else f"{type(failure).__name__}: "
    error = RunFailedError(f"{name}: the rollout engine in_process has ended: {kind}{failure}")
    error.__cause__ = failure
    return error
