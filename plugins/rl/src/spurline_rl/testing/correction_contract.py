"""Check that a correction keeps its contract."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.layout import Segment, lay_out
from spurline.testing.samples import PAD
from spurline_rl.losses.corrections import compare
from spurline_rl.losses.log_ratios import LogRatios
from spurline_rl.protocols.correction import Correction

_LENGTHS = (5, 9, 4, 7, 3)


class CorrectionContract:
    """A test suite: define `make_correction()` in a subclass. Trainer/engine ratios per token are about 1/20 to 20."""

    def make_correction(self) -> Correction:
        raise NotImplementedError("subclass CorrectionContract with make_correction(self)")

    def batch(self, rows: tuple[tuple[int, ...], ...], seed: int = 0, spread: float = 1.0) -> TrainingBatch:
        """Return a batch whose rows contain the sequences with these numbers. There are five sequences, 0 to 4.

        `spread` is the standard deviation of the log ratios.
        """
        generator = torch.Generator().manual_seed(seed)
        sequences: list[Segment] = []
        for number, length in enumerate(_LENGTHS):
            old = -3 * torch.rand(length, generator=generator)
            rollout = old + spread * torch.randn(length, generator=generator)
            trained = (torch.rand(length, generator=generator) < 0.7).float().numpy()
            extra = {"old_logprobs": old.numpy(), "rollout_logprobs": rollout.numpy()}
            extra["advantages"] = np.full(length, 1 - number % 3, np.float32)
            sequences.append(Segment(np.ones(length, np.int32), trained, 0, f"prompt-{number}", extra=extra))
        laid_out: list[list[Segment]] = []
        for members in rows:
            starts = accumulate((_LENGTHS[number] for number in members[:-1]), initial=0)
            laid_out.append(
                [replace(sequences[number], start=start) for number, start in zip(members, starts, strict=True)]
            )
        return lay_out(laid_out, max(sum(_LENGTHS[number] for number in members) for members in rows), PAD)

    def _factors(self, batch: TrainingBatch) -> Tensor:
        return compare(batch, self.make_correction())[0].tokens["correction_factors"]

    def test_it_describes_itself_and_gives_each_token_a_finite_factor_without_gradient(self) -> None:
        correction, ratios = self.make_correction(), LogRatios(self.batch(((0, 1), (2, 3, 4))))
        assert len(correction.describe().split()) >= 3
        _check(correction, ratios)

    def test_packed_rows_get_what_each_sequence_gets_alone(self) -> None:
        packed_rows = ((3, 0), (1, 4, 2))
        packed = self.batch(packed_rows)
        factors = self._factors(packed)
        for row, members in enumerate(packed_rows):
            for segment, number in enumerate(members, start=1):
                alone = self._factors(self.batch(((number,),)))
                torch.testing.assert_close(
                    factors[row][packed.tokens["segment_ids"][row] == segment], alone[0], rtol=1e-6, atol=0
                )

    def test_nothing_is_corrected_where_trainer_and_engine_agree_and_a_huge_difference_does_not_overflow(self) -> None:
        factors = self._factors(self.batch(((0, 1), (2, 3, 4)), spread=0.0))
        assert bool((factors == 1).all())
        factors = self._factors(self.batch(((0, 1), (2, 3, 4)), spread=1e4))
        assert bool(torch.isfinite(factors).all())

    def test_a_batch_without_loss_tokens_works(self) -> None:
        batch = self.batch(((0, 1),))
        empty = batch.with_tokens(loss_weights=torch.zeros_like(batch.tokens["loss_weights"]))
        _check(self.make_correction(), LogRatios(empty))
        assert bool((self._factors(empty) == 1).all())


def _check(correction: Correction, ratios: LogRatios) -> None:
    """Check that each token has a finite, non-negative factor and a finite value of each metric."""
    corrected = correction.correct(ratios)
    assert not corrected.factors.requires_grad
    assert bool((corrected.factors >= 0).all())
    for values in (corrected.factors, *corrected.metrics.values()):
        assert values.shape == ratios.values.shape
        assert bool(torch.isfinite(values.float()).all())
