"""The synchronous source on the same virtual clock, for comparison: draw, run, draw what is missing, train, repeat.

Place on the way: setup -> this -> what the run did. The rounds are those of core's `collect_groups`; of the limits only
batch size, places for running groups, draws and steps matter here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from spurline.errors import RunFailedError
from spurline_async_rl.simulation.engines import Engines
from spurline_async_rl.simulation.records import GroupRecord, Level, Phase, SimulatedRun, Span
from spurline_async_rl.simulation.setup import STATES, Setup
from spurline_async_rl.timeline.records import STATE_NAMES


def simulate_synchronous(setup: Setup) -> SimulatedRun:
    """The run from its first draw to its last step. Raises RunFailedError when a batch cannot be filled."""
    run = _SynchronousRun(setup)
    for step in range(1, setup.limits.num_batches + 1):
        run.collect(step)
        run.spend("train", step, setup.train_s(step))
        if step % setup.publish_every == 0:
            run.spend("transfer", step, setup.transfer_s)
            run.spend("pause", step, setup.pause_s)
    return SimulatedRun(run.records, run.spans, run.levels, run.now, setup.limits.max_running)


class _SynchronousRun:
    def __init__(self, setup: Setup) -> None:
        self.now = 0.0
        self.records: list[GroupRecord] = []
        self.spans: list[Span] = []
        self.levels: list[Level] = []
        self._setup = setup
        self._engines = Engines(setup.engines, setup.speed)
        self._num_drawn = 0

    def spend(self, phase: Phase, step: int, seconds: float) -> None:
        """Time during which nothing is generated."""
        if seconds > 0:
            self.spans.append(Span(phase, step, self.now, self.now + seconds))
        self.now += seconds

    def collect(self, step: int) -> None:
        """Run groups, in rounds of as many as are missing, until there are enough for a batch."""
        begin, limits = self.now, self._setup.limits
        kept: list[GroupRecord] = []
        filtered: list[GroupRecord] = []
        tried = 0
        while missing := min(limits.batch_size - len(kept), limits.draw_limit - tried):
            round_ = self._run(self._draw(missing), step - 1)
            tried += sum(group.state != "skipped" for group in round_)
            kept += [group for group in round_ if group.state == "buffered"]
            filtered += [group for group in round_ if group.state == "filtered"]
        fillers = filtered[: limits.batch_size - len(kept)]
        if len(kept) + len(fillers) < limits.batch_size:
            raise RunFailedError(f"Step {step} drew {tried} prompts and cannot be filled with them.")
        for group in [*kept, *fillers]:
            group.step, group.state = step, "trained"
        if self.now > begin:
            self.spans.append(Span("wait", step, begin, self.now))
        self._note_level(0, 0)

    def _draw(self, count: int) -> list[int]:
        """Draws that can be read, of the next `count`."""
        draws = range(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        return [draw for draw in draws if self._setup.fate(draw).outcome != "unreadable"]

    def _run(self, draws: Sequence[int], version: int) -> list[GroupRecord]:
        """Run all of these, as many at a time as there are places; in draw order."""
        waiting, running = deque(draws), dict[int, GroupRecord]()
        groups: list[GroupRecord] = []
        while waiting or running:
            while waiting and len(running) < self._setup.limits.max_running:
                draw = waiting.popleft()
                fate = self._setup.fate(draw)
                work = fate.work * (1 + fate.retries)
                group = GroupRecord(draw, self._engines.start(draw, work), version, self.now)
                group.parts[version] = fate.work
                running[draw] = group
                groups.append(group)
            self._note_level(len(running), len(groups) - len(running))
            seconds = self._engines.until_end()
            self._engines.advance(seconds)
            self.now += seconds
            draw = self._engines.end_next()
            self._engines.forget(draw)
            group = running.pop(draw)
            group.end, group.state = self.now, STATE_NAMES[STATES[self._setup.fate(draw).outcome]]
        self.records += groups
        return groups

    def _note_level(self, running: int, buffered: int) -> None:
        self.levels.append(Level(self.now, running, buffered))
