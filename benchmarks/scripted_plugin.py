"""Offer engine, environment and trainer without a model for `controller.py`.

They cost almost nothing, so a run with them shows the cost of the source, the scheduler and the preparation of batches.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from spurline.data.batch import TrainingBatch
from spurline.plugins.hookspecs import hookimpl
from spurline.plugins.host import API_VERSION, InstalledPlugin, Plugin
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.backend import BackendConfig
from spurline.protocols.loss import Objective
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.environment import EnvironmentConfig, PolicyHandle, Task
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, RolloutEngineConfig, TakesWeights
from spurline_rl.trajectory import Trajectory

PLUGIN = Plugin("scripted", api=API_VERSION)
INSTALLED = InstalledPlugin("scripted", __name__, "benchmarks", "0")

_TICK_S = 0.005
"""Seconds between two ticks, which look for ended responses. The delay of a tick is the lag of the event loop."""


class Observed:
    """Observations of the scripted parts for the benchmark. Times of threads are CPU seconds.

    Attributes:
        engine_s: The time of the scripted engine in the event loop's thread.
        lags: The delay of each tick of the event loop, in seconds.
        ended: The number of ended attempts.
        updates: The CPU time of the training thread and the wall clock at the beginning of each update.
    """

    def __init__(self) -> None:
        self.loop_clock: int | None = None
        self.engine_s = 0.0
        self.lags: list[float] = []
        self.ended = 0
        self.updates: list[tuple[float, float]] = []
        self.rss_before_save = 0

    def loop_seconds(self) -> float:
        """Return the CPU time of the event loop's thread without the time of the scripted engine."""
        return 0.0 if self.loop_clock is None else time.clock_gettime(self.loop_clock) - self.engine_s


OBSERVED = Observed()


class ScriptedEngineConfig(RolloutEngineConfig):
    """Settings of an engine with responses of equal length, each after a lognormal time."""

    name: str = "scripted"
    tokens: int = Field(default=2048, gt=1)
    mean_s: float = Field(gt=0)
    sigma: float = Field(default=1.0, ge=0)


class ScriptedEngine(TakesWeights):
    """An engine that ends responses at the ticks of one task, since a timer for each response would cost too much."""

    transports: Sequence[str] = ("in_process",)

    def __init__(self, config: ScriptedEngineConfig, run: Any, tokenizer: Any) -> None:
        generator = np.random.default_rng(0)
        self._tokens = generator.integers(5, 60, config.tokens).astype(np.int32)
        self._logprobs = generator.normal(-1, 0.3, config.tokens).astype(np.float32)
        times = config.mean_s * np.exp(generator.normal(-(config.sigma**2) / 2, config.sigma, 1 << 16))
        self._times: list[float] = times.tolist()
        self._asked = 0
        self._version = 0
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ticking: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        began_at = time.thread_time()
        loop = asyncio.get_running_loop()
        if self._ticking is None:
            OBSERVED.loop_clock = time.pthread_getcpuclockid(threading.get_ident())
            self._ticking = loop.create_task(self._tick())
        began = self._version
        ended: asyncio.Future[None] = loop.create_future()
        seconds = self._times[self._asked % len(self._times)]
        self._asked += 1
        heapq.heappush(self._due, (loop.time() + seconds, self._asked, ended))
        OBSERVED.engine_s += time.thread_time() - began_at
        await ended
        began_at = time.thread_time()
        versions = np.full(len(self._tokens), self._version, np.int32)
        versions[: len(versions) // 2] = began
        # Each result gets its own arrays, as with real engines.
        result = GenerationResult(self._tokens.copy(), self._logprobs.copy(), versions, "stop")
        OBSERVED.engine_s += time.thread_time() - began_at
        return result

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            expected = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            began_at, now = time.thread_time(), loop.time()
            OBSERVED.lags.append(now - expected)
            while self._due and self._due[0][0] <= now:
                ended = heapq.heappop(self._due)[2]
                OBSERVED.ended += 1
                if not ended.done():
                    ended.set_result(None)
            OBSERVED.engine_s += time.thread_time() - began_at

    async def begin_update(self, version: int) -> None: ...

    async def load_bucket(self, bucket: WeightBucket) -> None: ...

    async def finish_update(self, version: int) -> None:
        self._version = version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()


class ScriptedEnvironmentConfig(EnvironmentConfig):
    """Settings of an environment with one turn, whose reward depends on the number of the attempt."""

    name: str = "scripted"


class ScriptedEnvironment:
    """An environment that does not decode or judge responses."""

    def __init__(self, config: ScriptedEnvironmentConfig, registry: Any, tokenizer: Any, data: Any) -> None:
        self._prompt = list(range(5, 53))

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        await policy.generate(self._prompt)
        return policy.finish({"right": float(task.sample % 3 == 0)})


class ScriptedBackendConfig(BackendConfig):
    """A trainer that sleeps."""

    name: str = "scripted"
    step_s: float = Field(ge=0)


class ScriptedBackend:
    """A backend without a model."""

    def __init__(self, config: ScriptedBackendConfig, run: Any, registry: Any, total_updates: int) -> None:
        self._step_s = config.step_s

    def update(self, batch: TrainingBatch, objective: Objective, *, role: str = "policy") -> Mapping[str, float]:
        OBSERVED.updates.append((time.thread_time(), time.perf_counter()))
        time.sleep(self._step_s)
        times = {"time/forward_backward": self._step_s, "time/optimizer": 0.0}
        return {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "tokens": 0.0, "loss_tokens": 0.0, **times}

    def logprobs(self, batch: TrainingBatch, role: str = "policy", *, temperature: float = 1.0) -> torch.Tensor:
        # These are close to the engine's logprobs, and cheap to compute.
        return batch.drop_padding_rows(batch.tokens["rollout_logprobs"] * 1.001)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(8)

    def facts(self) -> Mapping[str, int | str]:
        return {"device": "no device"}

    def save(self, path: Path) -> Mapping[str, Any]:
        (path / "weights").write_text("none")
        OBSERVED.rss_before_save = resident_bytes()
        # Linux resets the peak of memory here.
        Path("/proc/self/clear_refs").write_text("5")
        return {}

    def close(self) -> None: ...


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the memory of this process in bytes, from /proc/self/status. `VmHWM` is its peak."""
    status = Path("/proc/self/status").read_text()
    [kilobytes] = [line.split()[1] for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(kilobytes) * 1024


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(ScriptedEngineConfig, f"{__name__}:ScriptedEngine")
    registry.add(ScriptedEnvironmentConfig, f"{__name__}:ScriptedEnvironment")
    registry.add(ScriptedBackendConfig, f"{__name__}:ScriptedBackend")
