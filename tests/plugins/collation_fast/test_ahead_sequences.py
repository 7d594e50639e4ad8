"""No sequence of calls makes the component that builds ahead hang, serve a wrong step or leave a thread."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from spurline_collation_fast.prefetch import BuildAhead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spurline-build-ahead"]


class AnySequence(RuleBasedStateMachine):
    """Random submits, gets, clears and shutdowns against a list of what must come next."""

    def __init__(self) -> None:
        super().__init__()
        self.fates: dict[int, str] = {}
        self.expected: list[int] = []
        self.is_shut_down = False
        self.lock = threading.Lock()
        self.running = 0
        self.most_running = 0
        self.alive: set[int] = set()

    @initialize(depth=st.integers(1, 5))
    def begin(self, depth: int) -> None:
        self.depth = depth
        self.ahead: BuildAhead[int] = BuildAhead(self.build, self.discard, depth, timeout_s=30)

    def build(self, step: int) -> int:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        if "slow" in self.fates[step]:
            time.sleep(0.002)
        with self.lock:
            self.running -= 1
            if "broken" in self.fates[step]:
                raise ValueError(f"step {step} is broken")
            self.alive.add(step)
        return step

    def discard(self, step: int) -> None:
        with self.lock:
            self.alive.remove(step)

    @rule(fate=st.sampled_from(["quick", "quick", "slow", "broken", "slow and broken"]), jump=st.integers(-3, 3))
    def submit(self, fate: str, jump: int) -> None:
        step = max([0, *self.fates]) + 4 + jump
        self.fates[step] = fate
        if self.is_shut_down or len(self.expected) == self.depth:
            with pytest.raises(AssertionError, match=f"step {step} "):
                self.ahead.submit(step)
            return
        assert self.ahead.has_room
        self.ahead.submit(step)
        self.expected.append(step)

    @rule()
    def get(self) -> None:
        if not self.expected:
            with pytest.raises(AssertionError, match="nothing is in flight"):
                self.ahead.get(1)
            return
        step = self.expected.pop(0)
        if "broken" in self.fates[step]:
            with pytest.raises(ValueError, match=f"step {step} is broken"):
                self.ahead.get(step)
        else:
            assert self.ahead.get(step) == step
            self.discard(step)

    @rule(offset=st.sampled_from([-1, 1, 1000]))
    def get_another_step(self, offset: int) -> None:
        if self.expected:
            with pytest.raises(AssertionError, match="is asked for"):
                self.ahead.get(self.expected[0] + offset)

    @rule()
    def clear(self) -> None:
        self.ahead.clear()
        self.expected.clear()
        assert not self.alive, "cleared batches were not given back"
        assert self.running == 0, "a build outlived the clear"

    @rule(really=st.sampled_from([False, False, False, True]))
    def shutdown(self, really: bool) -> None:
        if really:
            self.ahead.shutdown()
            self.expected.clear()
            self.is_shut_down = True
            assert threads() == []

    @invariant()
    def no_more_than_depth_results_exist_and_one_build_runs(self) -> None:
        assert self.most_running <= 1
        assert len(self.alive) <= getattr(self, "depth", 0)

    def teardown(self) -> None:
        if hasattr(self, "ahead"):
            self.ahead.shutdown()
        assert threads() == []
        assert not self.alive, "batches were not given back"


@pytest.mark.slow
def test_no_sequence_of_calls_hangs_serves_a_wrong_step_or_leaves_a_thread() -> None:
    sequences = 2000 if os.environ.get("SPURLINE_SOAK") else 150
    checks: list[Any] = [HealthCheck.too_slow]
    run_state_machine_as_test(
        AnySequence,
        settings=settings(max_examples=sequences, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
