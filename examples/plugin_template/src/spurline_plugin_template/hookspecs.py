"""Declare the hook that other plugins can implement."""

from __future__ import annotations

from spurline.plugins import hookspec


@hookspec
def on_slow_step(step: int, seconds: float) -> None:
    """Called after a step that took much longer than usual.

    Any exception ends the run. The last checkpoint remains.

    Args:
        step: Number of the step, from 1.
        seconds: Duration of the step, without evaluation.
    """
