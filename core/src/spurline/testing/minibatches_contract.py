"""What every mini-batch cutter must satisfy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.builtin.configs import PaddedCollatorConfig
from spurline.builtin.padded_collator import PaddedCollator
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.minibatches import MiniBatches
from spurline.testing.data import PAD, make_view
from spurline.testing.fuzzing import fuzzing


class MiniBatchesContract:
    """Subclass with `make_minibatches(layout)`; it must accept a batch of any number of one-row prompts."""

    def make_minibatches(self, layout: ParallelLayout) -> MiniBatches:
        """Your mini-batches."""
        raise NotImplementedError("subclass MiniBatchesContract with make_minibatches(self, layout)")

    @given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), ranks=st.integers(1, 5))
    @fuzzing(30)
    def test_cutting_keeps_every_row_once_and_pads_to_the_ranks(self, lengths: list[int], ranks: int) -> None:
        batch = PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout()).collate(make_view(lengths), training=True)
        minibatches = self.make_minibatches(ParallelLayout(data=ranks))
        parts = minibatches.cut(batch)
        assert len(parts) == minibatches.steps_per_batch()
        assert all(part.num_rows % ranks == 0 for part in parts)
        for part in parts:
            part.check()
        real = [uid for part in parts for uid in part.without_padding_rows().segments["uid"].values.tolist()]
        assert sorted(real) == sorted(batch.segments["uid"].values.tolist())

    def test_number_of_steps_is_known_before_any_batch(self) -> None:
        assert self.make_minibatches(ParallelLayout()).steps_per_batch() == pytest.approx(
            int(self.make_minibatches(ParallelLayout(data=3)).steps_per_batch())
        )
