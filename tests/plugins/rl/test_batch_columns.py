"""Columns of batches of rollouts."""

from __future__ import annotations

from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.rollouts_collator import RolloutsCollator
from spurline_rl.testing.inputs import make_trajectories


def test_optional_columns_are_there_only_when_every_turn_has_them() -> None:
    collator = RolloutsCollator(RolloutsCollatorConfig(), PAD, ParallelLayout())
    both = make_trajectories([[(3, 4)], [(2, 5)]], optional_columns=True)
    mixed = [both[0], *make_trajectories([[(2, 5)]], optional_columns=False)]
    assert "advantages" in collator.collate_rollouts(both).tokens
    assert "advantages" not in collator.collate_rollouts(mixed).tokens
