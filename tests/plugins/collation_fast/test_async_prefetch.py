"""Prefetch `async`: the contract at several depths, its metrics, and how it ends when things go wrong."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from run_helpers import wait_for

from spurline.data.batch import TrainingBatch
from spurline.errors import RunFailedError
from spurline.testing import PrefetchContract
from spurline.testing.prefetch_contract import numbered_batch
from spurline_collation_fast.configs import AsyncPrefetchConfig
from spurline_collation_fast.prefetch import AsyncPrefetch, hidden_share


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


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_than_depth_batches_exist_besides_the_one_in_use(depth: int) -> None:
    lock = threading.Lock()
    existing: set[int] = set()
    most = [0]

    def build(step: int) -> TrainingBatch:
        with lock:
            existing.add(step)
            most[0] = max(most[0], len(existing))
        return replace(numbered_batch(step), on_release=lambda: existing.remove(step))

    prefetch = make(build, last_step=12, depth=depth)
    prefetch.start(1)
    for step in range(1, 13):
        batch = prefetch.next(step)
        due = min(step + depth, 12)
        wait_for(lambda due=due: due in existing, f"step {due} to be begun")
        batch.release()
    prefetch.close()
    assert most[0] == depth + 1
    assert not existing


def test_building_ahead_goes_on_while_the_loop_holds_its_batch() -> None:
    built: list[int] = []

    def build(step: int) -> TrainingBatch:
        built.append(step)
        return numbered_batch(step)

    prefetch = make(build, depth=3)
    prefetch.start(1)
    prefetch.next(1)
    wait_for(lambda: built == [1, 2, 3, 4], "steps 2 to 4 to be built")
    prefetch.close()


def test_the_metrics_belong_to_the_batch_last_served_and_fit_together() -> None:
    prefetch = make(numbered_batch)
    assert prefetch.metrics() == {}
    prefetch.start(1)
    for step in (1, 2, 3):
        prefetch.next(step)
        metrics = prefetch.metrics()
        assert metrics.keys() == {"time/collate", "time/collate_wait", "collation/hidden"}
        assert metrics["time/collate"] > 0
        assert metrics["collation/hidden"] == hidden_share(metrics["time/collate"], metrics["time/collate_wait"])
    prefetch.close()


@pytest.mark.parametrize(
    ("collate_s", "wait_s", "share"), [(2.0, 0.0, 1.0), (2.0, 0.5, 0.75), (2.0, 2.0, 0.0), (2.0, 3.0, 0.0), (0, 0, 1.0)]
)
def test_the_hidden_share_is_what_was_not_waited_for(collate_s: float, wait_s: float, share: float) -> None:
    assert hidden_share(collate_s, wait_s) == share


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_failing_step_with_a_failing_build_behind_it_raises_the_error_of_the_step(depth: int) -> None:
    def build(step: int) -> TrainingBatch:
        if step > 2:
            raise ValueError(f"broken sample in step {step}")
        return numbered_batch(step)

    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError) as raised:
        train_and_fail(make(build, depth=depth), after_step=2)
    assert raised.value.__context__ is None
    assert set(threading.enumerate()) <= before


def test_a_build_that_hangs_at_closing_is_a_note_on_the_error_that_ended_the_loop() -> None:
    let_go, begun = threading.Event(), threading.Event()

    def build(step: int) -> TrainingBatch:
        begun.set()
        assert let_go.wait(60)
        return numbered_batch(step)

    prefetch = make(build, timeout_s=0.05)
    with pytest.raises(ZeroDivisionError) as raised:
        train_and_fail(prefetch, after_step=0, begun=begun)
    (note,) = raised.value.__notes__
    assert "did not end within 0.05 s; building step 1" in note
    let_go.set()
    prefetch.close()


def test_a_build_that_hangs_at_closing_is_an_error_when_there_is_no_other() -> None:
    let_go, begun = threading.Event(), threading.Event()

    def build(step: int) -> TrainingBatch:
        begun.set()
        assert let_go.wait(60)
        return numbered_batch(step)

    prefetch = make(build, timeout_s=0.05)
    prefetch.start(1)
    assert begun.wait(30)
    with pytest.raises(RunFailedError, match="building step 1"):
        prefetch.close()
    let_go.set()
    prefetch.close()


def test_a_build_that_hangs_at_closing_is_an_error_also_where_the_caller_handles_another_one() -> None:
    let_go, begun = threading.Event(), threading.Event()

    def build(step: int) -> TrainingBatch:
        begun.set()
        assert let_go.wait(60)
        return numbered_batch(step)

    outside = KeyError("handled by whoever starts the run")
    try:
        raise outside
    except KeyError:
        prefetch = make(build, timeout_s=0.05)
        prefetch.start(1)
        assert begun.wait(30)
        with pytest.raises(RunFailedError, match="building step 1"):
            prefetch.close()
        with pytest.raises(ZeroDivisionError) as raised:
            fail(prefetch)
        assert "did not end" in raised.value.__notes__[0]
    assert not hasattr(outside, "__notes__")
    let_go.set()
    prefetch.close()


def test_a_batch_that_is_never_ready_fails_its_step_by_name_instead_of_hanging() -> None:
    let_go = threading.Event()

    def build(step: int) -> TrainingBatch:
        assert step < 3 or let_go.wait(60)
        return numbered_batch(step)

    prefetch = make(build, timeout_s=0.2)
    prefetch.start(1)
    prefetch.next(1)
    prefetch.next(2)
    with pytest.raises(RunFailedError, match=r"Step 3: its batch was not ready after 0\.2 s"):
        prefetch.next(3)
    let_go.set()
    prefetch.close()


def test_looking_ahead_draws_no_random_numbers() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    prefetch = make(numbered_batch)
    prefetch.start(1)
    prefetch.next(1)
    prefetch.close()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def fail(prefetch: AsyncPrefetch) -> None:
    """What a run does that fails before its first step."""
    with ExitStack() as stack:
        stack.callback(prefetch.close)
        raise ZeroDivisionError("the step")


def train_and_fail(prefetch: AsyncPrefetch, after_step: int, begun: threading.Event | None = None) -> None:
    """What a run does whose loop fails after this step, once a build has begun."""
    with ExitStack() as stack:
        stack.callback(prefetch.close)
        prefetch.start(1)
        for step in range(1, after_step + 1):
            prefetch.next(step)
        assert begun is None or begun.wait(30)
        raise ZeroDivisionError("the step")
