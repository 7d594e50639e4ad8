"""Check that a prefetch serves the right batches, raises errors at the right step and ends its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, lay_out
from spurline.protocols.prefetch import BuildBatch, Prefetch


class PrefetchContract:
    """A suite of tests for prefetches. Write a subclass with `make_prefetch(build, last_step)`."""

    def make_prefetch(self, build: BuildBatch, last_step: int) -> Prefetch:
        """Return your prefetch."""
        raise NotImplementedError("subclass PrefetchContract with make_prefetch(self, build, last_step)")

    @contextmanager
    def started(self, build: BuildBatch | None = None, last_step: int = 9, first_step: int = 1) -> Iterator[Prefetch]:
        """Return a context with your prefetch, started at `first_step`. By default it serves `numbered_batch(step)`."""
        prefetch = self.make_prefetch(build or numbered_batch, last_step)
        prefetch.start(first_step)
        yield prefetch
        prefetch.close()

    @pytest.mark.parametrize("first", [1, 6])
    def test_each_step_from_the_first_gets_its_own_batch_in_order(self, first: int) -> None:
        with self.started(first_step=first) as prefetch:
            assert [_number(prefetch.next(step)) for step in range(first, 10)] == list(range(first, 10))

    @pytest.mark.parametrize("first", [1, 4])
    def test_steps_after_the_last_are_never_built(self, first: int) -> None:
        before, built = set(threading.enumerate()), list[int]()
        with self.started(_recording(built, []), 3, first) as prefetch:
            for step in range(first, 4):
                prefetch.next(step)
            _wait_for(lambda: len(built) > 4 - first, seconds=0.05)
        assert built == list(range(first, 4))
        assert _ended(before)

    def test_a_served_batch_keeps_its_content_until_it_is_released(self) -> None:
        built: list[int] = []
        free: list[TrainingBatch] = []

        def build(step: int) -> TrainingBatch:
            # Fill released buffers again, as collators do.
            batch = free.pop() if free else numbered_batch(step)
            for column in batch.tokens.values():
                column.fill_(step)
            built.append(step)
            return replace(batch, on_release=lambda: free.append(batch))

        with self.started(build, 6) as prefetch:
            for step in range(1, 7):
                batch = prefetch.next(step)
                # Give a prefetch time to build ahead.
                _wait_for(lambda step=step: any(later > step for later in built), seconds=0.05)
                for name, column in batch.tokens.items():
                    assert bool((column == step).all()), f"column {name} of step {step} changed before its release"
                batch.release()

    def test_asking_for_another_step_than_the_next_fails_loudly(self) -> None:
        with self.started() as prefetch, pytest.raises(Exception, match="3"):
            prefetch.next(3)

    def test_an_error_surfaces_at_the_step_that_needed_the_batch_and_leaves_no_thread(self) -> None:
        before = set(threading.enumerate())

        def build(step: int) -> TrainingBatch:
            if step == 3:
                raise ValueError("broken sample in step 3")
            return numbered_batch(step)

        for num_taken in (0, 1):
            with self.started(build) as prefetch:
                for step in range(1, num_taken + 1):
                    prefetch.next(step)
            assert _ended(before), "closing with a broken batch ahead left a thread"
        with self.started(build) as prefetch:
            assert [_number(prefetch.next(step)) for step in (1, 2)] == [1, 2]
            with pytest.raises(ValueError, match="broken sample in step 3") as raised:
                prefetch.next(3)
            assert any(entry.name == "build" for entry in raised.traceback), "the error lost its own traceback"

    def test_starting_again_discards_what_was_built_ahead_and_gives_its_buffers_back(self) -> None:
        built, released = list[int](), list[int]()
        with self.started(_recording(built, released)) as prefetch:
            prefetch.next(1).release()
            _wait_for(lambda: len(built) > 1, seconds=0.05)
            prefetch.start(5)
            batch = prefetch.next(5)
            assert _number(batch) == 5
            batch.release()
            _wait_for(lambda: 6 in built, seconds=0.05)
        assert sorted(released) == sorted(built)

    def test_metrics_are_seconds_that_were_waited(self) -> None:
        with self.started(last_step=2) as prefetch:
            prefetch.next(1)
            assert prefetch.metrics()["time/collate_wait"] >= 0


def _recording(built: list[int], released: list[int]) -> BuildBatch:
    def build(step: int) -> TrainingBatch:
        built.append(step)
        return replace(numbered_batch(step), on_release=lambda: released.append(step))

    return build


def _ended(before: set[threading.Thread]) -> bool:
    return _wait_for(lambda: set(threading.enumerate()) <= before, seconds=10)


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def numbered_batch(step: int) -> TrainingBatch:
    """Return a batch of one row of three tokens, each the number of the step."""
    segment = Segment(np.full(3, step, np.int32), np.ones(3, np.uint8), 0, f"sample-{step}")
    return lay_out([[segment]], 3, 0)


def _number(batch: TrainingBatch) -> int:
    return int(batch.tokens["input_ids"][0, 0])
