"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.trackers.readout import Smoothed, clock, quantity, training_seconds


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (999_950, "1.00M"),
        (1_200_000, "1.20M"),
        (7.25e9, "7.25B"),
        (0.6403, "0.64"),
        (math.inf, "inf"),
    ],
)
def test_quantities_have_three_digits_and_a_prefix(value: float, shown: str) -> None:
    assert quantity(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00:00"), (65, "0:01:05"), (3_725.4, "1:02:05"), (90_061, "1d 1:01:01"), (-3, "0:00:00")],
)
def test_durations_read_as_hours_minutes_seconds(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(1, 50))
def test_an_average_stays_between_the_lowest_and_the_highest_value(values: list[float], span: float) -> None:
    average = Smoothed(span)
    for value in values:
        latest = average.add(value)
    assert min(values) - 1e-6 <= latest <= max(values) + 1e-6
    assert average.value == latest


def test_training_time_is_the_step_without_evaluation() -> None:
    assert training_seconds({"time/step": 3.0, "time/evaluate": 2.0}) == 1.0
    assert training_seconds({"time/step": 3.0, "time/evaluate": 3.5}) == 3.0
    assert training_seconds({"loss": 1.0}) is None


def test_training_time_is_the_step_without_the_generation_that_it_waited_for() -> None:
    assert training_seconds({"time/step": 3.0, "time/batch": 2.25, "time/generate": 2.0}) == 1.0
    assert training_seconds({"time/step": 3.0, "time/batch": 0.5, "time/generate": 2.0}) == 2.5
