"""The depth of admission: between its limits, up where training lacked groups, down where it did not, and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline_async_rl.scheduling.depth import AdmissionDepth


@dataclass(frozen=True)
class Batch:
    """held_back: whether a group would have started but for the depth. lacked: share of the time without a batch."""

    held_back: bool
    lacked: float


def batches() -> st.SearchStrategy[list[Batch]]:
    shares = st.one_of(st.just(0.0), st.just(0.0005), st.floats(0.002, 1.0))
    return st.lists(st.builds(Batch, st.booleans(), shares), max_size=60)


def told(depth: AdmissionDepth, batch: Batch, seconds: float = 4.0) -> None:
    if batch.held_back:
        depth.note_held_back()
    depth.adapt(batch.lacked * seconds, seconds)


def expected(bound: int, size: int, running: int, seen: list[Batch]) -> float:
    """The rule over again, from the whole history."""
    most = size * (bound + 1)
    least, value = min(most, size + max(1, running / 4)), min(most, size + running)
    for number, batch in enumerate(seen):
        recently = any(earlier.held_back for earlier in seen[max(0, number - 8) : number + 1])
        if batch.lacked < 0.001:
            value -= size / 128
        elif recently:
            value += running / 4 + 2 * size * batch.lacked
        value = max(least, min(most, value))
    return value


@given(st.integers(0, 8), st.integers(1, 64), st.integers(1, 200), batches(), st.integers(0, 60))
def test_the_depth_follows_its_rule_within_its_limits_also_over_a_restart(
    bound: int, size: int, running: int, seen: list[Batch], stop: int
) -> None:
    depth = AdmissionDepth("auto", bound, size, running)
    for number, batch in enumerate(seen):
        told(depth, batch)
        assert depth.value == pytest.approx(expected(bound, size, running, seen[: number + 1]))
        assert size <= depth.value <= size * (bound + 1)
        assert 0 <= depth.groups - depth.value < 1
        if number == stop:
            state, depth = depth.state_dict(), AdmissionDepth("auto", bound, size, running)
            depth.load_state_dict(state)


@given(batches())
def test_a_depth_that_was_chosen_stays(seen: list[Batch]) -> None:
    full, chosen = AdmissionDepth("full", 3, 8, 4), AdmissionDepth(11, 3, 8, 4)
    for batch in seen:
        told(full, batch)
        told(chosen, batch)
    chosen.load_state_dict({"value": 20.0, "held_back_ago": 0})
    assert (full.groups, chosen.groups) == (32, 11)


@pytest.mark.parametrize("fixed", ["full", 11])
def test_a_run_that_follows_the_trainer_from_now_on_begins_anew(fixed: Any) -> None:
    """From the bound it would take hundreds of steps to come down."""
    depth = AdmissionDepth("auto", 4, 32, 8)
    depth.load_state_dict(AdmissionDepth(fixed, 4, 32, 8).state_dict())
    assert depth.value == 40


def test_the_depth_of_a_run_with_other_limits_is_brought_within_these() -> None:
    depth = AdmissionDepth("auto", 1, 8, 4)
    depth.load_state_dict({"value": 100.0, "held_back_ago": 0})
    assert depth.value == 16.0
    depth.load_state_dict({"value": 1.0, "held_back_ago": 0})
    assert depth.value == 9.0
