"""Offer an engine that sleeps instead of generating, and a trainer without a model, for `async_throughput.py`.

The time of each group comes from the simulator's distribution and depends on the draw of the group. So the real source
and the simulator get the same groups.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field

from spurline.data.batch import TrainingBatch
from spurline.plugins.hookspecs import hookimpl
from spurline.plugins.host import API_VERSION, InstalledPlugin, Plugin
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.backend import Backend
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, RolloutEngineConfig, TakesWeights
from spurline_simulation.workload import Times

PLUGIN = Plugin("paced", api=API_VERSION)
INSTALLED = InstalledPlugin("paced", __name__, "benchmarks", "0")

_TOKEN = 5
_DRAW = re.compile(r"@(\d+) sample ")


class PacedEngineConfig(RolloutEngineConfig):
    """An engine that sleeps."""

    name: str = "paced"
    mean_s: float = Field(gt=0)
    """Mean time of a group in seconds, including stragglers."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm of the time."""
    straggler_share: float = Field(default=0.0, ge=0, le=1)
    straggler_factor: float = Field(default=10.0, gt=0)
    mean_tokens: int = Field(default=16, gt=0)
    """Tokens of a response that takes the mean time. The tokens of other responses are proportional to their time."""

    def seconds(self) -> Times:
        """Return the seconds of each draw."""
        share, factor = self.straggler_share, self.straggler_factor
        return Times([self.mean_s / (1 + share * (factor - 1))], self.sigma, share, factor)


class PacedEngine(TakesWeights):
    """An engine whose tokens come evenly over the time of a request, with the version of weights at their time.

    The engine ignores the weights that it gets.
    """

    transports: Sequence[str] = ("in_process",)

    def __init__(self, config: PacedEngineConfig, run: Any, tokenizer: Any) -> None:
        self._seconds = config.seconds()
        self._tokens_per_s = config.mean_tokens / config.mean_s
        self._end_token = tokenizer.eos_token_id
        # The arrival of each version, on the monotonic clock.
        self._came_at = [-math.inf]
        self._versions = [0]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        found = _DRAW.search(request.name)
        assert found, request.name
        seconds = self._seconds(int(found[1]))
        began = time.monotonic()
        await asyncio.sleep(seconds)
        num_tokens = max(1, round(self._tokens_per_s * seconds))
        made_at = began + (np.arange(num_tokens) + 0.5) * (time.monotonic() - began) / num_tokens
        versions = np.array(self._versions, np.int32)[np.searchsorted(self._came_at, made_at, side="right") - 1]
        tokens = np.full(num_tokens, _TOKEN, np.int32)
        tokens[-1] = self._end_token
        logprobs = np.full(num_tokens, -0.5, np.float32)
        return GenerationResult(tokens, logprobs, versions, "stop")

    async def begin_update(self, version: int) -> None: ...

    async def load_bucket(self, bucket: WeightBucket) -> None: ...

    async def finish_update(self, version: int) -> None:
        self.set_version(version)

    def share(self, backend: Backend) -> None: ...

    def set_version(self, version: int) -> None:
        self._came_at.append(time.monotonic())
        self._versions.append(version)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class PacedTrainer:
    """The methods of a backend that a source calls while it makes batches and publishes weights."""

    def logprobs(self, batch: TrainingBatch, role: str = "policy", *, temperature: float = 1.0) -> torch.Tensor:
        return batch.drop_padding_rows(torch.where(batch.tokens["loss_weights"] != 0, -0.5, 0.0))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(8)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(PacedEngineConfig, f"{__name__}:PacedEngine")
