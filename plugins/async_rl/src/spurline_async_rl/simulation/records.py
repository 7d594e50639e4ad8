"""What a simulated run did, and the figures it comes down to.

Place on the way: model -> this -> tables, timelines, recommendations. Plain data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Phase = Literal["wait", "train", "transfer", "pause"]
"""Of the trainer. transfer: weights are on their way while engines go on; pause: engines stand still."""


@dataclass
class GroupRecord:
    """One admitted group. Times in seconds; `end` and `step` are None until there is one.

    engine: number of the one that ran it last. version: when it was admitted. state: as the ledger calls it; a trained
    one has its 1-based `step`. parts: work done with each version of the weights, of the attempt that counts.
    masked: versions whose tokens were too old for the batch and have no loss.
    """

    draw: int
    engine: int
    version: int
    begin: float
    end: float | None = None
    state: str = "running"
    step: int | None = None
    parts: dict[int, float] = field(default_factory=dict[int, float])
    masked: tuple[int, ...] = ()

    def ages(self) -> dict[int, float]:
        """Work by staleness in the batch it was trained in."""
        assert self.step is not None, self
        return {self.step - 1 - version: work for version, work in self.parts.items()}


@dataclass(frozen=True)
class Span:
    """What the trainer did from `begin` to `end`, for the 1-based step."""

    phase: Phase
    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class Level:
    """Groups running and buffered from this time on."""

    time: float
    running: int
    buffered: int


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


@dataclass(frozen=True)
class SimulatedRun:
    """groups: in the order of their admission. spans, levels: in time. max_running: places for running groups."""

    groups: Sequence[GroupRecord]
    spans: Sequence[Span]
    levels: Sequence[Level]
    seconds: float
    max_running: int

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
        shares = _shares(trained)
        work = sum(sum(group.parts.values()) for group in trained)
        masked = sum(group.parts[version] for group in trained for version in group.masked)
        pauses = sum(span.end - span.begin for span in self.spans if span.phase == "pause")
        waits = sum(span.end - span.begin for span in self.spans if span.phase == "wait")
        running, buffered = self._areas()
        return Figures(
            seconds=self.seconds,
            groups_per_second=len(trained) / seconds,
            steps_per_second=len({group.step for group in trained}) / seconds,
            mean_staleness=sum(age * share for age, share in shares.items()),
            max_staleness=max(shares, default=0),
            staleness=shares,
            masked_share=masked / work if work else 0.0,
            trainer_idle=waits / seconds,
            generation_blocked=max(0.0, 1 - pauses / seconds - running / (self.max_running * seconds)),
            generation_paused=pauses / seconds,
            buffered=buffered / seconds,
        )

    def _areas(self) -> tuple[float, float]:
        """Seconds times groups running, pauses left out, and buffered."""
        pauses = [span for span in self.spans if span.phase == "pause"]
        running = buffered = 0.0
        place = 0
        for level, following in pairwise([*self.levels, Level(self.seconds, 0, 0)]):
            begin, end = level.time, following.time
            buffered += level.buffered * (end - begin)
            while place < len(pauses) and pauses[place].end <= begin:
                place += 1
            # No level changes within a pause but where it begins or ends.
            paused = place < len(pauses) and pauses[place].begin <= begin < pauses[place].end
            running += 0.0 if paused else level.running * (end - begin)
        return running, buffered


def _shares(trained: Sequence[GroupRecord]) -> dict[int, float]:
    """Share of the work by age; groups that took none count as if all took the same."""
    by_age: Counter[int] = Counter()
    weightless = not any(sum(group.parts.values()) for group in trained)
    amounts: dict[int, float] = {}
    for group in trained:
        for age, work in group.ages().items():
            amounts[age] = amounts.get(age, 0.0) + (1.0 if weightless else work)
            by_age[age] += 1
    total = sum(amounts.values())
    return {age: amounts[age] / total for age in sorted(by_age)}
