"""Child processes that are killed, stopped or orphaned: nothing is lost, and nothing is left over."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from child_engines import ENGINE, child_engine, publish
from living_processes import living_below

from spurline.errors import RunFailedError
from spurline_async_rl.engines.child_process import ChildProcessEngine
from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.testing.rollout_engine_contract import PROMPTS, greedy, model_logprobs, request

pytestmark = pytest.mark.processes

Result = TypeVar("Result")
NUM_KILLS = 20 if os.environ.get("SPURLINE_SOAK") else 2


def children() -> set[psutil.Process]:
    return set(living_below(os.getpid(), ENGINE))


def with_engine(
    model: Path, run_dir: Path, use: Callable[[ChildProcessEngine], Awaitable[Result]], **settings: Any
) -> Result:
    """What `use` does with an engine whose processes get the model's weights as version 0 whenever they await them."""

    async def main() -> Result:
        engine = child_engine(model, run_dir, **settings)
        wanted = asyncio.Event()
        engine.on_awaiting_weights = wanted.set

        async def serve() -> None:
            while True:
                await wanted.wait()
                wanted.clear()
                for awaiting in engine.awaiting_weights:
                    await publish(awaiting, 0, model)

        serving = asyncio.create_task(serve())
        try:
            async with asyncio.timeout(600):
                return await use(engine)
        finally:
            await engine.close()
            serving.cancel()

    return asyncio.run(main())


@functools.cache
def expected_tokens(model: Path, prompt: tuple[int, ...]) -> list[int]:
    return greedy(model, prompt, 200)


def check(model: Path, prompt: list[int], result: GenerationResult) -> None:
    tokens = result.token_ids.tolist()
    assert tokens == expected_tokens(model, tuple(prompt))
    assert np.abs(result.logprobs - model_logprobs(model, prompt, tokens, 1.0)).max() <= 1e-5
    assert set(result.versions.tolist()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_a_process_that_is_killed_or_stands_still_go_on_in_its_successor(
    spurline_tiny_model: Path, tmp_path: Path, by: signal.Signals
) -> None:
    random = np.random.default_rng(0)
    asked = [request(prompt, temperature=0.0, max_new_tokens=200) for prompt in PROMPTS]

    async def use(engine: ChildProcessEngine) -> list[GenerationResult]:
        results: list[GenerationResult] = []
        seen: set[psutil.Process] = set()
        for _ in range(NUM_KILLS):
            writing = [asyncio.ensure_future(engine.generate(wanted)) for wanted in asked]
            while not children() - seen:
                await asyncio.sleep(0.01)
            # At any moment of its life: while it starts, takes weights, or writes.
            early = random.random() < 0.3
            done, _ = await asyncio.wait(writing, timeout=None if not early else 5 * random.random())
            victims = children() - seen
            seen |= victims
            if not done or not early:
                writing += [asyncio.ensure_future(engine.generate(wanted)) for wanted in asked]
                await asyncio.sleep(0.3 * random.random())
            for victim in victims:
                victim.send_signal(by)
            results += await asyncio.gather(*writing)
        return results

    limits = {"generate_timeout_s": 3.0, "update_timeout_s": 3.0}
    results = with_engine(spurline_tiny_model, tmp_path, use, **limits)
    assert len(results) >= NUM_KILLS * len(asked)
    for number, result in enumerate(results):
        check(spurline_tiny_model, PROMPTS[number % len(PROMPTS)], result)
    assert not children()


def test_a_process_that_ends_is_quoted_with_the_end_of_its_log(spurline_tiny_model: Path, tmp_path: Path) -> None:
    async def use(engine: ChildProcessEngine) -> Any:
        await engine.generate(request(PROMPTS[1], max_new_tokens=1))
        (log,) = (tmp_path / "engines").iterdir()
        with log.open("a") as file:
            file.write("what a library said last\n")
        waiting = asyncio.ensure_future(engine.generate(request(PROMPTS[0])))
        (child,) = children()
        child.kill()
        done, _ = await asyncio.wait({waiting}, timeout=60)
        return next(iter(done)).exception()

    error = with_engine(spurline_tiny_model, tmp_path, use, max_restarts=0)
    assert isinstance(error, RunFailedError)
    for part in ("asked by a test", "engine 0 (process ", "SIGKILL", "engine-0.log", "what a library said last"):
        assert part in str(error)
    assert not children()


def test_a_model_that_cannot_be_loaded_is_told_at_once(spurline_tiny_model: Path, tmp_path: Path) -> None:
    async def use(engine: ChildProcessEngine) -> None:
        with pytest.raises(RunFailedError, match=r"start: .*model\.path.*nothing"):
            await engine.start()

    with_engine(spurline_tiny_model, tmp_path, use, model_folder=tmp_path / "nothing")
    assert not children()


def test_closing_while_a_process_starts_leaves_none(spurline_tiny_model: Path, tmp_path: Path) -> None:
    async def use(engine: ChildProcessEngine) -> None:
        starting = asyncio.ensure_future(engine.start())
        while not children():
            await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(RunFailedError, match="closed"):
            await starting

    with_engine(spurline_tiny_model, tmp_path, use, engines=2)
    assert not children()


PARENT = """
import asyncio, sys
from pathlib import Path
import psutil
from child_engines import child_engine, publish
from spurline_rl.testing.rollout_engine_contract import request

async def main():
    model, run_dir = map(Path, sys.argv[1:])
    engine = child_engine(model, run_dir)
    await publish(engine, 0, model)
    writing = [asyncio.ensure_future(engine.generate(request([5], max_new_tokens=500, seed=seed))) for seed in range(9)]
    await engine.generate(request([6], max_new_tokens=2))
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    await asyncio.gather(*writing)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_process_outlives_a_parent_that_is_killed(spurline_tiny_model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(spurline_tiny_model), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert parent.stdout is not None
    family = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert family
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
