"""The event loop beside the training thread: results, limits, an end without leftovers, and rare collections."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from spurline.errors import RunFailedError
from spurline_async_rl.source.loop_thread import LoopThread, QuietCollector


def test_results_and_errors_come_to_the_thread_that_asked() -> None:
    loop = LoopThread("test-loop")

    async def where() -> str:
        return threading.current_thread().name

    async def fails() -> None:
        raise KeyError("seven")

    assert loop.run(where(), 10, "where") == "test-loop"
    with pytest.raises(KeyError, match="seven"):
        loop.run(fails(), 10, "fails")
    assert loop.call(lambda: threading.current_thread().name) == "test-loop"
    loop.close()


def test_what_takes_too_long_is_cancelled_and_named_with_the_place_in_the_code() -> None:
    loop = LoopThread("test-loop")
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(RunFailedError, match=r"(?s)Waiting for nothing did not end within 0\.05 s.*test-loop is at"):
        loop.run(waits(), 0.05, "Waiting for nothing")
    assert cancelled.wait(10)
    loop.close()


def test_a_time_limit_of_the_work_itself_is_not_taken_for_ours() -> None:
    loop = LoopThread("test-loop")

    async def raises_timeout() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.run(raises_timeout(), 10, "work")
    loop.close()


def test_closing_ends_the_thread_and_cancels_what_runs() -> None:
    loop = LoopThread("test-loop-to-close")
    ended = threading.Event()

    async def start() -> None:
        async def for_ever() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        global _kept
        _kept = asyncio.create_task(for_ever())
        await asyncio.sleep(0)

    loop.run(start(), 10, "start")
    loop.close()
    assert ended.is_set()
    assert "test-loop-to-close" not in {thread.name for thread in threading.enumerate()}
    loop.close()


def test_a_blocked_loop_tells_where_it_is_blocked() -> None:
    loop = LoopThread("test-loop")
    go_on = threading.Event()

    def blocks_for_a_test() -> None:
        go_on.wait(30)

    future = loop.submit(blocks_for_a_test)
    deadline = time.monotonic() + 10
    while "blocks_for_a_test" not in loop.position():
        assert time.monotonic() < deadline
    go_on.set()
    future.result(10)
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
