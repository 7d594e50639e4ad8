"""The whole asynchronous run on a virtual clock: the real scheduler, with engines and trainer made of times.

Place on the way: limits, distributions -> this -> what the run did. An event is the end of a group or of what the
trainer does; after each, every group that may start does, and the trainer takes the next batch if it waits for one.
Nothing here is random and no time passes: the same setup gives the same run, in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spurline.errors import RunFailedError
from spurline_async_rl.scheduling.scheduler import Scheduler, State
from spurline_async_rl.simulation.engines import Engines
from spurline_async_rl.simulation.records import GroupRecord, Level, Phase, SimulatedRun, Span
from spurline_async_rl.simulation.setup import STATES, Fate, Outcome, Setup
from spurline_async_rl.timeline.records import STATE_NAMES


@dataclass(frozen=True)
class ModelState:
    """A checkpoint after a step: what the source saves, and the records of finished groups in place of the groups."""

    step: int
    scheduler: Mapping[str, object]
    groups: tuple[GroupRecord, ...]


def simulate(setup: Setup) -> SimulatedRun:
    """The run from its first draw to its last step."""
    model = Model(setup)
    while model.advance():
        pass
    return model.result()


class Model:
    """One run; may be stopped after any event, and begun again from `checkpoint`, the state after the newest step.

    keep_checkpoints: make these. make_scheduler: for tests of what a broken one would do.
    """

    def __init__(
        self,
        setup: Setup,
        state: ModelState | None = None,
        *,
        keep_checkpoints: bool = False,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
    ) -> None:
        self.setup = setup
        self.step = state.step if state else 0
        self.now = 0.0
        self.scheduler = make_scheduler(setup.limits)
        self.checkpoint = state
        self._keep_checkpoints = keep_checkpoints
        self._engines = Engines(setup.engines, setup.speed)
        self._records: list[GroupRecord] = []
        self._open: dict[int, GroupRecord] = {}
        self._marks: dict[int, float] = {}
        self._fates: dict[int, Fate] = {}
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._phase: Phase = "wait"
        self._phase_begin = 0.0
        self._phase_end = math.inf
        if state:
            self._restore(state)
        self._proceed()

    def advance(self) -> bool:
        """Let time pass until the next event, and let that happen. False once the last step is over.

        Raises AssertionError when nothing would ever happen, RunFailedError when a batch cannot be filled.
        """
        if self.is_over():
            return False
        group_s, trainer_s = self._engines.until_end(), max(0.0, self._phase_end - self.now)
        assert min(group_s, trainer_s) < math.inf, f"deadlock after {self.now:g} s: {self.scheduler}"
        if group_s <= trainer_s:
            self._engines.advance(group_s)
            self.now += group_s
            self._end_attempt(self._engines.end_next())
        else:
            self._engines.advance(trainer_s)
            self.now = self._phase_end
            self._end_phase()
        self._proceed()
        return True

    def is_over(self) -> bool:
        """Whether the last step has been trained and published."""
        return self.step == self.setup.limits.num_batches

    def result(self) -> SimulatedRun:
        """What has happened so far; in a run that was begun again, since then."""
        return SimulatedRun(self._records, self._spans, self._levels, self.now, self.setup.limits.max_running)

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
        level = Level(self.now, self.scheduler.num_running, self.scheduler.num_buffered)
        if self._levels and self._levels[-1].time == level.time:
            self._levels.pop()
        self._levels.append(level)

    def _admit(self) -> None:
        while self.scheduler.may_admit():
            draw = self.scheduler.draw()
            fate = self.setup.fate(draw)
            if fate.outcome == "unreadable":
                self.scheduler.skip(draw)
                continue
            self.scheduler.admit(draw)
            engine = self._engines.start(draw, fate.work)
            group = GroupRecord(draw, engine, self.scheduler.version, self.now)
            self._records.append(group)
            self._open[draw] = group
            self._marks[draw] = self._engines.done(draw)
            self._fates[draw] = fate

    def _end_attempt(self, draw: int) -> None:
        fate = self._fates[draw]
        self._note(draw)
        self._engines.forget(draw)
        if fate.retries == 0:
            self._end_group(draw, fate.outcome)
            return
        self._fates[draw] = replace(fate, retries=fate.retries - 1)
        group = self._open[draw]
        group.parts.clear()
        group.engine = self._engines.start(draw, fate.work)
        self._marks[draw] = self._engines.done(draw)

    def _end_group(self, draw: int, outcome: Outcome) -> None:
        group, state = self._open[draw], STATES[outcome]
        if not group.parts:
            group.parts[self.scheduler.version] = 0.0
        group.end, group.state = self.now, STATE_NAMES[state]
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
        limits, batch = self.setup.limits, self.step
        for draw in self.scheduler.take():
            unused.discard(draw)
            group = self._open.pop(draw)
            group.step, group.state = batch + 1, "trained"
            if limits.at_bound == "mask":
                group.masked = tuple(version for version in group.parts if batch - version > limits.max_staleness)
        for draw in unused:
            del self._open[draw]

    def _begin(self, phase: Phase, seconds: float) -> None:
        """The trainer's next phase; `wait` ends when a batch is there."""
        if self.now > self._phase_begin:
            self._spans.append(Span(self._phase, self.step + 1, self._phase_begin, self.now))
        self._phase, self._phase_begin, self._phase_end = phase, self.now, self.now + seconds
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
            if self._keep_checkpoints:
                self.checkpoint = self._state()

    def _state(self) -> ModelState:
        kept = sorted(self._open.keys() - self._marks.keys())
        groups = tuple(_copy(self._open[draw]) for draw in kept)
        return ModelState(self.step, self.scheduler.state_dict(), groups)

    def _restore(self, state: ModelState) -> None:
        self.scheduler.load_state_dict(state.scheduler)
        groups = [_copy(group) for group in state.groups]
        self._records.extend(groups)
        self._open = {group.draw: group for group in groups}


def _copy(group: GroupRecord) -> GroupRecord:
    return replace(group, parts=dict(group.parts))
