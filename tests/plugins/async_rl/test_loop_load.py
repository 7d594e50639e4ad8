"""The load of the event loop, and a garbage collector that does not stop it."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from spurline_async_rl.source.load import LoopLoad, QuietCollector
from spurline_async_rl.source.loop_thread import LoopThread


def test_the_cpu_time_and_the_tokens_of_each_step_are_those_of_the_loop() -> None:
    loop, tokens = LoopThread("test-loop-load"), [500]
    load = LoopLoad(lambda: tokens[0])
    try:
        loop.call(load.start)
        loop.call(lambda: time.sleep(0.3))
        slept = loop.call(load.take)
        assert (slept["controller/cpu_share"] < 0.9, slept["controller/tokens_per_s"]) == (True, 0.0)
        tokens[0] += 300
        time.sleep(0.05)
        assert 0 < loop.call(load.take)["controller/tokens_per_s"] < 300 / 0.05
        assert loop.call(load.take)["controller/tokens_per_s"] == 0.0
    finally:
        loop.close()


class Node:
    """May refer to itself."""

    def __init__(self) -> None:
        self.itself: Node | None = None


def forget(node: Node) -> weakref.ref[Node]:
    """The only reference to the node is its own."""
    node.itself = node
    return weakref.ref(node)


@pytest.mark.parametrize("attempts", [1, 10_000])
def test_the_collector_is_as_before_after_a_run_and_cycles_of_the_run_are_found(attempts: int) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    collector = QuietCollector(attempts)
    collector.start()
    try:
        collector.start()
        assert gc.get_freeze_count() > before[1]
        assert (gc.get_threshold() == before[0]) == (attempts == 1)
        cycle = forget(Node())
        gc.collect(1)
        gc.collect(1)
        for _ in range(100):
            collector.step()
        assert (cycle() is None) or attempts == 1
    finally:
        collector.close()
        collector.close()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_collector_that_is_off_stays_as_it_is() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    gc.disable()
    try:
        collector = QuietCollector(10_000)
        collector.start()
        collector.step()
        collector.close()
        assert (gc.get_threshold(), gc.get_freeze_count()) == before
    finally:
        gc.enable()
