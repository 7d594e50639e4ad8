"""Engines in real processes that are killed, stopped or late while weights are broadcast to them.

What is in flight is more than the buffers of a connection hold, so that a broadcast to a process that stands still does
not end by itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from child_engines import ENGINE, child_engine
from living_processes import living_below

from spurline_async_rl.engines.child_process import ChildProcessEngine
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig
from spurline_models.testing import write_tiny_model
from spurline_rl.protocols.weight_sync import SyncReport
from spurline_rl.testing.engine_update_contract import ModelPair, WeightsOf
from spurline_rl.testing.rollout_engine_contract import PROMPTS, greedy, model_logprobs, request

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BUCKET_BYTES = 16 << 20
NUM_KILLS = 20 if os.environ.get("SPURLINE_SOAK") else 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """Of about 26 MB, which take two buckets."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    old, new = (write_tiny_model(folder / name, seed=seed, **shape) for seed, name in enumerate(("old", "new")))
    return ModelPair(old, new)


class Fleet:
    """Two engines, and a sync that serves those that await weights again."""

    def __init__(self, models: ModelPair, run_dir: Path, *, limit_s: float, **settings: Any) -> None:
        self.models = models
        self.engine: ChildProcessEngine = child_engine(models.old, run_dir, engines=2, **settings)
        self._sync = CollectiveSync(CollectiveSyncConfig())
        self._sync.limit_s = limit_s
        self._sync.max_bucket_bytes = BUCKET_BYTES

    async def publish(
        self, version: int, model: Path, during: Callable[[], object] = lambda: None, engines: Sequence[Any] = ()
    ) -> SyncReport:
        """during: called once, when engines have begun the update and no weights have come yet."""
        left = [during]
        backend: Any = WeightsOf(model, lambda _: left and left.pop()())
        return await self._sync.publish(version, backend, engines or [self.engine])

    async def until_loading(self) -> None:
        """Return when a bucket is on its way to engines, one of which stands still."""
        while "to load bucket" not in self._sync.waits_for:
            await asyncio.sleep(0.01)
        # The other one has what it will get.
        await asyncio.sleep(0.5)

    async def until_awaiting(self) -> Sequence[Any]:
        """The members that were started anew."""
        while not self.engine.awaiting_weights:
            await asyncio.sleep(0.05)
        return self.engine.awaiting_weights

    async def check(self, version: int, model: Path) -> None:
        """Both engines generate with exactly these weights."""
        asked = [request(prompt, temperature=0.0, max_new_tokens=12) for prompt in PROMPTS * 2]
        results = await asyncio.gather(*map(self.engine.generate, asked))
        for wanted, result in zip(asked, results, strict=True):
            tokens = result.token_ids.tolist()
            assert tokens == greedy(model, wanted.prompt_ids, 12)
            assert np.abs(result.logprobs - model_logprobs(model, wanted.prompt_ids, tokens, 1.0)).max() <= 1e-4
            assert set(result.versions.tolist()) == {version}

    async def close(self) -> None:
        await self.engine.close()
        self._sync.close()


def drive(fleet: Fleet, use: Callable[[Fleet], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            async with asyncio.timeout(300):
                await use(fleet)
        finally:
            for process in engines():
                process.resume()
            await fleet.close()

    asyncio.run(main())
    assert not engines()


def engines() -> list[psutil.Process]:
    """The processes of this one's engines, the older one first."""
    return sorted(living_below(os.getpid(), ENGINE), key=lambda process: (process.create_time(), process.pid))


def test_an_engine_killed_while_a_broadcast_is_on_its_way_comes_back_with_the_weights_that_the_other_got(
    models: ModelPair, tmp_path: Path
) -> None:
    async def use(fleet: Fleet) -> None:
        await fleet.publish(1, models.old)
        victim, other = engines()
        publishing = asyncio.ensure_future(fleet.publish(2, models.new, victim.suspend))
        await fleet.until_loading()
        assert not publishing.done()
        victim.kill()
        report = await publishing
        assert report.bytes_sent == sum(tensor.nbytes for _, tensor in WeightsOf(models.new).named_weights())
        assert other.is_running()
        # By the other one alone.
        await fleet.check(2, models.new)
        await fleet.publish(2, models.new, engines=await fleet.until_awaiting())
        await fleet.check(2, models.new)
        assert other in engines()
        assert victim not in engines()

    drive(Fleet(models, tmp_path, limit_s=60), use)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="waits for time limits; SPURLINE_SOAK=1")
def test_engines_killed_at_any_moment_of_a_publish_leave_no_wrong_weights(models: ModelPair, tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    async def use(fleet: Fleet) -> None:
        await fleet.publish(1, models.old)
        for version in range(2, 2 + NUM_KILLS):
            model = models.new if version % 2 == 0 else models.old
            publishing = asyncio.ensure_future(fleet.publish(version, model))
            await asyncio.sleep(0.2 * random.random())
            engines()[random.integers(2)].kill()
            await publishing
            await fleet.check(version, model)
            await fleet.publish(version, model, engines=await fleet.until_awaiting())
            await fleet.check(version, model)

    # Who is killed before joining is waited for until then.
    drive(Fleet(models, tmp_path, limit_s=15), use)
