"""Runs on a virtual clock: the real scheduler, with engines and a trainer made of times.

Place on the way: Setup -> SimulatedRun -> figures, and the timeline's own records, so that one picture serves real and
simulated runs. An event is the end of a group or of what the trainer does; after each, every group that may start does,
and the trainer takes the next batch if it waits for one. Nothing here is random and no time passes: the same setup
gives the same run, in milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

from spurline.errors import RunFailedError
from spurline_async_rl.scheduling.scheduler import Scheduler, State
from spurline_async_rl.simulation.workload import Fate, Outcome, Setup, Speed
from spurline_async_rl.timeline.records import (
    STATE_NAMES,
    GroupSpan,
    GroupState,
    Level,
    Span,
    SpanKind,
    StepRecord,
    Taken,
    staleness_of,
)

STATES: Mapping[Outcome, State] = {
    "kept": State.BUFFERED,
    "filtered": State.FILTERED,
    "quarantined": State.GIVEN_UP,
    "skipped": State.SKIPPED,
}
"""Where the scheduler has prompts of each outcome when their attempts are over."""


@dataclass
class SimulatedGroup:
    """One admitted group. Times in seconds; `ended` and `step` are None until there is one.

    version: when it was admitted. state: what it ended as; one that was trained on has its 1-based `step`. parts: work
    done with each version of the weights, of the attempt that counts. masked: versions whose tokens were too old for
    the batch and have no loss.
    """

    draw: int
    version: int
    began: float
    ended: float | None = None
    state: GroupState = "buffered"
    step: int | None = None
    parts: dict[int, float] = field(default_factory=dict[int, float])
    masked: tuple[int, ...] = ()

    def ages(self) -> dict[int, float]:
        """Work by staleness in the batch it was trained in."""
        assert self.step is not None, self
        return {staleness_of(self.step, version): work for version, work in self.parts.items()}

    def span(self) -> GroupSpan:
        """This group, which has ended, as the timeline has it."""
        assert self.ended is not None, self
        versions = self.parts or {self.version: 0.0}
        times = (self.began, self.ended)
        return GroupSpan(self.draw, *times, self.version, self.state, 0, min(versions), max(versions))


@dataclass(frozen=True)
class Figures:
    """A run in numbers.

    groups_per_second, steps_per_second: trained. staleness: share of the trained work by age, its mean and maximum in
    updates; masked_share of it lost its loss to its age. trainer_idle: share of the time spent waiting for a batch.
    generation_blocked: share of the places for running groups that stood empty as admission was blocked, pauses not
    counted; generation_paused: share of the time engines stood still. buffered: mean number of finished groups.
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


@dataclass
class SimulatedRun:
    """What a run did.

    groups: in the order of their admission. taken, ends: when the batch of a step was taken, and when the step was
    over. max_running: places for running groups.
    """

    max_running: int
    groups: list[SimulatedGroup] = field(default_factory=list[SimulatedGroup])
    spans: list[Span] = field(default_factory=list[Span])
    levels: list[Level] = field(default_factory=list[Level])
    taken: dict[int, float] = field(default_factory=dict[int, float])
    ends: dict[int, float] = field(default_factory=dict[int, float])
    seconds: float = 0.0

    def spend(self, kind: SpanKind, began: float, ended: float) -> None:
        """Note what the trainer did, if it took any time."""
        if ended > began:
            self.spans.append(Span(kind, began, ended))

    def level(self, at: float, running: int, buffered: int) -> None:
        """Note how many groups run and wait from now on; the last word at a time counts."""
        if self.levels and self.levels[-1].at == at:
            self.levels.pop()
        self.levels.append(Level(at, running, buffered))

    def batches(self) -> dict[int, list[int]]:
        """Draws by step, ascending."""
        batches: dict[int, list[int]] = {}
        for group in sorted(self.groups, key=lambda group: group.draw):
            if group.step is not None:
                batches.setdefault(group.step, []).append(group.draw)
        return dict(sorted(batches.items()))

    def figures(self) -> Figures:
        trained = [group for group in self.groups if group.step is not None]
        seconds = self.seconds or 1.0
        work = _work_by_age(trained)
        # Groups that took no time count as if all took the same.
        shown = work if any(work.values()) else Counter(age for group in trained for age in group.ages())
        total = sum(shown.values())
        shares = {age: amount / total for age, amount in sorted(shown.items())}
        masked = sum(group.parts[version] for group in trained for version in group.masked)
        pauses, waits = (sum(span.seconds for span in self.spans if span.kind == kind) for kind in ("pause", "wait"))
        # No level changes within a pause but where it begins or ends.
        pauses_began = {span.began for span in self.spans if span.kind == "pause"}
        running_s = buffered_s = 0.0
        for level, following in pairwise([*self.levels, Level(self.seconds, 0, 0)]):
            buffered_s += level.buffered * (following.at - level.at)
            if level.at not in pauses_began:
                running_s += level.running * (following.at - level.at)
        return Figures(
            seconds=self.seconds,
            groups_per_second=len(trained) / seconds,
            steps_per_second=len({group.step for group in trained}) / seconds,
            mean_staleness=sum(age * share for age, share in shares.items()),
            max_staleness=max(shares, default=0),
            staleness=shares,
            masked_share=masked / sum(sum(group.parts.values()) for group in trained) if masked else 0.0,
            trainer_idle=waits / seconds,
            generation_blocked=max(0.0, 1 - pauses / seconds - running_s / (self.max_running * seconds)),
            generation_paused=pauses / seconds,
            buffered=buffered_s / seconds,
        )

    def records(self) -> list[StepRecord]:
        """The timeline of a real run that did the same; groups still under way at the end are not in it."""
        batches, records = self.batches(), list[StepRecord]()
        groups = sorted(self.groups, key=lambda group: group.draw)
        before = -math.inf
        for step, until in sorted(self.ends.items()):
            ended = (group for group in groups if group.ended is not None and before < group.ended <= until)
            records.append(
                StepRecord(
                    step,
                    until,
                    tuple(group.span() for group in ended),
                    tuple(span for span in self.spans if before < span.ended <= until),
                    tuple(level for level in self.levels if before < level.at <= until),
                    (Taken(step, self.taken[step], tuple(batches.get(step, ()))),),
                )
            )
            before = until
        return records

    def metrics(self) -> list[dict[str, float]]:
        """One line for each step, as in metrics.jsonl; the work of a group stands for its tokens."""
        lines: list[dict[str, float]] = []
        for record in self.records():
            ages = _work_by_age(group for group in self.groups if group.step == record.step)
            total = sum(ages.values()) or 1.0
            seconds = {span.kind: span.seconds for span in record.spans}
            line: dict[str, float] = {
                "step": record.step,
                "time/step": sum(length for kind, length in seconds.items() if kind != "pause"),
                "time/wait_rollouts": seconds.get("wait", 0.0),
                "time/sync": seconds.get("publish", 0.0),
                "time/sync_pause": seconds.get("pause", 0.0),
                "staleness/mean": sum(age * work for age, work in ages.items()) / total,
                "staleness/max": max(ages, default=0),
            }
            if record.levels:
                line |= {"async/running": record.levels[-1].running, "async/buffered": record.levels[-1].buffered}
            lines.append(line | {f"staleness/tokens_{age}": work for age, work in sorted(ages.items())})
        return lines


def _work_by_age(trained: Iterable[SimulatedGroup]) -> dict[int, float]:
    amounts: dict[int, float] = defaultdict(float)
    for group in trained:
        for age, work in group.ages().items():
            amounts[age] += work
    return amounts


@dataclass
class _Engine:
    """All groups of an engine get on equally fast, so one number, the work done by each since the beginning, says when
    which of them ends. ends: that number at the end of each group, and its draw."""

    done: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class Engines:
    """Groups go to the engine with the fewest, and get on by how many run there; none does while they are paused."""

    def __init__(self, count: int, speed: Speed) -> None:
        self._engines = [_Engine() for _ in range(count)]
        self._speed = speed
        self._engine_of: dict[int, _Engine] = {}
        self.paused = False

    def start(self, draw: int, work: float) -> None:
        """A group begins."""
        engine = min(self._engines, key=lambda engine: len(engine.ends))
        heappush(engine.ends, (engine.done + work, draw))
        self._engine_of[draw] = engine

    def done(self, draw: int) -> float:
        """Work done by each group of this one's engine; differences of it are what the group got done."""
        return self._engine_of[draw].done

    def until_end(self) -> float:
        """Seconds until the next group ends; infinite when none gets on."""
        return min((self._seconds(engine) for engine in self._engines), default=math.inf)

    def advance(self, seconds: float) -> None:
        """Time passes during which no group ends."""
        for engine in () if self.paused else self._engines:
            if engine.ends:
                # Rounding must not carry an engine beyond the end of its next group.
                engine.done = min(engine.done + seconds * self._speed.at(len(engine.ends)), engine.ends[0][0])

    def end_next(self) -> int:
        """The draw of the next group to end, which has been advanced to and is over now."""
        engine = min(self._engines, key=self._seconds)
        engine.done, draw = heappop(engine.ends)
        return draw

    def _seconds(self, engine: _Engine) -> float:
        if self.paused or not engine.ends:
            return math.inf
        return (engine.ends[0][0] - engine.done) / self._speed.at(len(engine.ends))


@dataclass(frozen=True)
class ModelState:
    """A checkpoint after a step: what the source saves, and the records of finished groups in place of the groups."""

    step: int
    scheduler: Mapping[str, object]
    groups: tuple[SimulatedGroup, ...]


class Model:
    """One asynchronous run; may be stopped after any event, and begun again from `checkpoint`, the newest step's state.

    keep_checkpoints: make these.
    """

    def __init__(self, setup: Setup, state: ModelState | None = None, *, keep_checkpoints: bool = False) -> None:
        self.setup = setup
        self.step = state.step if state else 0
        self.now = 0.0
        self.scheduler = Scheduler(setup.limits)
        self.checkpoint = state
        self._keep_checkpoints = keep_checkpoints
        self._engines = Engines(setup.engines, setup.speed)
        self._run = SimulatedRun(setup.limits.max_running)
        self._open: dict[int, SimulatedGroup] = {}
        self._marks: dict[int, float] = {}
        self._fates: dict[int, Fate] = {}
        self._phase: Literal["wait", "train", "transfer", "pause"] = "wait"
        self._phase_began = self._publish_began = 0.0
        self._phase_ends = math.inf
        if state:
            self.scheduler.load_state_dict(state.scheduler)
            self._run.groups.extend(map(_copy, state.groups))
            self._open = {group.draw: group for group in self._run.groups}
        self._proceed()

    def advance(self) -> bool:
        """Let time pass until the next event, and let that happen. False once the last step is over.

        Raises AssertionError when nothing would ever happen, RunFailedError when a batch cannot be filled.
        """
        if self.is_over():
            return False
        group_s, trainer_s = self._engines.until_end(), max(0.0, self._phase_ends - self.now)
        assert min(group_s, trainer_s) < math.inf, f"deadlock after {self.now:g} s: {self.scheduler}"
        if group_s <= trainer_s:
            self._engines.advance(group_s)
            self.now += group_s
            self._end_attempt(self._engines.end_next())
        else:
            self._engines.advance(trainer_s)
            self.now = self._phase_ends
            self._end_phase()
        self._proceed()
        return True

    def is_over(self) -> bool:
        """Whether the last step has been trained and published."""
        return self.step == self.setup.limits.num_batches

    def result(self) -> SimulatedRun:
        """What has happened so far; in a run that was begun again, since then."""
        self._run.seconds = self.now
        return self._run

    def _proceed(self) -> None:
        """Everything that takes no time."""
        self._admit()
        if self._phase == "wait" and not self.is_over():
            if self.scheduler.next_batch() is not None:
                self._take()
                self._begin("train", self.setup.train_s(self.step + 1))
                self._admit()
            elif self.scheduler.is_exhausted():
                raise RunFailedError(f"Step {self.step + 1} cannot be filled: {self.scheduler}")
        self._run.level(self.now, self.scheduler.num_running, self.scheduler.num_buffered)

    def _admit(self) -> None:
        while self.scheduler.may_admit():
            draw = self.scheduler.draw()
            fate = self.setup.fate(draw)
            if fate.outcome == "unreadable":
                self.scheduler.skip(draw)
                continue
            self.scheduler.admit(draw)
            group = SimulatedGroup(draw, self.scheduler.version, self.now)
            self._run.groups.append(group)
            self._open[draw] = group
            self._start(draw, fate)

    def _start(self, draw: int, fate: Fate) -> None:
        self._fates[draw] = fate
        self._engines.start(draw, fate.work)
        self._marks[draw] = self._engines.done(draw)

    def _end_attempt(self, draw: int) -> None:
        fate, group = self._fates[draw], self._open[draw]
        self._note(draw)
        if fate.retries:
            group.parts.clear()
            self._start(draw, replace(fate, retries=fate.retries - 1))
            return
        if not group.parts:
            group.parts[self.scheduler.version] = 0.0
        state = STATES[fate.outcome]
        group.ended, group.state = self.now, STATE_NAMES[state]
        del self._marks[draw], self._fates[draw]
        self.scheduler.end(draw, state)
        if state not in (State.BUFFERED, State.FILTERED):
            del self._open[draw]

    def _note(self, draw: int) -> None:
        """What this group got done since the last note was with the weights that are published now."""
        done = self._engines.done(draw)
        if done > self._marks[draw]:
            parts, version = self._open[draw].parts, self.scheduler.version
            parts[version] = parts.get(version, 0.0) + done - self._marks[draw]
        self._marks[draw] = done

    def _take(self) -> None:
        unused = {*self.scheduler.filtered}
        limits, step = self.setup.limits, self.step + 1
        for draw in self.scheduler.take():
            unused.discard(draw)
            group = self._open.pop(draw)
            group.step, group.state = step, "buffered"
            if limits.at_bound == "mask":
                group.masked = tuple(
                    version for version in group.parts if staleness_of(step, version) > limits.max_staleness
                )
        for draw in unused:
            del self._open[draw]
        self._run.taken[step] = self.now

    def _begin(self, phase: Literal["wait", "train", "transfer", "pause"], seconds: float) -> None:
        """The trainer's next phase; `wait` ends when a batch is there. Weights are published from the first tensor on
        its way to the moment that engines go on."""
        if self._phase != "transfer":
            self._run.spend(self._phase, self._phase_began, self.now)
        if self._phase == "pause":
            self._run.spend("publish", self._publish_began, self.now)
        if phase == "transfer":
            self._publish_began = self.now
        self._phase, self._phase_began, self._phase_ends = phase, self.now, self.now + seconds
        self._engines.paused = phase == "pause"

    def _end_phase(self) -> None:
        setup = self.setup
        if self._phase == "train" and (self.step + 1) % setup.publish_every == 0:
            self._begin("transfer", setup.transfer_s)
        elif self._phase == "transfer":
            self._begin("pause", setup.pause_s)
        else:
            if self._phase == "pause":
                for draw in self._marks:
                    self._note(draw)
                self.scheduler.publish(self.step + 1)
            self._begin("wait", math.inf)
            self.step += 1
            self._run.ends[self.step] = self.now
            if self._keep_checkpoints:
                kept = tuple(_copy(self._open[draw]) for draw in sorted(self._open.keys() - self._marks.keys()))
                self.checkpoint = ModelState(self.step, self.scheduler.state_dict(), kept)


def _copy(group: SimulatedGroup) -> SimulatedGroup:
    return replace(group, parts=dict(group.parts))
