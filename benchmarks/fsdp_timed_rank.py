"""Run a rank of the FSDP backend that reports its times of computing and of collectives; for `fsdp.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile

from spurline_fsdp_backend.rank import FsdpRank
from spurline_models.dealing import RankShare

_COLLECTIVE = "gloo:"
"""What the names of gloo's collectives begin with in a profile."""


class TimedRank(FsdpRank):
    def take(self, wire: Mapping[str, Any]) -> None:
        """Nothing but be told."""
        RankShare.from_wire(wire)

    def timed_update(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> float:
        """An update of the policy; returns the processor time of all threads of this rank, in seconds."""
        started = time.process_time()
        self.update(wire, objective, "policy")
        return time.process_time() - started

    def profiled_update(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, Any]:
        """The same; returns its seconds, and those of each collective in the order in which they began."""
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            started = time.perf_counter()
            self.update(wire, objective, "policy")
            seconds = time.perf_counter() - started
        collectives = [event for event in profiled.events() or () if event.name.startswith(_COLLECTIVE)]
        collectives.sort(key=lambda event: event.time_range.start)
        return {
            "seconds": seconds,
            "collectives": [(event.name, event.time_range.elapsed_us() / 1e6) for event in collectives],
        }
