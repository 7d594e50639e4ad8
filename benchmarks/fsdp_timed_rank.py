"""Run a rank of the FSDP backend that reports its times of computing and of collectives; for `fsdp.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile

from spurline_fsdp_backend.rank import FsdpRank
from spurline_models.dealing import RankShare

_COLLECTIVE = "gloo:"
"""The prefix of the names of gloo's collectives in a profile."""


class TimedRank(FsdpRank):
    def take(self, wire: Mapping[str, Any]) -> None:
        """Take the rows and do nothing."""
        RankShare.from_wire(wire)

    def timed_update(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> float:
        """Update the policy, and return the processor time of all threads of this rank in seconds."""
        started = time.process_time()
        self.update(wire, objective, "policy")
        return time.process_time() - started

    def profiled_update(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, Any]:
        """Update the policy, and return its seconds, and the seconds of each collective in the order of their start."""
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
