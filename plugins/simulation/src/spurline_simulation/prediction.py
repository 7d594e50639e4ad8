"""Compare settings of the scheduler by simulation, and recommend the best.

Each prediction is one simulated run. The first steps of a run do not count, because the buffer is empty at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from spurline_async_rl.timeline.records import staleness_of, trained_steps
from spurline_simulation.model import Model
from spurline_simulation.workload import Knobs, Workload

_GOOD_ENOUGH = 0.97
"""A smaller max_staleness is recommended if it reaches this share of the best throughput."""
_ALIKE = 0.99
_BALANCED = 1.15
"""Generation and training are balanced if the ratio of their capacities is smaller than this."""
_WORTH_SAYING = 1.02


@dataclass(frozen=True)
class Figures:
    """The figures of a simulated run.

    Attributes:
        staleness: Shares of the trained tokens, by their age in updates.
        trainer_idle: The share of the time in which training waited for a batch.
        generation_idle: The mean share of places that were empty or paused. There are `max_running` places for groups.
        depth: The mean depth D (see depth.py), in groups.
    """

    seconds: float
    groups_per_second: float
    steps_per_second: float
    mean_staleness: float
    max_staleness: int
    staleness: dict[int, float]
    trainer_idle: float
    generation_idle: float
    depth: float


@dataclass(frozen=True)
class Prediction:
    """The figures of a run with these knobs, without its first steps.

    `generation_groups_per_second` is the speed of engines that never wait, and `training_groups_per_second` the speed
    of training that never waits. Both leave out publishing. `efficiency` is the throughput divided by the smaller of
    these two speeds.
    """

    knobs: Knobs
    figures: Figures
    generation_groups_per_second: float
    training_groups_per_second: float
    efficiency: float

    @property
    def per_s(self) -> float:
        return self.figures.groups_per_second


Predict = Callable[[Knobs], Prediction]


def predictor(workload: Workload, num_steps: int) -> Predict:
    """Return a function that predicts a run with given knobs over `num_steps` steps, and caches the predictions."""

    @cache
    def predict(knobs: Knobs) -> Prediction:
        run, first = steady_run(workload, knobs, num_steps)
        figures = figures_of(run, first)
        generation = workload.generation_per_s(knobs, 1 + max(run.work))
        training = workload.batch_size / workload.train_s.mean
        efficiency = figures.groups_per_second / min(generation, training)
        return Prediction(knobs, figures, generation, training, efficiency)

    return predict


@dataclass(frozen=True)
class Comparison:
    """The output of `spurline simulate`.

    `alternatives` maps the letter of a knob (S, K, D, B or E) to predictions in which only this knob is changed.
    """

    basis: Sequence[str]
    steps_simulated: int
    config: Prediction
    alternatives: Mapping[str, Sequence[Prediction]]
    recommended: Prediction
    advice: Sequence[str]


def compare(workload: Workload, knobs: Knobs, num_steps: int) -> Comparison:
    """Simulate `num_steps` steps with these knobs and with others."""
    predict = predictor(workload, num_steps)
    current = predict(knobs)
    others = {letter: [predict(other) for other in changed] for letter, changed in alternatives(knobs).items()}
    best = recommended([current, *search(predict, knobs)])
    advice = [_on_sides(current), _on_settings(current, best), *_on_engines(predict, current)]
    return Comparison(workload.basis, num_steps, current, others, best, advice)


def steady_run(workload: Workload, knobs: Knobs, num_steps: int) -> tuple[Model, int]:
    """Return a simulated run, and the index of its first record after the warm-up."""
    cold = 2 * (knobs.max_staleness + 1)
    limits = knobs.limits(cold + num_steps + knobs.max_staleness + 2)
    model = Model(workload, limits, knobs.engines, knobs.publish_every)
    while model.step < cold + num_steps:
        model.advance()
    model.close_record()
    return model, cold


def figures_of(run: Model, first: int = 0) -> Figures:
    """Return the figures of a simulated run, from record `first` on."""
    records = run.records[first:]
    began, busy_s = (run.records[first - 1].until, run.busy_s[first - 1]) if first else (0.0, 0.0)
    seconds = run.records[-1].until - began or 1.0
    amounts: dict[int, float] = {}
    for _, age, work in trained_work(run, first):
        amounts[age] = amounts.get(age, 0.0) + work
    total = sum(amounts.values()) or 1.0
    shares = {age: amounts[age] / total for age in sorted(amounts)}
    waits = sum(span.seconds for record in records for span in record.spans if span.kind == "wait")
    return Figures(
        seconds=run.records[-1].until - began,
        groups_per_second=len(trained_steps(records)) / seconds,
        steps_per_second=len(records) / seconds,
        mean_staleness=sum(age * share for age, share in shares.items()),
        max_staleness=max(shares, default=0),
        staleness=shares,
        trainer_idle=waits / seconds,
        generation_idle=1 - (run.busy_s[-1] - busy_s) / (run.limits.max_running * seconds),
        depth=fmean(run.depths[first : len(run.records)]),
    )


def trained_work(run: Model, first: int = 0) -> Iterator[tuple[int, int, float]]:
    """Yield (step, age, amount of work) for each trained group and version of the weights, from record `first` on."""
    steps = trained_steps(run.records[first:])
    for draw, parts in run.work.items():
        if draw in steps:
            for version, work in parts.items():
                yield steps[draw], staleness_of(steps[draw], version), work


def alternatives(knobs: Knobs) -> dict[str, list[Knobs]]:
    """Return knobs with one change each, by the letter of the changed knob."""
    batch, engines = knobs.batch_size, knobs.engines
    depths: Sequence[Any] = ("auto", 2 * batch, "full") if knobs.max_staleness else ()
    changed = {
        "S": [replace(knobs, max_staleness=bound) for bound in _bounds(knobs)],
        "K": [replace(knobs, max_running=groups) for groups in _groups(knobs)],
        "D": [replace(knobs, depth=depth) for depth in depths],
        "B": [replace(knobs, batch_size=max(1, round(batch * factor))) for factor in (0.5, 2.0)],
        "E": [knobs.with_engines(max(1, round(engines * factor))) for factor in (0.5, 2.0)],
    }
    return {
        letter: [other for other in others if other.is_allowed and other != knobs] for letter, others in changed.items()
    }


def search(predict: Predict, knobs: Knobs) -> list[Prediction]:
    """Return predictions for each pair of values of `max_staleness` and `max_running`."""
    bounds = [replace(knobs, max_staleness=bound) for bound in _bounds(knobs)]
    tried = [replace(bound, max_running=groups) for bound in bounds for groups in _groups(bound)]
    return [predict(other) for other in tried if other.is_allowed]


def _groups(knobs: Knobs) -> list[int]:
    """Return values of `max_running` to try."""
    wanted = {math.ceil(knobs.batch_size * part) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)}
    wanted |= {knobs.max_running, knobs.most_running}
    return sorted(groups for groups in wanted if knobs.engines <= groups <= knobs.most_running)


def _bounds(knobs: Knobs) -> list[int]:
    return sorted({0, 1, 2, 4, knobs.max_staleness, 2 * knobs.max_staleness})


def recommended(found: Sequence[Prediction]) -> Prediction:
    """Return the recommended prediction. It has the smallest `max_staleness` that nearly reaches the best throughput.

    Among the fastest predictions with this `max_staleness`, it has the freshest tokens.
    """
    best = max(item.per_s for item in found)
    bound = min(item.knobs.max_staleness for item in found if item.per_s >= _GOOD_ENOUGH * best)
    of_bound = [item for item in found if item.knobs.max_staleness == bound]
    fastest = max(item.per_s for item in of_bound)
    alike = [item for item in of_bound if item.per_s >= _ALIKE * fastest]
    return min(alike, key=lambda item: (item.figures.mean_staleness, item.knobs.max_running))


def _on_sides(current: Prediction) -> str:
    generation, training = current.generation_groups_per_second, current.training_groups_per_second
    numbers = f"engines can make {generation:.3g} groups a second, training can take {training:.3g}"
    reached = f"The config reaches {current.per_s:.3g}, {min(1.0, current.efficiency):.0%} of what is possible."
    if max(generation, training) < _BALANCED * min(generation, training):
        return f"Generation and training are balanced: {numbers}. {reached}"
    slower = "Generation" if generation < training else "Training"
    return f"{slower} is the slower side: {numbers}. {reached}"


def _on_settings(current: Prediction, best: Prediction) -> str:
    gain, now, then = best.per_s / current.per_s, current.knobs, best.knobs
    if now == then or (gain < _WORTH_SAYING and then.max_staleness == now.max_staleness):
        return (
            "The settings are good: any other max_staleness or max_concurrent_groups would gain less than 3% of "
            "throughput, or make tokens older."
        )
    settings = {
        "max_staleness": (now.max_staleness, then.max_staleness),
        "max_concurrent_groups": (now.max_running, then.max_running),
    }
    changes = " and ".join(f"source.{name}: {new}" for name, (old, new) in settings.items() if new != old)
    before, after = current.figures.mean_staleness, best.figures.mean_staleness
    return f"Set {changes}: {gain:.2f} times the throughput, tokens {after:.2f} updates old instead of {before:.2f}."


def _on_engines(predict: Predict, current: Prediction) -> list[str]:
    knobs, ratio = current.knobs, current.training_groups_per_second / current.generation_groups_per_second
    more = knobs.with_engines(math.ceil(knobs.engines * ratio))
    if ratio < _BALANCED or not more.is_allowed:
        return []
    gain = predict(more).per_s / current.per_s
    return [
        f"{more.engines} engines and {more.max_running} groups at once would bring {gain:.2f} times the throughput."
    ]
