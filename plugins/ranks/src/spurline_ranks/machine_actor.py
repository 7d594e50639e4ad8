"""A Ray actor on each machine of a cluster. It starts the machine's ranks, or answers questions about the machine.

This module imports no torch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

from spurline_ranks.group import MachineOrder
from spurline_ranks.outcomes import Died, outcome_of
from spurline_ranks.processes import LocalRanks


class MachineActor:
    """The actor of one machine. Its methods are called through Ray, and may overlap. They return packed outcomes."""

    def __init__(self) -> None:
        # A job scheduler sends these signals to all processes of a job. Only the controller handles them.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def run(self, function: str, *arguments: Any) -> bytes:
        """Call `module:function`."""
        return outcome_of(resolve_name(function), *arguments)

    def start(self, order: MachineOrder) -> bytes:
        """Start the machine's ranks. The outcome is `LocalRanks.identities`."""
        return outcome_of(self._start, order)

    def ask(self, method: str, *arguments: Any) -> bytes:
        """Call a method of `LocalRanks`."""
        return outcome_of(attrgetter(method)(self._ranks), *arguments)

    def wait(self) -> Mapping[int, bytes | Died]:
        """Return the next outcome of a rank. See `LocalRanks.wait`."""
        return self._ranks.wait()

    def _start(self, order: MachineOrder) -> Any:
        self._ranks = LocalRanks(order)
        return self._ranks.identities
