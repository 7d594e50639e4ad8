"""The hook that this plugin opens for others."""

from __future__ import annotations

from spurline.plugins import hookspec


@hookspec
def on_slow_step(step: int, seconds: float) -> None:
    """Called after a step that took much longer than usual.

    step: 1-based. seconds: that it took, evaluation left out.
    Errors: any exception ends the run; the last checkpoint stands.
    """
