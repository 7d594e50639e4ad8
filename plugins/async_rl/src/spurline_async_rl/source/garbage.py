"""Keep the garbage collector from stopping a run that has tens of thousands of attempts under way.

Reference counts free nearly everything at once; the collector is there for objects that refer to each other in a cycle.
To find them it visits every object, while all threads stand still: more than a second for 65,536 attempts under way,
as often as their number has grown by a quarter. Hardly any of them is in a cycle, so it is told to leave alone what has
got old (`gc.freeze`), and everything only comes under its eyes again when memory has grown.
"""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable

THRESHOLDS = 4_000, 5, 1_000_000
"""Of `gc.set_threshold` in a run. Young objects are visited when 4,000 more have been made than freed, which in a
steady run takes several times as many, and every sixth time also those that have survived it: up to 100 ms. The old
ones are never visited without asking."""
WORTHWHILE_ATTEMPTS = 2048
"""Under way at a time. A full collection comes by itself when objects have grown by a quarter, which fewer never do."""
_GROWTH = 1.5
"""Of the peak of this process's memory since the last full collection, at which the next one is due."""


def _peak_memory() -> int:
    """The most memory that this process has had, in a unit that depends on the platform."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _Process:
    """What all runs of this process have in common: the collector has one set of thresholds, and one `freeze`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_quiet = 0
        self.before = gc.get_threshold()
        self.freezes = False


_PROCESS = _Process()


class QuietCollector:
    """Rare collections from `quiet` to `restore`; between steps, `tidy`. May be called on any thread.

    With several in one process the last one to end restores what was there before the first. Where the collector is
    off, or somebody else has frozen objects, which cannot be told from ours, nothing is frozen; where it is off nothing
    is changed at all.

    settles_after: steps in which memory grows because more is kept, which says nothing of garbage. is_rare: whether old
    objects are left alone; otherwise only those that are there when it begins, imported modules above all, without
    which a full collection is short. peak_memory: of this process, in any unit.
    """

    def __init__(
        self, settles_after: int, *, is_rare: bool = True, peak_memory: Callable[[], int] = _peak_memory
    ) -> None:
        self._settles_after = settles_after
        self._is_rare = is_rare
        self._peak_memory = peak_memory
        self._is_quiet = False
        self._steps = 0
        self._level = 0

    def quiet(self) -> None:
        """Collect once, and then only what is young, or new."""
        with _PROCESS.lock:
            if self._is_quiet or not gc.isenabled():
                return
            self._is_quiet = True
            _PROCESS.num_quiet += 1
            if _PROCESS.num_quiet > 1:
                return
            _PROCESS.before = gc.get_threshold()
            _PROCESS.freezes = gc.get_freeze_count() == 0
            if _PROCESS.freezes:
                if self._is_rare:
                    gc.set_threshold(*THRESHOLDS)
                gc.collect()
                gc.freeze()
            elif self._is_rare:
                # Old objects have to be visited now and then, as Python would.
                gc.set_threshold(*THRESHOLDS[:2], _PROCESS.before[2])

    def tidy(self) -> None:
        """Leave what is old by now alone, or collect everything where memory has grown by half; between two steps."""
        with _PROCESS.lock:
            if not (self._is_quiet and self._is_rare and _PROCESS.freezes):
                return
            self._steps += 1
            peak = self._peak_memory()
            if self._steps <= self._settles_after:
                self._level = peak
            if peak > _GROWTH * self._level:
                # Cycles of objects, too, that were frozen while they were in use.
                gc.unfreeze()
                gc.collect()
                self._level = peak
            else:
                # What is frozen is not collected any more, so that it should be no garbage.
                gc.collect(1)
            gc.freeze()

    def restore(self) -> None:
        """The collector is as it was before `quiet`; without that, and the second time, nothing happens."""
        with _PROCESS.lock:
            if not self._is_quiet:
                return
            self._is_quiet = False
            _PROCESS.num_quiet -= 1
            if _PROCESS.num_quiet:
                return
            if gc.get_threshold()[:2] == THRESHOLDS[:2]:
                gc.set_threshold(*_PROCESS.before)
            if _PROCESS.freezes:
                gc.unfreeze()
