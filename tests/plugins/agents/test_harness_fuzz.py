"""Thousands of requests of all kinds: every attempt ends as it should, and nobody else notices.

SPURLINE_SOAK=1 sends 20,000, with bodies up to the largest that is read, from processes of their own, and looks at the
memory and at how long another client waits.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hostile_client
import numpy as np
import psutil
import pytest
from harness_requests import good, hello
from harness_runs import Harness
from hostile_client import HostileClient
from rl_attempts import make_task

from spurline_agents.agents import Session
from spurline_async_rl.source.garbage import QuietCollector

STATUSES = {0, 100, 200, 400, 401, 404, 405, 408, 413, 415, 417, 429, 503}
"""What a client may get; 0 is a connection that is closed without one."""
SOAK_REQUESTS, AT_A_TIME, EACH = 20_000, 4, 100
WARM = 3000
MEMORY_BYTES = 50 * 2**20
LAG_S = 0.1


def check(statuses: Counter[str]) -> None:
    seen = {int(word) for name in statuses if (word := name.split()[1]).isdigit()}
    assert seen <= STATUSES, statuses
    assert statuses["valid 200"] > sum(statuses.values()) / 4, statuses


def test_requests_of_all_kinds_end_as_they_should() -> None:
    statuses: Counter[str] = Counter()

    async def agent(session: Session) -> float:
        client = HostileClient(session.base_url, session.api_key, seed=session.sample, huge=200_000)
        await client.send(60)
        statuses.update(client.statuses)
        await good(session)
        return 1.0

    async def run() -> None:
        async with Harness(agent, hello(), max_turns=1000, max_body_bytes=2**18, max_prompt_tokens=4096) as harness:
            trajectories = await asyncio.gather(*(harness.attempt(sample=sample) for sample in range(4)))
            assert harness.environment._server is not None
            assert harness.environment._server._buffered.num_bytes == 0
        assert [trajectory.rewards for trajectory in trajectories] == [{"reward": 1.0}] * 4

    asyncio.run(run())
    check(statuses)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="set SPURLINE_SOAK=1")
def test_20_000_requests_leave_memory_and_other_clients_alone(record_property: Callable[[str, object], None]) -> None:
    statuses: Counter[str] = Counter()
    lag = asyncio.run(_soak(statuses, record_property))
    check(statuses)
    # Not all of them: other programs of the machine hold it up too. The figures are printed.
    assert np.quantile(lag, 0.99) < LAG_S


def give_back() -> None:
    """What is free, but kept by the C library, does not say whether memory is lost."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


async def _soak(statuses: Counter[str], record_property: Callable[[str, object], None]) -> list[float]:
    """Seconds that each request of another client took."""
    free: asyncio.Queue[Process] = asyncio.Queue()
    watched = asyncio.Event()

    async def start(*arguments: str) -> Process:
        path = str(Path(hostile_client.__file__))
        return await asyncio.create_subprocess_exec(
            sys.executable, path, *arguments, stdin=PIPE, stdout=PIPE, limit=2**26
        )

    async def exchange(process: Process, line: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        process.stdin.write(json.dumps(line).encode() + b"\n")
        return json.loads(await process.stdout.readline())

    async def agent(session: Session) -> float:
        if session.sample == 0:
            watcher = await start(session.base_url, session.api_key)
            await watched.wait()
            lag.extend(await exchange(watcher, "enough"))
            await watcher.wait()
        else:
            process = await free.get()
            arguments = (session.base_url, session.api_key, session.sample, 15 * 2**20, EACH)
            statuses.update(await exchange(process, arguments))
            free.put_nowait(process)
        await good(session)
        return 1.0

    lag: list[float] = []
    memory: list[int] = []
    processes = [await start() for _ in range(AT_A_TIME)]
    for process in processes:
        free.put_nowait(process)
    slots = asyncio.Semaphore(AT_A_TIME)
    # As in a run: otherwise full collections stop the loop for a quarter of a second in this process.
    collector = QuietCollector(0, is_rare=False)
    collector.quiet()
    async with Harness(agent, hello(), max_turns=10 * EACH) as harness:

        async def attempt(sample: int) -> None:
            async with slots:
                task: Awaitable[Any] = harness.environment.run(make_task(sample=sample), harness.policy(sample))
                assert (await asyncio.wait_for(task, 900)).rewards == {"reward": 1.0}
            if len(memory) == WARM // EACH:
                give_back()
            memory.append(psutil.Process().memory_info().rss)

        watching = asyncio.ensure_future(harness.environment.run(make_task(), harness.policy(0)))
        await asyncio.gather(*(attempt(1 + number) for number in range(SOAK_REQUESTS // EACH)))
        watched.set()
        await asyncio.wait_for(watching, 60)
        assert harness.environment._server is not None
        assert harness.environment._server._buffered.num_bytes == 0
    collector.restore()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    give_back()
    grown = psutil.Process().memory_info().rss - memory[WARM // EACH]
    figures = {
        "requests": sum(statuses.values()),
        "lag max": max(lag),
        "lag 99.9 %": float(np.quantile(lag, 0.999)),
        "lag median": float(np.median(lag)),
        "lags over 0.1 s": f"{sum(one > LAG_S for one in lag)} of {len(lag)}",
        "memory grown by MiB": round(grown / 2**20),
        "memory peak beyond the start, MiB": round((max(memory) - memory[0]) / 2**20),
        "statuses": dict(sorted(statuses.items())),
    }
    for name, value in figures.items():
        record_property(name, value)
    print(json.dumps(figures, indent=1))
    assert grown < MEMORY_BYTES, memory
    return lag
