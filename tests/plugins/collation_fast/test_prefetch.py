"""Prefetch `async`: the contract at several depths, its metrics, errors, time limits, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from run_helpers import wait_for

from spurline.data.batch import TrainingBatch
from spurline.errors import RunFailedError
from spurline.testing import PrefetchContract
from spurline.testing.prefetch_contract import numbered_batch
from spurline_collation_fast.configs import AsyncPrefetchConfig
from spurline_collation_fast.prefetch import AsyncPrefetch


class TestDepthOne(PrefetchContract):
    depth = 1

    def make_prefetch(self, build: Any, last_step: int) -> AsyncPrefetch:
        return AsyncPrefetch(AsyncPrefetchConfig(depth=self.depth), build=build, last_step=last_step)


class TestDepthTwo(TestDepthOne):
    depth = 2


class TestDepthFive(TestDepthOne):
    depth = 5


def make(build: Any, last_step: int = 9, depth: int = 2, timeout_s: float = 60) -> AsyncPrefetch:
    return AsyncPrefetch(AsyncPrefetchConfig(depth=depth, timeout_s=timeout_s), build=build, last_step=last_step)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spurline-build-ahead"]


class Workshop:
    """A `build` that remembers what it began and what of it was released."""

    def __init__(self, broken: tuple[int, ...] = (), hanging: tuple[int, ...] = ()) -> None:
        self.broken, self.hanging = broken, hanging
        self.begun: list[int] = []
        self.released: list[int] = []
        self.go_on = threading.Event()

    def build(self, step: int) -> TrainingBatch:
        self.begun.append(step)
        if step in self.hanging:
            assert self.go_on.wait(60), f"step {step} was never let go"
        if step in self.broken:
            raise ValueError(f"step {step} is broken")
        return replace(numbered_batch(step), on_release=lambda: self.released.append(step))

    def wait_until_begun(self, step: int) -> None:
        wait_for(lambda: step in self.begun, f"step {step} to begin")


@contextmanager
def building(workshop: Workshop, depth: int = 2, timeout_s: float = 60) -> Iterator[AsyncPrefetch]:
    prefetch = make(workshop.build, depth=depth, timeout_s=timeout_s)
    prefetch.start(1)
    try:
        yield prefetch
    finally:
        workshop.go_on.set()
        prefetch.close()
        assert threads() == []


def test_the_metrics_belong_to_the_batch_last_served_and_fit_together() -> None:
    with building(Workshop()) as prefetch:
        assert prefetch.metrics() == {}
        for step in (1, 2, 3):
            prefetch.next(step)
            metrics = prefetch.metrics()
            assert metrics.keys() == {"time/collate", "time/collate_wait", "collation/hidden"}
            assert metrics["time/collate"] > 0
            shown = 1 - metrics["time/collate_wait"] / metrics["time/collate"]
            assert metrics["collation/hidden"] == max(0.0, shown)


def test_an_error_is_raised_at_its_own_step_and_the_steps_after_it_are_still_served() -> None:
    with building(Workshop(broken=(2,)), depth=3) as prefetch:
        prefetch.next(1)
        with pytest.raises(ValueError, match="step 2 is broken") as raised:
            prefetch.next(2)
        assert raised.traceback[-1].name == "build", "the error lost its own traceback"
        assert prefetch.next(3).tokens["input_ids"].equal(numbered_batch(3).tokens["input_ids"])


def test_even_an_exit_asked_for_inside_a_build_surfaces_at_its_step() -> None:
    def build(step: int) -> TrainingBatch:
        raise SystemExit(3)

    prefetch = make(build)
    prefetch.start(1)
    with pytest.raises(SystemExit):
        prefetch.next(1)
    prefetch.close()


def test_starting_elsewhere_releases_what_was_built_drops_its_errors_and_never_begins_the_rest() -> None:
    workshop = Workshop(hanging=(3,), broken=(1,))
    with building(workshop, depth=4) as prefetch:
        workshop.wait_until_begun(3)
        threading.Timer(0.05, workshop.go_on.set).start()
        prefetch.start(8)
        assert workshop.begun[:3] == [1, 2, 3]
        assert 4 not in workshop.begun
        assert sorted(workshop.released) == [2, 3]
        prefetch.next(8)


def test_a_batch_that_cannot_be_given_back_is_reported_after_the_others_were_and_the_thread_joined() -> None:
    given_back: list[int] = []

    def build(step: int) -> TrainingBatch:
        def release() -> None:
            if step == 2:
                raise RuntimeError("this buffer has no owner")
            given_back.append(step)

        return replace(numbered_batch(step), on_release=release)

    prefetch = make(build, last_step=3, depth=3)
    prefetch.start(1)
    with pytest.raises(RuntimeError, match="no owner"):
        close_once_built(prefetch, 3)
    assert sorted(given_back) == [1, 3]
    assert threads() == []


def close_once_built(prefetch: AsyncPrefetch, count: int) -> None:
    wait_for(lambda: sum(future.done() for _, future in prefetch._in_flight) == count, "all batches")
    prefetch.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_failing_step_with_a_failing_build_behind_it_raises_the_error_of_the_step(depth: int) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError) as raised:
        train_and_fail(make(Workshop(broken=tuple(range(3, 10))).build, depth=depth), after_step=2)
    assert raised.value.__context__ is None
    assert set(threading.enumerate()) <= before


def train_and_fail(prefetch: AsyncPrefetch, after_step: int, workshop: Workshop | None = None) -> None:
    """Do what a run does whose loop fails after this step, once a build has begun."""
    with ExitStack() as stack:
        stack.callback(prefetch.close)
        prefetch.start(1)
        for step in range(1, after_step + 1):
            prefetch.next(step)
        if workshop is not None:
            workshop.wait_until_begun(1)
        raise ZeroDivisionError("the step")


def test_a_build_that_hangs_at_closing_is_a_note_on_the_error_that_ended_the_loop() -> None:
    workshop = Workshop(hanging=(1,))
    prefetch = make(workshop.build, timeout_s=0.05)
    with pytest.raises(ZeroDivisionError) as raised:
        train_and_fail(prefetch, after_step=0, workshop=workshop)
    (note,) = raised.value.__notes__
    assert "did not end within 0.05 s; building step 1" in note
    workshop.go_on.set()
    prefetch.close()


@pytest.mark.parametrize("handled_outside", [False, True])
def test_a_build_that_hangs_at_closing_is_an_error_when_the_loop_raises_no_other(handled_outside: bool) -> None:
    workshop, outside = Workshop(hanging=(1,)), KeyError("handled by the caller of the run")

    def close() -> AsyncPrefetch:
        prefetch = make(workshop.build, timeout_s=0.05)
        prefetch.start(1)
        workshop.wait_until_begun(1)
        with pytest.raises(RunFailedError, match=r"did not end within 0\.05 s; building step 1"):
            prefetch.close()
        return prefetch

    if handled_outside:
        try:
            raise outside
        except KeyError:
            prefetch = close()
    else:
        prefetch = close()
    assert not hasattr(outside, "__notes__")
    workshop.go_on.set()
    prefetch.close()
    assert threads() == []


def test_a_batch_that_is_never_ready_fails_its_step_and_names_its_limit_and_its_line() -> None:
    workshop = Workshop(hanging=(3,))
    with building(workshop, timeout_s=0.2) as prefetch:
        prefetch.next(1)
        prefetch.next(2)
        with pytest.raises(
            RunFailedError, match=r"Step 3: .* not ready after 0\.2 s; building step 3, .*threading\.py:\d+"
        ):
            prefetch.next(3)
        workshop.go_on.set()


@pytest.mark.processes
def test_a_build_that_hangs_does_not_keep_the_interpreter_from_exiting() -> None:
    program = """
import threading
from spurline_collation_fast.configs import AsyncPrefetchConfig
from spurline_collation_fast.prefetch import AsyncPrefetch
begun = threading.Event()
def hang(step):
    begun.set()
    threading.Event().wait()
AsyncPrefetch(AsyncPrefetchConfig(), hang, 9).start(1)
assert begun.wait(30)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_what_was_served_is_not_kept_alive_by_a_thread_that_waits_for_more() -> None:
    prefetch = make(numbered_batch, last_step=1)
    prefetch.start(1)
    watched = weakref.ref(prefetch.next(1).tokens["input_ids"])
    gc.disable()
    try:
        wait_for(lambda: watched() is None, "the memory of a served batch to be free", timeout_s=25)
    finally:
        gc.enable()
        prefetch.close()


class AnySequence(RuleBasedStateMachine):
    """Random starts, steps and closes against the step that must come next."""

    LAST = 40

    def __init__(self) -> None:
        super().__init__()
        self.expected: int | None = None
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.alive: list[int] = []

    @initialize(depth=st.integers(1, 5), fates=st.lists(st.sampled_from(["", "", "slow", "broken"]), min_size=41))
    def begin(self, depth: int, fates: list[str]) -> None:
        self.depth, self.fates = depth, fates
        self.prefetch = make(self.build, last_step=self.LAST, depth=depth, timeout_s=30)

    def build(self, step: int) -> TrainingBatch:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        if self.fates[step] == "slow":
            time.sleep(0.002)
        with self.lock:
            self.running -= 1
            if self.fates[step] == "broken":
                raise ValueError(f"step {step} is broken")
            self.alive.append(step)
        return replace(numbered_batch(step), on_release=lambda: self.alive.remove(step))

    @rule(step=st.integers(1, LAST))
    def start(self, step: int) -> None:
        self.prefetch.start(step)
        self.expected = step

    @rule()
    def next(self) -> None:
        step = self.expected
        if step is None or step > self.LAST:
            with pytest.raises(AssertionError, match="nothing is in flight"):
                self.prefetch.next(step or 1)
            return
        self.expected = step + 1
        if self.fates[step] == "broken":
            with pytest.raises(ValueError, match=f"step {step} is broken"):
                self.prefetch.next(step)
            # What an error took from the queue is not replaced before the next start.
            self.start(self.expected) if self.expected <= self.LAST else self.close()
        else:
            batch = self.prefetch.next(step)
            assert batch.tokens["input_ids"].equal(numbered_batch(step).tokens["input_ids"])
            batch.release()

    @rule(offset=st.sampled_from([-1, 1, 1000]))
    def next_of_another_step(self, offset: int) -> None:
        if self.expected is not None and self.expected <= self.LAST:
            with pytest.raises(AssertionError, match="is asked for"):
                self.prefetch.next(self.expected + offset)

    @rule()
    def close(self) -> None:
        self.prefetch.close()
        self.expected = None
        assert threads() == []
        assert not self.alive, "batches were not given back"

    @invariant()
    def no_more_than_depth_batches_exist_and_one_build_runs(self) -> None:
        assert self.most_running <= 1
        assert len(self.alive) <= getattr(self, "depth", 0)

    def teardown(self) -> None:
        if hasattr(self, "prefetch"):
            self.close()


@pytest.mark.slow
def test_no_sequence_of_calls_hangs_serves_a_wrong_step_or_leaves_a_thread() -> None:
    sequences = 2000 if os.environ.get("SPURLINE_SOAK") else 100
    checks: list[Any] = [HealthCheck.too_slow]
    run_state_machine_as_test(
        AnySequence,
        settings=settings(max_examples=sequences, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
