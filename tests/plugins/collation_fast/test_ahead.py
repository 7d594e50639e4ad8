"""The component that builds ahead: order, errors, draining, time limits, and what it leaves behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from run_helpers import wait_for

from spurline.errors import RunFailedError
from spurline_collation_fast.prefetch import BuildAhead

THREAD = "spurline-build-ahead"


class Product:
    """What the builds here make; unlike a number it can be watched by a weak reference."""

    def __init__(self, step: int) -> None:
        self.step = step


class Workshop:
    """A `build` and a `discard` that remember what went through them."""

    def __init__(self, broken: tuple[int, ...] = (), hanging: tuple[int, ...] = ()) -> None:
        self.broken, self.hanging = broken, hanging
        self.begun: list[int] = []
        self.discarded: list[int] = []
        self.go_on = threading.Event()

    def build(self, step: int) -> Product:
        self.begun.append(step)
        if step in self.hanging:
            assert self.go_on.wait(60), f"step {step} was never let go"
        if step in self.broken:
            raise ValueError(f"step {step} is broken")
        return Product(step)

    def discard(self, product: Product) -> None:
        self.discarded.append(product.step)

    def wait_until_begun(self, step: int) -> None:
        wait_for(lambda: step in self.begun, f"step {step} to begin")


@contextmanager
def building(workshop: Workshop, depth: int = 2, timeout_s: float = 60) -> Iterator[BuildAhead[Product]]:
    ahead = BuildAhead(workshop.build, workshop.discard, depth, timeout_s)
    try:
        yield ahead
    finally:
        workshop.go_on.set()
        ahead.shutdown()
        assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_full_slot_refuses_another_step_and_keeps_what_it_has(depth: int) -> None:
    with building(Workshop(), depth) as ahead:
        for step in range(1, depth + 1):
            ahead.submit(step)
        with pytest.raises(AssertionError, match=rf"step 9 has no slot: all {depth} hold steps \[1"):
            ahead.submit(9)
        assert [ahead.get(step).step for step in range(1, depth + 1)] == [*range(1, depth + 1)]


def test_another_step_than_the_oldest_in_flight_is_never_served() -> None:
    with building(Workshop()) as ahead:
        ahead.submit(7)
        ahead.submit(8)
        with pytest.raises(AssertionError, match=r"step 8 is asked for, but the next is 7 of \[7, 8\]"):
            ahead.get(8)
        assert ahead.get(7).step == 7


def test_asking_while_nothing_is_in_flight_fails_at_once_instead_of_waiting() -> None:
    with building(Workshop()) as ahead, pytest.raises(AssertionError, match="step 1 is asked for, but nothing"):
        ahead.get(1)


def test_an_error_is_raised_at_its_own_step_and_the_steps_after_it_are_still_served() -> None:
    with building(Workshop(broken=(2,)), depth=3) as ahead:
        for step in (1, 2, 3):
            ahead.submit(step)
        assert ahead.get(1).step == 1
        with pytest.raises(ValueError, match="step 2 is broken") as raised:
            ahead.get(2)
        assert raised.traceback[-1].name == "build", "the error lost its own traceback"
        assert ahead.get(3).step == 3


def test_even_an_exit_asked_for_inside_a_build_surfaces_at_its_step() -> None:
    def build(step: int) -> Product:
        raise SystemExit(3)

    ahead = BuildAhead(build, lambda product: None, depth=1, timeout_s=60)
    ahead.submit(1)
    with pytest.raises(SystemExit):
        ahead.get(1)
    ahead.shutdown()


def test_clearing_discards_what_was_built_and_never_begins_the_rest() -> None:
    workshop = Workshop(hanging=(2,))
    with building(workshop, depth=4) as ahead:
        for step in (1, 2, 3, 4):
            ahead.submit(step)
        workshop.wait_until_begun(2)
        threading.Timer(0.05, workshop.go_on.set).start()
        ahead.clear()
        assert workshop.begun == [1, 2]
        assert sorted(workshop.discarded) == [1, 2]
        ahead.submit(9)
        assert ahead.get(9).step == 9


def test_the_error_of_a_cleared_build_is_dropped_with_it() -> None:
    workshop = Workshop(broken=(1,))
    with building(workshop) as ahead:
        ahead.submit(1)
        workshop.wait_until_begun(1)
        ahead.clear()
        ahead.submit(2)
        assert ahead.get(2).step == 2


def test_a_result_that_cannot_be_given_back_is_reported_after_the_others_were_and_the_thread_joined() -> None:
    given_back: list[int] = []

    def discard(product: Product) -> None:
        if product.step == 2:
            raise RuntimeError("this buffer has no owner")
        given_back.append(product.step)

    workshop = Workshop()
    ahead = BuildAhead(workshop.build, discard, depth=3, timeout_s=60)
    for step in (1, 2, 3):
        ahead.submit(step)
    workshop.wait_until_begun(3)
    with pytest.raises(RuntimeError, match="no owner"):
        ahead.shutdown()
    assert sorted(given_back) == [1, 3]
    assert threads() == []


def test_nothing_can_be_submitted_after_shutdown() -> None:
    with building(Workshop()) as ahead:
        ahead.shutdown()
        with pytest.raises(AssertionError, match="step 1 is submitted after shutdown"):
            ahead.submit(1)


def test_shutdown_without_a_submit_and_a_second_shutdown_do_nothing() -> None:
    ahead = BuildAhead(Workshop().build, lambda product: None, depth=1, timeout_s=60)
    ahead.shutdown()
    ahead.shutdown()
    assert threads() == []


def test_a_build_that_overruns_is_named_with_its_step_its_limit_and_the_line_it_is_at() -> None:
    workshop = Workshop(hanging=(5,))
    with building(workshop, timeout_s=0.05) as ahead:
        ahead.submit(5)
        with pytest.raises(
            RunFailedError, match=r"Step 5: .* not ready after 0.05 s; building step 5, it is at .*threading\.py:\d+"
        ):
            ahead.get(5)
        workshop.go_on.set()


def test_shutdown_does_not_wait_forever_for_a_build_that_hangs() -> None:
    workshop = Workshop(hanging=(1,))
    ahead = BuildAhead(workshop.build, workshop.discard, depth=2, timeout_s=0.05)
    ahead.submit(1)
    workshop.wait_until_begun(1)
    with pytest.raises(RunFailedError, match=r"did not end within 0\.05 s; building step 1"):
        ahead.shutdown()
    workshop.go_on.set()
    ahead.shutdown()
    assert threads() == []


@pytest.mark.processes
def test_a_build_that_hangs_does_not_keep_the_interpreter_from_exiting() -> None:
    program = """
import threading
from spurline_collation_fast.prefetch import BuildAhead
begun = threading.Event()
def hang(step):
    begun.set()
    threading.Event().wait()
BuildAhead(hang, print, depth=1, timeout_s=60).submit(1)
assert begun.wait(30)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_what_was_served_is_not_kept_alive_by_a_thread_that_waits_for_more() -> None:
    with building(Workshop()) as ahead:
        ahead.submit(1)
        watched = weakref.ref(ahead.get(1))
        gc.disable()
        try:
            wait_for(lambda: watched() is None, "the memory of a served batch to be free", timeout_s=25)
        finally:
            gc.enable()
