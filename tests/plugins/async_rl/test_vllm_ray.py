"""Two vLLM engines as actors of a Ray cluster: minutes on a small machine, so only when soaking."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_clusters import two_machines
from vllm_engines import START_S, engine_processes, publish, vllm_engine, vllm_models

from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.testing.rollout_engine_contract import PROMPTS, model_logprobs, request

pytest.importorskip("vllm")
pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts three engines; SPURLINE_SOAK=1"),
]


def test_two_actors_share_requests_take_new_weights_in_flight_and_replace_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_machines().address)
    models = vllm_models(tmp_path, "untied")
    memory = set(Path("/dev/shm").glob("psm_*"))
    asked = [request(prompt, seed=seed, max_new_tokens=450) for seed, prompt in enumerate(PROMPTS * 4)]

    async def main() -> tuple[list[GenerationResult], list[GenerationResult]]:
        engine = vllm_engine(models.old, tmp_path, engines=2, placement="ray")
        try:
            async with asyncio.timeout(2 * START_S):
                await publish(engine, 1, models.old)
                writing = asyncio.gather(*map(engine.generate, asked))
                await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
                await publish(engine, 2, models.new)
                across = await writing
                return across, await _with_one_killed(engine, models.old, asked)
        finally:
            await engine.close()

    across, around_a_death = asyncio.run(main())
    _check(asked, across, {1: models.old, 2: models.new})
    assert any({1, 2} <= set(result.versions.tolist()) for result in across)
    _check(asked, around_a_death, {2: models.new, 3: models.old})
    assert engine_processes() == []
    assert not set(Path("/dev/shm").glob("psm_*")) - memory


async def _with_one_killed(engine: Any, model: Path, asked: Any) -> list[GenerationResult]:
    """Return responses during which an engine is killed, and responses of both after it got this model's weights."""
    awaiting = asyncio.Event()
    engine.on_awaiting_weights = awaiting.set
    writing = asyncio.gather(*map(engine.generate, asked))
    await engine.generate(request(PROMPTS[0], max_new_tokens=20, temperature=0.0))
    victim = next(process for process in engine_processes() if "EngineCore" in process.cmdline()[0])
    os.kill(victim.pid, signal.SIGKILL)
    # The other engine goes on with everything meanwhile.
    results = await writing
    await awaiting.wait()
    await publish(engine, 3, model)
    late = await asyncio.gather(*map(engine.generate, asked))
    assert {3} == {int(version) for result in late for version in result.versions}
    return [*results[: len(asked) // 2], *late[len(asked) // 2 :]]


def _check(asked: Any, results: list[GenerationResult], models: dict[int, Path]) -> None:
    for wanted, result in zip(asked, results, strict=True):
        assert set(result.versions.tolist()) <= set(models)
        for version, model in models.items():
            expected = model_logprobs(model, wanted.prompt_ids, result.token_ids.tolist(), 1.0)
            difference = np.abs(result.logprobs - expected)[result.versions == version]
            assert difference.max(initial=0.0) <= 1e-5
