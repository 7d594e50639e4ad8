"""Compare what the scheduler's knobs would give, and say in plain words what it comes down to.

Place on the way: Workload and Knobs -> Prediction, alternatives, the best of them, advice. Each prediction is one run
of the model, of which the first steps are left out, as nothing is buffered then; the run goes on beyond the last step
that counts, so that no batch is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spurline_async_rl.scheduling.scheduler import AtBound, Order, SchedulerLimits
from spurline_async_rl.simulation.model import Figures, Model, SimulatedRun
from spurline_async_rl.simulation.workload import Workload

_GOOD_ENOUGH = 0.97
"""Share of the best throughput for which a smaller bound is recommended."""
_ALIKE = 0.99
_DRAWS_PER_GROUP = 8


@dataclass(frozen=True)
class Knobs:
    """What one may choose: S, B, K, engines, publish_every, and the rules of the scheduler."""

    max_staleness: int
    batch_size: int
    max_running: int
    engines: int = 1
    publish_every: int = 1
    order: Order = "window"
    at_bound: AtBound = "wait"

    @property
    def is_allowed(self) -> bool:
        most = self.batch_size * (self.max_staleness + 1)
        return (
            0 < self.engines <= self.max_running <= most
            and self.max_staleness >= self.publish_every - 1
            and self.batch_size > 0
        )

    def limits(self, num_batches: int) -> SchedulerLimits:
        draws = _DRAWS_PER_GROUP * self.batch_size
        return SchedulerLimits(
            self.max_staleness, self.batch_size, self.max_running, self.order, self.at_bound, draws, num_batches
        )


@dataclass(frozen=True)
class Prediction:
    """knobs: chosen. figures: of the steady part of the run. generation_per_s, training_per_s: groups in a second that
    either could do if it never waited for the other and nothing was published."""

    knobs: Knobs
    figures: Figures
    generation_per_s: float
    training_per_s: float

    @property
    def efficiency(self) -> float:
        """Trained groups in a second, relative to what the slower of the two could do."""
        return self.figures.groups_per_second / min(self.generation_per_s, self.training_per_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "knobs": asdict(self.knobs),
            "figures": asdict(self.figures),
            "generation_groups_per_second": self.generation_per_s,
            "training_groups_per_second": self.training_per_s,
            "efficiency": self.efficiency,
        }


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
            num_draws = 1 + max(group.draw for group in run.groups)
            generation = workload.generation_per_s(knobs.max_running, knobs.engines, num_draws)
            self._made[knobs] = Prediction(knobs, run.figures(), generation, workload.training_per_s)
        return self._made[knobs]


def steady_run(workload: Workload, knobs: Knobs, num_steps: int) -> SimulatedRun:
    """So many steps out of the middle of a long run, which begin at time 0."""
    cold = 2 * (knobs.max_staleness + 1)
    last = cold + num_steps
    limits = knobs.limits(last + knobs.max_staleness + 2)
    model = Model(workload.setup(limits, knobs.engines, knobs.publish_every))
    while model.step < cold:
        model.advance()
    began = model.now
    while model.step < last:
        model.advance()
    return _cut_out(model.result(), cold, last, began)


def _cut_out(run: SimulatedRun, after_step: int, last_step: int, began: float) -> SimulatedRun:
    """The steps after one that ended at `began`, from when on times count."""

    def moved(at: float) -> float:
        return max(0.0, at - began)

    cut = SimulatedRun(run.max_running, seconds=run.seconds - began)
    for group in run.groups:
        if group.step is not None and group.step <= after_step:
            continue
        ended = None if group.ended is None else group.ended - began
        # The batch after the last step may have been taken already.
        step = group.step if group.step is not None and group.step <= last_step else None
        cut.groups.append(replace(group, began=group.began - began, ended=ended, step=step))
    cut.spans += [
        replace(span, began=moved(span.began), ended=moved(span.ended)) for span in run.spans if span.ended > began
    ]
    for level in run.levels:
        cut.level(moved(level.at), level.running, level.buffered)
    cut.taken = {step: moved(at) for step, at in run.taken.items() if after_step < step <= last_step}
    cut.ends = {step: moved(at) for step, at in run.ends.items() if after_step < step <= last_step}
    return cut


def alternatives(knobs: Knobs) -> list[tuple[str, Knobs]]:
    """The knobs with one of them changed at a time, with the name of that one."""
    changed = [("S", replace(knobs, max_staleness=bound)) for bound in _ladder_of_bounds(knobs)]
    changed += [("K", replace(knobs, max_running=groups)) for groups in ladder_of_groups(knobs)]
    changed += [("B", replace(knobs, batch_size=max(1, round(knobs.batch_size * factor)))) for factor in (0.5, 2.0)]
    changed += [("E", _with_engines(knobs, max(1, round(knobs.engines * factor)))) for factor in (0.5, 2.0)]
    return [(name, other) for name, other in changed if other.is_allowed and other != knobs]


def ladder_of_groups(knobs: Knobs) -> list[int]:
    """Numbers of groups at once to try: from an eighth of a batch to as many as the bound allows."""
    batch, most = knobs.batch_size, knobs.batch_size * (knobs.max_staleness + 1)
    wanted = {math.ceil(batch * part) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)} | {knobs.max_running, most}
    return sorted(groups for groups in wanted if knobs.engines <= groups <= most)


def _ladder_of_bounds(knobs: Knobs) -> list[int]:
    return sorted({0, 1, 2, 4, knobs.max_staleness, 2 * knobs.max_staleness})


def _with_engines(knobs: Knobs, engines: int) -> Knobs:
    """As many groups on each engine as before, as far as the bound allows."""
    most = knobs.batch_size * (knobs.max_staleness + 1)
    return replace(knobs, engines=engines, max_running=min(most, max(1, knobs.max_running * engines // knobs.engines)))


def search(predict: Predictor, knobs: Knobs) -> list[Prediction]:
    """Every bound with every number of groups at once, on the engines there are."""
    bounds = [bound for bound in _ladder_of_bounds(knobs) if bound >= knobs.publish_every - 1]
    tried = [
        replace(knobs, max_staleness=bound, max_running=groups)
        for bound in bounds
        for groups in ladder_of_groups(replace(knobs, max_staleness=bound))
    ]
    chosen = [other for other in tried if other.is_allowed]
    return [predict(other) for other in (chosen if knobs in chosen else [knobs, *chosen])]


def fastest(found: Sequence[Prediction]) -> Prediction:
    """The one with the best throughput."""
    return max(found, key=lambda item: item.figures.groups_per_second)


def recommended(found: Sequence[Prediction]) -> Prediction:
    """The smallest bound that comes close to the best throughput, and with it the freshest tokens among equals."""

    def close_to_best(found: Sequence[Prediction], share: float) -> list[Prediction]:
        least = share * fastest(found).figures.groups_per_second
        return [item for item in found if item.figures.groups_per_second >= least]

    bound = min(item.knobs.max_staleness for item in close_to_best(found, _GOOD_ENOUGH))
    alike = close_to_best([item for item in found if item.knobs.max_staleness == bound], _ALIKE)
    return min(alike, key=lambda item: (item.figures.mean_staleness, item.knobs.max_running))


@dataclass(frozen=True)
class Comparison:
    """current: of the config. others: with one knob changed, named by it. found: every bound with every number of
    groups at once. lines: advice in sentences."""

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


_BALANCED = 1.15
"""Sides whose capacities differ by less are called balanced."""
_WORTH_SAYING = 1.02


def advice(predict: Predictor, current: Prediction, found: Sequence[Prediction]) -> list[str]:
    """Sentences, the most useful ones first. found: what `search` tried."""
    return [
        _sides(current),
        *_settings(current, recommended([current, *found]), found),
        *_engines(predict, current),
    ]


def _sides(current: Prediction) -> str:
    generation, training = current.generation_per_s, current.training_per_s
    numbers = f"engines can make {generation:.3g} groups a second, training can take {training:.3g}"
    share = min(1.0, current.efficiency)
    reached = f"The config reaches {current.figures.groups_per_second:.3g}, {share:.0%} of the possible."
    if max(generation, training) < _BALANCED * min(generation, training):
        return f"Generation and training are balanced: {numbers}. {reached}"
    slower = "Generation" if generation < training else "Training"
    return f"{slower} is the slower side: {numbers}. {reached}"


def _settings(current: Prediction, best: Prediction, found: Sequence[Prediction]) -> list[str]:
    gain = best.figures.groups_per_second / current.figures.groups_per_second
    now, then = current.knobs, best.knobs
    if now == then or (gain < _WORTH_SAYING and then.max_staleness == now.max_staleness):
        return ["Its settings are good: no other bound or number of groups at once gains 2% without older tokens."]
    changes = [
        f"{name}: {new}"
        for name, old, new in (
            ("max_staleness", now.max_staleness, then.max_staleness),
            ("max_concurrent_groups", now.max_running, then.max_running),
        )
        if new != old
    ]
    before, after = current.figures.mean_staleness, best.figures.mean_staleness
    age = f"tokens {after:.2f} updates old on average instead of {before:.2f}"
    effect = f"{gain:.2f} times the throughput" if abs(gain - 1) >= 0.005 else "the same throughput"
    lines = [f"Set source.{' and source.'.join(changes)}: {effect}, {age}."]
    fresher = [item for item in found if item.knobs.max_staleness < then.max_staleness]
    if fresher:
        bound = max(item.knobs.max_staleness for item in fresher)
        other = fastest([item for item in fresher if item.knobs.max_staleness == bound])
        share = other.figures.groups_per_second / best.figures.groups_per_second
        groups = other.knobs.max_running
        lines.append(
            f"With max_staleness: {bound} and max_concurrent_groups: {groups} it would be {share:.0%} of that."
        )
    return lines


def _engines(predict: Predictor, current: Prediction) -> list[str]:
    knobs, ratio = current.knobs, current.training_per_s / current.generation_per_s
    if ratio >= _BALANCED:
        more = math.ceil(knobs.engines * ratio)
        fed = _with_engines(knobs, more)
        if fed.is_allowed:
            gain = predict(fed).figures.groups_per_second / current.figures.groups_per_second
            return [f"{more} engines and {fed.max_running} groups at once would bring {gain:.2f} times the throughput."]
    fewer = max(1, math.ceil(knobs.engines * ratio * 1.1))
    if fewer < knobs.engines:
        left = _with_engines(knobs, fewer)
        share = predict(left).figures.groups_per_second / current.figures.groups_per_second
        return [f"{fewer} engines and {left.max_running} groups at once would do {share:.0%} of the work."]
    return []
