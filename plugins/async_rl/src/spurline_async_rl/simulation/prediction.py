"""Compare what the scheduler's knobs would give: Workload and Knobs -> Prediction, alternatives, and the best of them.

Each prediction is one run of the model, of which the first steps are left out, as nothing is buffered then; the run
goes on beyond the last step that counts, so that no batch is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spurline_async_rl.scheduling.scheduler import AtBound, Order, SchedulerLimits
from spurline_async_rl.simulation.model import Model
from spurline_async_rl.simulation.records import Figures, GroupRecord, SimulatedRun
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
    groups: list[GroupRecord] = []
    for group in run.groups:
        if group.step is not None and group.step <= after_step:
            continue
        end = None if group.end is None else group.end - began
        moved = replace(group, begin=group.begin - began, end=end)
        # The batch after the last step may have been taken already.
        if group.step is not None and group.step > last_step:
            moved = replace(moved, step=None, state="buffered")
        groups.append(moved)
    spans = [
        replace(span, begin=max(0.0, span.begin - began), end=span.end - began)
        for span in run.spans
        if span.end > began
    ]
    levels = [replace(level, time=max(0.0, level.time - began)) for level in run.levels]
    first = max((place for place, level in enumerate(levels) if level.time == 0), default=0)
    return SimulatedRun(groups, spans, levels[first:], run.seconds - began, run.max_running)


def alternatives(knobs: Knobs) -> list[tuple[str, Knobs]]:
    """The knobs with one of them changed at a time, with the name of that one."""
    changed = [("S", replace(knobs, max_staleness=bound)) for bound in _ladder_of_bounds(knobs)]
    changed += [("K", replace(knobs, max_running=groups)) for groups in ladder_of_groups(knobs)]
    changed += [("B", _scaled_batch(knobs, factor)) for factor in (0.5, 2.0)]
    changed += [("E", _scaled_engines(knobs, factor)) for factor in (0.5, 2.0)]
    return [(name, other) for name, other in changed if other.is_allowed and other != knobs]


def ladder_of_groups(knobs: Knobs) -> list[int]:
    """Numbers of groups at once to try: from an eighth of a batch to as many as the bound allows."""
    batch, most = knobs.batch_size, knobs.batch_size * (knobs.max_staleness + 1)
    wanted = {math.ceil(batch * part) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)} | {knobs.max_running, most}
    return sorted(groups for groups in wanted if knobs.engines <= groups <= most)


def _ladder_of_bounds(knobs: Knobs) -> list[int]:
    return sorted({0, 1, 2, 4, knobs.max_staleness, 2 * knobs.max_staleness})


def _scaled_batch(knobs: Knobs, factor: float) -> Knobs:
    return replace(knobs, batch_size=max(1, round(knobs.batch_size * factor)))


def _scaled_engines(knobs: Knobs, factor: float) -> Knobs:
    """As many groups on each engine as before."""
    engines = max(1, round(knobs.engines * factor))
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


def recommended(found: Sequence[Prediction]) -> Prediction:
    """The smallest bound that comes close to the best throughput, and with it the freshest tokens among equals."""

    def speed(prediction: Prediction) -> float:
        return prediction.figures.groups_per_second

    best = max(map(speed, found))
    bound = min(item.knobs.max_staleness for item in found if speed(item) >= _GOOD_ENOUGH * best)
    of_bound = [item for item in found if item.knobs.max_staleness == bound]
    fastest = max(map(speed, of_bound))
    alike = [item for item in of_bound if speed(item) >= _ALIKE * fastest]
    return min(alike, key=lambda item: (item.figures.mean_staleness, item.knobs.max_running))
