"""Where the groups that a run trained on are kept, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spurline.component_state import write_state
from spurline.rl.trajectory import Group
from spurline_async_rl.rollouts.group_records import groups_state


def recorded_step(run_dir: Path, step: int) -> Path:
    """Path of a step's groups, without the suffixes of component state."""
    return run_dir / "groups" / f"step-{step:06d}"


def record_groups(run_dir: Path, step: int, groups: Sequence[Group]) -> None:
    """Keep the groups of a step; those of a step that is trained again after a crash replace the earlier ones."""
    write_state(recorded_step(run_dir, step), groups_state(groups))
