"""When a metric of the evaluations ends a run, against the sentence that the settings are."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.config.run_config import KeepBestConfig, StopWhenConfig
from spurline.errors import ConfigError
from spurline.run.evaluations.watched import BestSoFar, EarlyStop

VALUES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=20)


def first_end(values: list[float], config: StopWhenConfig) -> int | None:
    """Number of the evaluation that ends the run, from 1, told from all values at once."""
    sign = -1 if config.lower_is_better else 1
    for count in range(1, len(values) + 1):
        seen = [sign * value for value in values[:count]]
        if config.reaches is not None and seen[-1] >= sign * config.reaches:
            return count
        records = [0]
        for place, value in enumerate(seen):
            if value > seen[records[-1]] + config.min_delta:
                records.append(place)
        if config.patience is not None and count - 1 - records[-1] >= config.patience:
            return count
    return None


def watch(stop: EarlyStop, step: int, value: float) -> None:
    stop.observe(step, {"eval/score": value, "eval/loss": 0.0}, ["eval"], ["eval", "eval/few"])


@given(
    values=VALUES,
    patience=st.none() | st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 1.0, 1.5]),
    reaches=st.none() | st.integers(0, 6).map(float),
    mode=st.sampled_from(["min", "max"]),
    cut=st.integers(0, 20),
)
def test_a_run_ends_when_its_settings_say_also_when_it_was_resumed(
    values: list[float], patience: int | None, min_delta: float, reaches: float | None, mode: Any, cut: int
) -> None:
    config = StopWhenConfig(metric="eval/score", mode=mode, patience=patience, min_delta=min_delta, reaches=reaches)
    stop, ended = EarlyStop(config), None
    for step, value in enumerate(values, 1):
        watch(stop, step, value)
        # Evaluated again, after something else of the step has failed.
        watch(stop, step, value)
        stop.observe(step, {"eval/few/loss": 1.0}, ["eval/few"], ["eval", "eval/few"])
        if step == cut:
            saved = json.loads(json.dumps(stop.facts()))
            stop = EarlyStop(config)
            assert stop.restore(saved, same_data=True) == []
        if stop.reason is not None:
            ended = step
            break
    assert ended == first_end(values, config)


def test_the_model_that_training_begins_with_is_the_first_to_be_better_than_but_ends_nothing() -> None:
    stop = EarlyStop(StopWhenConfig(metric="eval/score", patience=1, reaches=0.5))
    watch(stop, 0, 0.4)
    assert stop.reason is None
    watch(stop, 1, 0.3)
    assert stop.reason == "eval/score was 0.4 at step 0 and has not got better in 1 evaluation (stop_when.patience: 1)"
    stop = EarlyStop(StopWhenConfig(metric="eval/score", patience=1, min_delta=0.01))
    watch(stop, 0, 0.4)
    watch(stop, 1, 0.405)
    assert "0.4 at step 0 and has not got better by 0.01 in 1 evaluation" in str(stop.reason)
    stop = EarlyStop(StopWhenConfig(metric="eval/score", reaches=0.5))
    watch(stop, 0, 0.9)
    assert stop.reason is None
    watch(stop, 1, 0.5)
    assert stop.reason == "eval/score reached 0.5 at step 1 (stop_when.reaches: 0.5)"


def test_what_no_longer_compares_is_forgotten_with_a_note() -> None:
    config = StopWhenConfig(metric="eval/score", patience=2)
    stop = EarlyStop(config)
    for step in (1, 2, 3):
        watch(stop, step, 1.0)
    saved = stop.facts()
    patient = EarlyStop(config.model_copy(update={"patience": 3}))
    assert patient.restore(saved, same_data=True) == []
    assert patient.reason is None
    watch(patient, 4, 1.0)
    assert patient.reason is not None
    other = EarlyStop(config.model_copy(update={"mode": "min"}))
    assert "stop_when changed" in other.restore(saved, same_data=True)[0]
    assert "held-out data changed" in EarlyStop(config).restore(saved, same_data=False)[0]
    assert other.reason is None


def test_a_metric_that_is_not_measured_is_named() -> None:
    stop = EarlyStop(StopWhenConfig(metric="eval/scor", patience=1))
    with pytest.raises(ConfigError, match=r"stop_when.metric is eval/scor, .* Did you mean 'eval/score'\?"):
        watch(stop, 1, 1.0)


def test_nan_reaches_nothing_and_anything_is_better() -> None:
    patient, hoping = (
        EarlyStop(StopWhenConfig(metric="eval/loss", patience=2)),
        EarlyStop(StopWhenConfig(metric="eval/loss", reaches=0.5)),
    )
    best = BestSoFar(KeepBestConfig(metric="eval/loss"))
    for step, value in enumerate((math.nan, 3.0, math.nan, 2.0), 1):
        for each in (patient, hoping, best):
            each.observe(step, {"eval/loss": value}, ["eval"], ["eval"])
        assert (patient.reason, hoping.reason) == (None, None)
    assert best.step == 4
