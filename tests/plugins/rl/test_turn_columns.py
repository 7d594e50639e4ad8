"""Values go from turns to the batch and back, whether turns have rows of their own or share one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.preparation import TurnColumns
from spurline_rl.rollouts_collator import RolloutsCollator
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Trajectory, Turn, merge_turns


@st.composite
def conversations(draw: st.DrawFn) -> list[Trajectory]:
    """Attempts whose turns go on from each other, so that they can be merged."""
    attempts: list[Trajectory] = []
    for sample in range(draw(st.integers(1, 4))):
        context = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        turns: list[Turn] = []
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
            turns.append(Turn(context, response, [1] * len(response)))
            context = [*context, *response, *draw(st.lists(st.integers(0, 99), max_size=3))]
        attempts.append(Trajectory("p", sample, tuple(turns)))
    return attempts


_IDS = ("prompt_ids", "response_ids")


@given(
    attempts=conversations(), merged=st.booleans(), ranks=st.integers(1, 3), pad_side=st.sampled_from(["left", "right"])
)
def test_what_is_written_for_a_turn_is_read_back_for_it_at_its_own_tokens(attempts, merged, ranks, pad_side):
    kept = [merge_turns(attempt) for attempt in attempts] if merged else attempts
    turns = [turn for attempt in attempts for turn in attempt.turns]
    numbers = iter(range(len(turns)))
    rows = [number if merged else next(numbers) for number, attempt in enumerate(attempts) for _ in attempt.turns]
    collator = RolloutsCollator(RolloutsCollatorConfig(pad_side=pad_side), 0, ParallelLayout(data=ranks))
    batch = collator.collate_rollouts(kept).without_padding_rows()
    num_prompt, num_response = (np.array([len(getattr(turn, name)) for turn in turns]) for name in _IDS)
    columns = TurnColumns(batch, num_prompt, num_response, np.array(rows))
    written = [np.arange(1, len(turn.response_ids) + 1, dtype=np.float32) + 100 * i for i, turn in enumerate(turns)]
    column = columns.join("advantages", written)
    for found, expected in zip(columns.split(column), written, strict=True):
        np.testing.assert_array_equal(found, expected)
    for tokens, turn in zip(columns.split(batch.tokens["input_ids"].float()), turns, strict=True):
        np.testing.assert_array_equal(tokens, turn.response_ids)
    assert torch.equal(column != 0, batch.tokens["loss_weights"] != 0), "exactly the response tokens are written"


def test_optional_columns_are_there_only_when_every_turn_has_them() -> None:
    collator = RolloutsCollator(RolloutsCollatorConfig(), PAD, ParallelLayout())
    both = make_trajectories([[(3, 4)], [(2, 5)]], optional_columns=True)
    mixed = [both[0], *make_trajectories([[(2, 5)]], optional_columns=False)]
    assert "advantages" in collator.collate_rollouts(both).tokens
    assert "advantages" not in collator.collate_rollouts(mixed).tokens
