"""Check that mini-batch cutters keep their contract."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.minibatches import MiniBatches
from spurline.testing.fuzzing import fuzzing
from spurline.testing.samples import PAD, check_batch, make_view


class MiniBatchesContract:
    """A suite of tests for mini-batch cutters. Write a subclass with `make_minibatches(layout)`.

    The cutter must accept a batch with any number of prompts, each with one row.
    """

    def make_minibatches(self, layout: ParallelLayout) -> MiniBatches:
        """Return your mini-batch cutter."""
        raise NotImplementedError("subclass MiniBatchesContract with make_minibatches(self, layout)")

    @given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), ranks=st.integers(1, 5))
    @fuzzing(30)
    def test_cutting_keeps_every_row_once_and_pads_to_the_ranks(self, lengths: list[int], ranks: int) -> None:
        batch = PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout()).collate(make_view(lengths), training=True)
        minibatches = self.make_minibatches(ParallelLayout(data=ranks))
        parts = minibatches.cut(batch)
        assert len(parts) == minibatches.steps_per_batch() == self.make_minibatches(ParallelLayout()).steps_per_batch()
        assert all(part.num_rows % ranks == 0 for part in parts)
        for part in parts:
            check_batch(part)
        real = [uid for part in parts for uid in part.without_padding_rows().segments["uid"].values.tolist()]
        assert sorted(real) == sorted(batch.segments["uid"].values.tolist())
