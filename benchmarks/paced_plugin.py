"""A plugin for `async_throughput.py`: an engine that sleeps where one would generate, and a trainer without a model.

The engine takes as long for a group as a distribution of the simulation says for its draw, so that the real source and
the model of it have the same groups before them.
"""

from __future__ import annotations

import asyncio
import re
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
from spurline.protocols.rollout_engine import (
    GenerationRequest,
    GenerationResult,
    RolloutEngineConfig,
    TakesWeights,
    WeightBucket,
)
from spurline_async_rl.simulation.workload import Times

PLUGIN = Plugin("paced", api=API_VERSION)
INSTALLED = InstalledPlugin("paced", __name__, "benchmarks", "0")

_DRAW = re.compile(r"@(\d+) sample ")


class PacedEngineConfig(RolloutEngineConfig):
    """An engine that sleeps."""

    name: str = "paced"
    mean_s: float = Field(gt=0)
    """Mean time of a group, stragglers included."""
    sigma: float = Field(default=1.0, ge=0)
    """Of the logarithm of the time."""
    straggler_share: float = Field(default=0.0, ge=0, le=1)
    straggler_factor: float = Field(default=10.0, gt=0)

    def seconds(self) -> Times:
        """By draw."""
        share, factor = self.straggler_share, self.straggler_factor
        return Times([self.mean_s / (1 + share * (factor - 1))], self.sigma, share, factor)


class PacedEngine(TakesWeights):
    """Two tokens for every request, the first when it begins and the second when it ends.

    Takes weights without looking at them, or shares those of a backend that has none.
    """

    transports: Sequence[str] = ("in_process",)

    def __init__(self, config: PacedEngineConfig, run: Any, tokenizer: Any) -> None:
        self._seconds = config.seconds()
        self._tokens = np.array([5, tokenizer.eos_token_id], np.int32)
        self._version = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        found = _DRAW.search(request.name)
        assert found, request.name
        began = self._version
        await asyncio.sleep(self._seconds(int(found[1])))
        logprobs = np.full(2, -0.5, np.float32)
        versions = np.array([began, self._version], np.int32)
        return GenerationResult(self._tokens, logprobs, logprobs, versions, "stop")

    async def begin_update(self, version: int) -> None: ...

    async def load_bucket(self, bucket: WeightBucket) -> None: ...

    async def finish_update(self, version: int) -> None:
        self._version = version

    def share(self, backend: Backend) -> None: ...

    def set_version(self, version: int) -> None:
        self._version = version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class PacedTrainer:
    """What a source asks of a backend while it makes batches and publishes."""

    def logprobs(self, batch: TrainingBatch, role: str = "policy", *, temperature: float = 1.0) -> torch.Tensor:
        return batch.drop_padding_rows(torch.where(batch.tokens["loss_weights"] != 0, -0.5, 0.0))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(8)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(PacedEngineConfig, f"{__name__}:PacedEngine")
