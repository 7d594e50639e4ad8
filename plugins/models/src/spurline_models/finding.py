"""A line of `spurline doctor`, for what makes one and for what shows it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of `spurline doctor`.

    what: what was looked at, in a few words. value: what was found there. fix: what to do; empty when all is well.
    """

    what: str
    value: str
    fix: str = ""
