"""Hooks that are called only in runs with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.plugins.hookspecs import hookspec

if TYPE_CHECKING:
    from spurline_rl.protocols.weight_sync import SyncReport
    from spurline_rl.trajectory import Group


@hookspec
def on_rollouts_scored(step: int, groups: tuple[Group, ...]) -> None:
    """Called when the groups of an RL step have rewards, before advantages are computed.

    step: the step that trains on the groups. groups: read-only, in training order.
    Errors: any exception ends the run; the last checkpoint remains.
    """


@hookspec
def on_weights_synced(step: int, report: SyncReport) -> None:
    """Called after new weights reached every rollout engine.

    step: the step whose update made the weights. report: version, bytes sent, seconds of transfer and pause.
    Errors: any exception ends the run; the last checkpoint remains.
    """
