"""Compare what the scheduler's knobs would give: Workload and Knobs -> Prediction, alternatives, the best, and advice.

Each prediction is one run of the model, of which the first steps are left out, as nothing is buffered then; the run
goes on beyond the last step that counts, so that no batch is the last one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from spurline_async_rl.simulation.model import Model, SimulatedRun
from spurline_async_rl.simulation.workload import Knobs, Workload
from spurline_async_rl.timeline.records import Level, staleness_of, trained_steps

_GOOD_ENOUGH = 0.97
"""Share of the best throughput for which a smaller bound is recommended."""
_ALIKE = 0.99
_BALANCED = 1.15
"""Sides whose capacities differ by less are called balanced."""
_WORTH_SAYING = 1.02
_AS_FRESH = 0.1
"""Updates by which tokens may be older and still count as fresh."""


@dataclass(frozen=True)
class Figures:
    """A run in numbers.

    groups_per_second, steps_per_second: trained. staleness: share of the trained tokens by age, its mean and maximum in
    updates; masked_share of them lost their loss to their age. trainer_idle: share of the time waiting for a batch.
    generation_blocked: share of the places for running groups that stood empty as admission was blocked, pauses not
    counted; generation_paused: share of the time engines stood still. buffered: mean number of finished groups. depth:
    mean depth of admission, in groups.
    """

    seconds: float
    groups_per_second: float
    steps_per_second: float
    mean_staleness: float
    max_staleness: int
    staleness: dict[int, float]
    masked_share: float
    trainer_idle: float
    generation_blocked: float
    generation_paused: float
    buffered: float
    depth: float


@dataclass(frozen=True)
class Prediction:
    """knobs: chosen. figures: of the steady part of the run. generation_groups_per_second, training_groups_per_second:
    what either could do if it never waited for the other and nothing was published."""

    knobs: Knobs
    figures: Figures
    generation_groups_per_second: float
    training_groups_per_second: float

    @property
    def per_s(self) -> float:
        """Groups that are trained on in a second."""
        return self.figures.groups_per_second

    @property
    def efficiency(self) -> float:
        """Trained groups in a second, relative to what the slower of the two could do."""
        return self.per_s / min(self.generation_groups_per_second, self.training_groups_per_second)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"efficiency": self.efficiency}


class Predictor:
    """Predictions for one workload, each made once, on average over so many steps."""

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._workload = workload
        self._num_steps = num_steps
        self._made: dict[Knobs, Prediction] = {}

    def __call__(self, knobs: Knobs) -> Prediction:
        if knobs not in self._made:
            workload = self._workload
            run = steady_run(workload, knobs, self._num_steps)
            generation = workload.generation_per_s(knobs, 1 + max(run.work))
            self._made[knobs] = Prediction(knobs, figures_of(run), generation, workload.training_per_s)
        return self._made[knobs]


@dataclass(frozen=True)
class Comparison:
    """Everything `spurline simulate` tells. current: of the config. others: with one knob changed, named by it. found:
    every bound with every number of groups at once. lines: advice in sentences."""

    workload: Workload
    num_steps: int
    current: Prediction
    others: Sequence[tuple[str, Prediction]]
    found: Sequence[Prediction]
    lines: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "basis": list(self.workload.basis),
            "steps_simulated": self.num_steps,
            "config": self.current.as_json(),
            "alternatives": [{"changed": name, **other.as_json()} for name, other in self.others],
            "recommended": recommended([self.current, *self.found]).as_json(),
            "advice": list(self.lines),
        }


def compare(workload: Workload, knobs: Knobs, num_steps: int) -> Comparison:
    """Simulate so many steps of each choice."""
    predict = Predictor(workload, num_steps)
    current = predict(knobs)
    others = [(name, predict(other)) for name, other in alternatives(knobs)]
    found = search(predict, knobs)
    return Comparison(workload, num_steps, current, others, found, advice(predict, current, found))


def steady_run(workload: Workload, knobs: Knobs, num_steps: int) -> SimulatedRun:
    """So many steps out of the middle of a long run, which begin at time 0."""
    cold = 2 * (knobs.max_staleness + 1)
    limits = knobs.limits(cold + num_steps + knobs.max_staleness + 2)
    model = Model(workload, limits, knobs.engines, knobs.publish_every)
    while model.step < cold + num_steps:
        model.advance()
    return model.result(after=cold)


def figures_of(run: SimulatedRun) -> Figures:
    seconds, limits = run.seconds or 1.0, run.limits
    amounts: dict[int, float] = {}
    for _, age, work in trained_work(run):
        amounts[age] = amounts.get(age, 0.0) + work
    if not any(amounts.values()):
        # Groups that took no time count as if all took the same.
        amounts = dict[int, float](Counter(age for _, age, _ in trained_work(run)))
    total = sum(amounts.values())
    shares = {age: amounts[age] / total for age in sorted(amounts)}
    spans = [span for record in run.records for span in record.spans]
    pauses = sum(span.seconds for span in spans if span.kind == "pause")
    waits = sum(span.seconds for span in spans if span.kind == "wait")
    running, buffered = _areas(run)
    return Figures(
        seconds=run.seconds,
        groups_per_second=len(trained_steps(run.records)) / seconds,
        steps_per_second=len(run.records) / seconds,
        mean_staleness=sum(age * share for age, share in shares.items()),
        max_staleness=max(shares, default=0),
        staleness=shares,
        masked_share=sum((share for age, share in shares.items() if age > limits.max_staleness), 0.0),
        trainer_idle=waits / seconds,
        generation_blocked=max(0.0, 1 - pauses / seconds - running / (limits.max_running * seconds)),
        generation_paused=pauses / seconds,
        buffered=buffered / seconds,
        depth=fmean(run.depths.values()) if run.depths else 0.0,
    )


def trained_work(run: SimulatedRun) -> Iterator[tuple[int, int, float]]:
    """Step, age and amount of everything that was trained on. A token counts as much as any other."""
    steps = trained_steps(run.records)
    for draw, parts in run.work.items():
        if draw not in steps:
            continue
        whole, before, made = sum(parts.values()) or 1.0, 0.0, 0.0
        for version in sorted(parts):
            before += parts[version]
            made_before, made = made, run.attempts.made_by(before / whole)
            yield steps[draw], staleness_of(steps[draw], version), (made - made_before) * whole


def _areas(run: SimulatedRun) -> tuple[float, float]:
    """Seconds times groups running, pauses left out, and buffered."""
    pauses = [span for record in run.records for span in record.spans if span.kind == "pause"]
    levels = [level for record in run.records for level in record.levels]
    running = buffered = 0.0
    for level, following in pairwise([*levels, Level(run.seconds, 0, 0)]):
        seconds = following.at - level.at
        buffered += level.buffered * seconds
        # No level changes within a pause but where it begins or ends.
        place = bisect_right(pauses, level.at, key=lambda pause: pause.began) - 1
        if place < 0 or level.at >= pauses[place].ended:
            running += level.running * seconds
    return running, buffered


def alternatives(knobs: Knobs) -> list[tuple[str, Knobs]]:
    """The knobs with one of them changed at a time, with the name of that one."""
    batch, engines = knobs.batch_size, knobs.engines
    changed = [("S", replace(knobs, max_staleness=bound)) for bound in _ladder_of_bounds(knobs)]
    changed += [("K", replace(knobs, max_running=groups)) for groups in _ladder_of_groups(knobs)]
    changed += [("D", other) for other in with_other_depths(knobs)]
    changed += [("B", replace(knobs, batch_size=max(1, round(batch * factor)))) for factor in (0.5, 2.0)]
    changed += [("E", knobs.with_engines(max(1, round(engines * factor)))) for factor in (0.5, 2.0)]
    return [(name, other) for name, other in changed if other.is_allowed and other != knobs]


def search(predict: Predictor, knobs: Knobs) -> list[Prediction]:
    """Every bound with every number of groups at once, on the engines there are."""
    bounds = [replace(knobs, max_staleness=bound) for bound in _ladder_of_bounds(knobs)]
    tried = [replace(bound, max_running=groups) for bound in bounds for groups in _ladder_of_groups(bound)]
    chosen = [other for other in tried if other.is_allowed]
    return [predict(other) for other in (chosen if knobs in chosen else [knobs, *chosen])]


def with_other_depths(knobs: Knobs) -> list[Knobs]:
    """The knobs with each depth worth a try; none where no weights may be old, as the depth is a batch there."""
    if knobs.max_staleness == 0:
        return []
    numbers = {
        min(knobs.most_running, groups) for groups in (knobs.batch_size + knobs.max_running, 2 * knobs.batch_size)
    }
    return [replace(knobs, depth=depth) for depth in ("auto", *sorted(numbers), "full")]


def _ladder_of_groups(knobs: Knobs) -> list[int]:
    """Numbers of groups at once to try: from an eighth of a batch to as many as the bound allows."""
    wanted = {math.ceil(knobs.batch_size * part) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)}
    wanted |= {knobs.max_running, knobs.most_running}
    return sorted(groups for groups in wanted if knobs.engines <= groups <= knobs.most_running)


def _ladder_of_bounds(knobs: Knobs) -> list[int]:
    return sorted({0, 1, 2, 4, knobs.max_staleness, 2 * knobs.max_staleness})


def recommended(found: Sequence[Prediction]) -> Prediction:
    """The smallest bound that comes close to the best throughput, and with it the freshest tokens among equals."""
    best = max(item.per_s for item in found)
    bound = min(item.knobs.max_staleness for item in found if item.per_s >= _GOOD_ENOUGH * best)
    of_bound = [item for item in found if item.knobs.max_staleness == bound]
    fastest = max(item.per_s for item in of_bound)
    alike = [item for item in of_bound if item.per_s >= _ALIKE * fastest]
    return min(alike, key=lambda item: (item.figures.mean_staleness, item.knobs.max_running))


def advice(predict: Predictor, current: Prediction, found: Sequence[Prediction]) -> list[str]:
    """Sentences, the most useful ones first: which side is slower, which knobs to set, what other engines would bring.

    found: what `search` tried.
    """
    best = recommended([current, *found])
    settings = [*_on_settings(current, best, found), *_on_depth(predict, best)]
    return [_on_sides(current), *settings, *_on_engines(predict, current)]


def _on_sides(current: Prediction) -> str:
    generation, training = current.generation_groups_per_second, current.training_groups_per_second
    numbers = f"engines can make {generation:.3g} groups a second, training can take {training:.3g}"
    reached = f"The config reaches {current.per_s:.3g}, {min(1.0, current.efficiency):.0%} of the possible."
    if max(generation, training) < _BALANCED * min(generation, training):
        return f"Generation and training are balanced: {numbers}. {reached}"
    slower = "Generation" if generation < training else "Training"
    return f"{slower} is the slower side: {numbers}. {reached}"


def _on_settings(current: Prediction, best: Prediction, found: Sequence[Prediction]) -> list[str]:
    gain, now, then = best.per_s / current.per_s, current.knobs, best.knobs
    if now == then or (gain < _WORTH_SAYING and then.max_staleness == now.max_staleness):
        return ["Its settings are good: no other bound or number of groups at once gains 2% without older tokens."]
    settings = {
        "max_staleness": (now.max_staleness, then.max_staleness),
        "max_concurrent_groups": (now.max_running, then.max_running),
    }
    changes = " and ".join(f"source.{name}: {new}" for name, (old, new) in settings.items() if new != old)
    before, after = current.figures.mean_staleness, best.figures.mean_staleness
    effect = f"{gain:.2f} times the throughput" if abs(gain - 1) >= 0.005 else "the same throughput"
    lines = [f"Set {changes}: {effect}, tokens {after:.2f} updates old on average instead of {before:.2f}."]
    fresher = [item for item in found if item.knobs.max_staleness < then.max_staleness]
    if fresher:
        other = max(fresher, key=lambda item: (item.knobs.max_staleness, item.per_s))
        lines.append(
            f"With max_staleness: {other.knobs.max_staleness} and max_concurrent_groups: {other.knobs.max_running} it "
            f"would be {other.per_s / best.per_s:.0%} of that."
        )
    return lines


def _on_depth(predict: Predictor, best: Prediction) -> list[str]:
    """Whether another depth makes tokens fresher, or the run faster, with otherwise the best settings."""
    tried = [best, *map(predict, with_other_depths(best.knobs))]
    fastest = max(item.per_s for item in tried)
    alike = [item for item in tried if item.per_s >= _ALIKE * fastest]
    then = min(alike, key=lambda item: item.figures.mean_staleness)
    # A number is as good as the times it was made for; `auto` follows them.
    autos = [item for item in alike if item.knobs.depth == "auto"]
    then = next((item for item in autos if item.figures.mean_staleness < then.figures.mean_staleness + _AS_FRESH), then)
    fresher = best.figures.mean_staleness - then.figures.mean_staleness
    if then.knobs == best.knobs or (then.per_s < _WORTH_SAYING * best.per_s and fresher < _AS_FRESH):
        return []
    return [
        f"Set source.depth: {then.knobs.depth}: {then.per_s / best.per_s:.2f} times the throughput, tokens "
        f"{then.figures.mean_staleness:.2f} updates old instead of {best.figures.mean_staleness:.2f}."
    ]


def _on_engines(predict: Predictor, current: Prediction) -> list[str]:
    knobs, ratio = current.knobs, current.training_groups_per_second / current.generation_groups_per_second
    more = knobs.with_engines(math.ceil(knobs.engines * ratio))
    if ratio >= _BALANCED and more.is_allowed:
        gain = predict(more).per_s / current.per_s
        return [
            f"{more.engines} engines and {more.max_running} groups at once would bring {gain:.2f} times the throughput."
        ]
    fewer = knobs.with_engines(max(1, math.ceil(knobs.engines * ratio * 1.1)))
    if fewer.engines < knobs.engines:
        share = predict(fewer).per_s / current.per_s
        return [f"{fewer.engines} engines and {fewer.max_running} groups at once would do {share:.0%} of the work."]
    return []
