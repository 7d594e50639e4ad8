"""What the event loop has to do: how long calls wait for it, its share of a core, and the tokens that come through."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline_async_rl.source.load import Lags, LoopLoad
from spurline_async_rl.source.loop_thread import LoopThread

EVERY_S = 0.02


class FakeLoop:
    """An event loop on a clock that is moved by hand: a callback runs when it is due and nothing blocks the loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu_s = 3.0
        self.callbacks: list[tuple[float, int, Handle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        handle = Handle(callback)
        heapq.heappush(self.callbacks, (when, id(handle), handle))
        return handle

    @property
    def num_waiting(self) -> int:
        return sum(not handle.cancelled for _, _, handle in self.callbacks)

    def idle(self, seconds: float) -> None:
        """Nothing to do but what is due."""
        until = self.now + seconds
        while self.callbacks and self.callbacks[0][0] <= until:
            when, _, handle = heapq.heappop(self.callbacks)
            self.now = max(self.now, when)
            handle.run()
        self.now = max(self.now, until)

    def block(self, seconds: float, *, computing: bool = True) -> None:
        self.now += seconds
        self.cpu_s += seconds if computing else 0.0


class Handle:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.cancelled = False
        self.callback = callback

    def cancel(self) -> None:
        self.cancelled = True

    def run(self) -> None:
        if not self.cancelled:
            self.callback()


def measured(loop: FakeLoop, tokens: Callable[[], int] = lambda: 0) -> LoopLoad:
    load = LoopLoad(tokens, thread_time=lambda: loop.cpu_s)
    load.start(loop)
    return load


def test_an_idle_loop_lets_nobody_wait() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(10)
    metrics = load.take()
    assert metrics["controller/lag_max"] == pytest.approx(0, abs=1e-9)
    assert metrics["controller/cpu_share"] == 0


def test_a_block_counts_for_every_call_that_came_in_it() -> None:
    # A second in ten: a tenth of the calls waits, uniformly up to a second.
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(4.5)
    loop.block(1.0)
    loop.idle(4.5)
    metrics = load.take()
    assert metrics["controller/lag_max"] == pytest.approx(1.0, abs=EVERY_S)
    assert metrics["controller/lag_p50"] <= 1e-4
    assert metrics["controller/lag_p99"] == pytest.approx(0.9, rel=0.12)
    assert metrics["controller/cpu_share"] == pytest.approx(0.1)


def test_a_loop_that_waits_is_not_busy() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.block(2.0, computing=False)
    loop.idle(2.0)
    assert load.take()["controller/cpu_share"] == 0


def test_a_block_that_has_just_ended_belongs_to_the_step_that_asks() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(1.0)
    loop.block(3.0)
    assert load.take()["controller/lag_max"] == pytest.approx(3.0, abs=EVERY_S)
    loop.idle(1.0)
    assert load.take()["controller/lag_max"] == pytest.approx(0, abs=1e-9), "and to no other"
    assert loop.num_waiting == 1


def test_each_step_has_its_own_tokens_and_seconds() -> None:
    loop = FakeLoop()
    tokens = [500]
    load = measured(loop, tokens=lambda: tokens[0])
    for new, seconds in ((300, 2.0), (0, 1.0), (1_000, 4.0)):
        tokens[0] += new
        loop.idle(seconds)
        assert load.take()["controller/tokens_per_s"] == pytest.approx(new / seconds)


def test_nothing_is_left_on_the_loop_when_it_has_stopped() -> None:
    loop = FakeLoop()
    load = measured(loop)
    loop.idle(1.0)
    load.stop()
    load.stop()
    assert loop.num_waiting == 0
    LoopLoad(lambda: 0).stop()


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60), st.floats(0.01, 1))
@settings(max_examples=100)
def test_quantiles_are_those_of_all_lags_up_to_ten_percent(lags: list[float], share: float) -> None:
    kept = Lags()
    for seconds in lags:
        kept.add(seconds)
    exact = sorted(lags)[max(0, math.ceil(share * len(lags) - 1e-9) - 1)]
    assert exact * (1 - 1e-9) <= kept.quantile(share) <= max(1.1 * exact * (1 + 1e-9), 1e-5)
    assert kept.longest == max(lags)


def test_memory_does_not_grow_with_the_run() -> None:
    kept = Lags()
    size = len(kept._counts)
    for exponent in range(-400, 400):
        kept.add(10.0 ** (exponent / 10))
    assert len(kept._counts) == size


def test_a_real_loop_that_is_blocked_shows_it() -> None:
    loop = LoopThread("test-loop-load")
    load = LoopLoad(lambda: 0)
    loop.call(load.start)
    loop.call(lambda: time.sleep(0.3))
    metrics = loop.call(load.take)
    assert metrics["controller/lag_max"] >= 0.25
    assert metrics["controller/cpu_share"] < 0.9, "it slept"
    loop.call(load.stop)
    loop.close()
