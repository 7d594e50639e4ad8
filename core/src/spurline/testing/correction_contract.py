"""What every correction must satisfy."""

from __future__ import annotations

import numpy as np
import torch

from spurline.data.batch import TrainingBatch
from spurline.data.ragged import Ragged
from spurline.protocols.correction import Correction

_LENGTHS = (5, 9, 4, 7, 3)


class CorrectionContract:
    """Subclass with `make_correction()`; ratios between trainer and engine range from about 1/20 to 20 per token."""

    def make_correction(self) -> Correction:
        """Your correction."""
        raise NotImplementedError("subclass CorrectionContract with make_correction(self)")

    def batch(self, rows: tuple[tuple[int, ...], ...], seed: int = 0, spread: float = 1.0) -> TrainingBatch:
        """The same five sequences, by number, in these rows. spread: standard deviation of the log ratios."""
        generator = torch.Generator().manual_seed(seed)
        sequences = []
        for length in _LENGTHS:
            old = -3 * torch.rand(length, generator=generator)
            rollout = old + spread * torch.randn(length, generator=generator)
            trained = (torch.rand(length, generator=generator) < 0.7).float()
            trained[0] = 0
            sequences.append({"old_logprobs": old, "rollout_logprobs": rollout, "loss_weights": trained})
        return _lay_out(sequences, rows)

    def test_factors_are_finite_constant_and_not_negative(self) -> None:
        batch = self.batch(((0,), (1,), (2,), (3,), (4,)))
        result = self.make_correction().correct(batch)
        assert result.factors.dtype == torch.float32
        assert result.factors.shape == batch.tokens["loss_weights"].shape
        assert not result.factors.requires_grad
        assert bool(torch.isfinite(result.factors).all())
        assert bool((result.factors >= 0).all())
        assert all(np.isfinite(value) for value in result.metrics.values())

    def test_packed_rows_get_what_each_sequence_gets_alone(self) -> None:
        packed_rows = ((3, 0), (1, 4, 2))
        packed = self.batch(packed_rows)
        factors = self.make_correction().correct(packed).factors
        for row, members in enumerate(packed_rows):
            for segment, number in enumerate(members, start=1):
                alone = self.make_correction().correct(self.batch(((number,),))).factors[0]
                torch.testing.assert_close(
                    factors[row][packed.tokens["segment_ids"][row] == segment], alone, rtol=1e-6, atol=0
                )

    def test_nothing_is_corrected_where_trainer_and_engine_agree(self) -> None:
        batch = self.batch(((0, 1), (2, 3, 4)), spread=0.0)
        trained = batch.tokens["loss_weights"] != 0
        assert bool((self.make_correction().correct(batch).factors[trained] == 1).all())

    def test_a_huge_difference_does_not_overflow(self) -> None:
        result = self.make_correction().correct(self.batch(((0, 1), (2, 3, 4)), spread=1e4))
        assert bool(torch.isfinite(result.factors).all())

    def test_a_batch_without_loss_tokens_works(self) -> None:
        batch = self.batch(((0, 1),))
        empty = batch.with_tokens(loss_weights=torch.zeros_like(batch.tokens["loss_weights"]))
        assert all(np.isfinite(value) for value in self.make_correction().correct(empty).metrics.values())

    def test_correction_describes_itself_in_a_sentence(self) -> None:
        assert len(self.make_correction().describe().split()) >= 3


def _lay_out(sequences: list[dict[str, torch.Tensor]], rows: tuple[tuple[int, ...], ...]) -> TrainingBatch:
    length = max(sum(_LENGTHS[number] for number in members) for members in rows)
    shape = (len(rows), length)
    tokens = {
        "input_ids": torch.ones(shape, dtype=torch.int64),
        "segment_ids": torch.zeros(shape, dtype=torch.int32),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        **{name: torch.zeros(shape) for name in sequences[0]},
    }
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, start=1):
            where = slice(start, start + _LENGTHS[number])
            tokens["segment_ids"][row, where] = segment
            tokens["position_ids"][row, where] = torch.arange(_LENGTHS[number])
            for name, values in sequences[number].items():
                tokens[name][row, where] = values
            start += _LENGTHS[number]
    return TrainingBatch(
        tokens=tokens,
        segments={
            "uid": Ragged.from_rows([[f"prompt-{number}" for number in members] for members in rows], object),
            "sample": Ragged.from_rows([[0] * len(members) for members in rows], np.int32),
            "turn": Ragged.from_rows([[0] * len(members) for members in rows], np.int32),
            "length": Ragged.from_rows([[_LENGTHS[number] for number in members] for members in rows], np.int32),
        },
        unit_ids=torch.arange(len(rows)),
        is_padding_row=torch.zeros(len(rows), dtype=torch.bool),
    )
