"""Corrections against plain loops, in packed and in separate rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError
from spurline_rl.losses.configs import (
    GeometricRejectionConfig,
    MaskedImportanceSamplingConfig,
    SequenceRejectionConfig,
    TruncatedImportanceSamplingConfig,
)
from spurline_rl.losses.corrections import MaskedImportanceSampling, Rejection, TruncatedImportanceSampling, compare
from spurline_rl.losses.log_ratios import LogRatios
from spurline_rl.protocols.correction import Corrected, Correction
from spurline_rl.testing.correction_contract import CorrectionContract

CORRECTIONS: dict[str, Correction] = {
    "tis": TruncatedImportanceSampling(TruncatedImportanceSamplingConfig()),
    "tis of sequences": TruncatedImportanceSampling(TruncatedImportanceSamplingConfig(level="sequence", cap=3.0)),
    "tis without cap": TruncatedImportanceSampling(TruncatedImportanceSamplingConfig(cap=None)),
    "mis": MaskedImportanceSampling(MaskedImportanceSamplingConfig()),
    "mis of sequences": MaskedImportanceSampling(MaskedImportanceSamplingConfig(level="sequence", low=0.2)),
    "geometric": Rejection(GeometricRejectionConfig(low=0.8, high=1.2)),
    "sequence": Rejection(SequenceRejectionConfig()),
}

# One log ratio per token of a sequence to one factor per token, as the docstrings' formulas say.
PLAIN: dict[str, Callable[[list[float]], list[float]]] = {
    "tis": lambda rho: [min(math.exp(value), 2.0) for value in rho],
    "tis of sequences": lambda rho: [min(math.exp(sum(rho)), 3.0)] * len(rho),
    "tis without cap": lambda rho: [math.exp(value) for value in rho],
    "mis": lambda rho: [math.exp(value) if 0.5 <= math.exp(value) <= 5.0 else 0.0 for value in rho],
    "mis of sequences": lambda rho: [math.exp(sum(rho)) if 0.2 <= math.exp(sum(rho)) <= 5.0 else 0.0] * len(rho),
    "geometric": lambda rho: [1.0 if 0.8 <= math.exp(sum(rho) / max(len(rho), 1)) <= 1.2 else 0.0] * len(rho),
    "sequence": lambda rho: [1.0 if 0.5 <= math.exp(sum(rho)) <= 2.0 else 0.0] * len(rho),
}


@pytest.fixture(params=sorted(CORRECTIONS))
def correction(request: pytest.FixtureRequest) -> Correction:
    return CORRECTIONS[request.param]


def factors_of(batch: TrainingBatch, correction: Correction) -> torch.Tensor:
    return compare(batch, correction)[0].tokens["correction_factors"]


def shares_of(batch: TrainingBatch, correction: Correction) -> dict[str, float]:
    return {name: share for name, share in compare(batch, correction)[1].items() if name.startswith("correction/")}


class WorseFarSequencesRejected:
    """The correction of docs/testing-plugins.md, which reads another column of the batch."""

    def correct(self, ratios: LogRatios) -> Corrected:
        far = ratios.spread(ratios.means().abs() > 0.02)
        return Corrected((~(far & (ratios.column("advantages") < 0))).double())

    def describe(self) -> str:
        return "Leave out worse sequences that are 0.02 nats off per token."


class TestACorrectionThatReadsAdvantages(CorrectionContract):
    def make_correction(self) -> Correction:
        return WorseFarSequencesRejected()

    def test_the_sequences_of_the_contract_have_both_kinds(self) -> None:
        factors = factors_of(self.batch(((0,), (1,), (2,), (3,), (4,))), self.make_correction())
        assert set(factors.unique().tolist()) == {0.0, 1.0}


class TestCorrections(CorrectionContract):
    @pytest.fixture(autouse=True)
    def _each(self, correction: Correction) -> None:
        self._correction = correction

    def make_correction(self) -> Correction:
        return self._correction


def expected_factors(name: str, batch: TrainingBatch) -> torch.Tensor:
    result = torch.ones_like(batch.tokens["loss_weights"])
    log_ratios = batch.tokens["old_logprobs"].double() - batch.tokens["rollout_logprobs"].double()
    for row in range(batch.num_rows):
        for segment in range(1, int(batch.tokens["segment_ids"][row].max()) + 1):
            where = [
                position
                for position in range(batch.length)
                if batch.tokens["segment_ids"][row, position] == segment and batch.tokens["loss_weights"][row, position]
            ]
            factors = PLAIN[name]([float(log_ratios[row, position]) for position in where])
            result[row, where] = torch.tensor(factors, dtype=torch.float32)
    return result


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.01, 0.3, 1.0]))
@settings(max_examples=25)
def test_factors_are_their_formulas(name: str, seed: int, spread: float) -> None:
    batch = CorrectionContract().batch(((3, 0), (1, 4, 2)), seed, spread)
    factors = factors_of(batch, CORRECTIONS[name])
    torch.testing.assert_close(factors, expected_factors(name, batch), rtol=1e-5, atol=0)


def two_tokens(log_ratios: tuple[float, float]) -> TrainingBatch:
    batch = CorrectionContract().batch(((4,),), spread=0.0)
    batch = batch.with_tokens(loss_weights=torch.tensor([[0.0, 1.0, 0.5]]))
    return batch.with_tokens(rollout_logprobs=batch.tokens["old_logprobs"] - torch.tensor([[7.0, *log_ratios]]))


def test_metrics_are_shares_of_loss_tokens() -> None:
    batch = two_tokens((math.log(4.0), math.log(1.5)))
    assert shares_of(batch, CORRECTIONS["tis"]) == pytest.approx(
        {"correction/truncated": 0.5, "correction/factor": 1.75}, rel=1e-5
    )
    assert shares_of(two_tokens((math.log(6.0), 0.0)), CORRECTIONS["mis"]) == pytest.approx(
        {"correction/rejected": 0.5, "correction/factor": 0.5}, rel=1e-5
    )
    assert shares_of(batch, CORRECTIONS["sequence"]) == {"correction/rejected": 1.0, "correction/factor": 0.0}


def test_rejected_is_exactly_zero_and_the_tiniest_weight_is_not() -> None:
    assert factors_of(two_tokens((-60.0, 0.0)), CORRECTIONS["mis"]).tolist() == [[1.0, 0.0, 1.0]]
    assert factors_of(two_tokens((-60.0, 0.0)), CORRECTIONS["tis"])[0, 1] > 0


def test_a_prompt_never_decides_about_its_response() -> None:
    # The prompt token's columns disagree by 7 nats in two_tokens.
    assert factors_of(two_tokens((0.0, 0.0)), CORRECTIONS["sequence"]).tolist() == [[1.0, 1.0, 1.0]]


def test_a_missing_column_is_named(correction: Correction) -> None:
    batch = two_tokens((0.0, 0.0))
    tokens = {name: column for name, column in batch.tokens.items() if name != "old_logprobs"}
    with pytest.raises(DataError, match=r"The correction needs old_logprobs, which this run's batches do not have\."):
        compare(replace(batch, tokens=tokens), correction)
