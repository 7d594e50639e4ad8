"""What is simulated: limits, what becomes of each prompt, and how long everything takes.

Place on the way: given figures, or those of a previous run -> this -> the asynchronous or the synchronous model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from spurline_async_rl.scheduling.scheduler import SchedulerLimits, State
from spurline_async_rl.simulation.engines import WORK_IN_SECONDS, Speed

Outcome = Literal["kept", "filtered", "quarantined", "skipped", "unreadable"]
"""filtered: its rewards are equal and it makes way for another. skipped: its row is found unusable by an attempt;
unreadable: when it is drawn."""

STATES: Mapping[Outcome, State] = {
    "kept": State.BUFFERED,
    "filtered": State.FILTERED,
    "quarantined": State.GIVEN_UP,
    "skipped": State.SKIPPED,
}
"""Where the scheduler has prompts of each outcome when their attempts are over."""


@dataclass(frozen=True)
class Fate:
    """What becomes of a drawn prompt. work: of one attempt, in the unit of the engines' speed. retries: attempts of as
    much work that fail before."""

    work: float
    outcome: Outcome = "kept"
    retries: int = 0


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    fate: by draw. train_s: by 1-based step. engines, speed: what generates. After every `publish_every` steps weights
    are published: `transfer_s` while engines go on, then `pause_s` during which they stand still; the trainer waits for
    both.
    """

    limits: SchedulerLimits
    fate: Callable[[int], Fate]
    train_s: Callable[[int], float]
    engines: int = 1
    speed: Speed = WORK_IN_SECONDS
    publish_every: int = 1
    transfer_s: float = 0.0
    pause_s: float = 0.0
