"""Gradients do not depend on how samples were split, packed or padded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from backend_batches import Sample, excite, lay_out, local_backend, make_samples, write_model_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spurline.data.batch import TrainingBatch, segment_numbers
from spurline.protocols.loss import Loss, Objective
from spurline_distillation.configs import DistillationConfig
from spurline_distillation.loss import Distillation
from spurline_models.local.backend import LocalBackend
from spurline_models.losses.configs import CrossEntropyConfig, DynamicFineTuningConfig
from spurline_models.losses.cross_entropy import CrossEntropy, DynamicFineTuning
from spurline_rl.testing.backend_cases import assert_gradients_close

TOLERANCES = {"fp64": 1e-10, "fp32": 3e-6}
LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(CrossEntropyConfig()),
    "dft": DynamicFineTuning(DynamicFineTuningConfig()),
    # The reference is the model before `excite`.
    "distillation": Distillation(DistillationConfig(teacher="reference", divergence="reverse_kl", temperature=1.3)),
    "top_k": Distillation(DistillationConfig(teacher="reference", top_k=5, cross_entropy=0.1)),
}


@lru_cache(maxsize=1)
def model_folder() -> Path:
    return write_model_folder(Path(mkdtemp(prefix="spurline-tiny-")))


@lru_cache(maxsize=64)
def backend(precision: str, **settings: Any) -> LocalBackend:
    return excite(local_backend(model_folder(), precision=precision, **settings))


@st.composite
def samples_and_layout(draw: st.DrawFn) -> tuple[list[Sample], TrainingBatch]:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=6))
    seed = draw(st.integers(0, 1000))
    # One sample with loss everywhere: with loss on second tokens only, attention has no gradient but rounding noise.
    samples = make_samples(lengths, seed) + make_samples([9], seed + 1, loss_share=1.1)
    row_of = [draw(st.integers(0, len(samples) - 1)) for _ in samples]
    rows = [[number for number in range(len(samples)) if row_of[number] == row] for row in sorted(set(row_of))]
    batch = lay_out(
        samples,
        draw(st.permutations(rows)),
        length=draw(st.integers(1, 120)),
        gap=draw(st.integers(0, 3)),
        left=draw(st.booleans()),
        padding_rows=draw(st.integers(0, 2)),
        unit_ids=[draw(st.integers(0, 3)) for _ in rows],
    )
    return samples, batch


def interleaved_units() -> tuple[list[Sample], TrainingBatch]:
    """Rows whose units alternate: the one micro-batch that holds them all has another row order than the batch."""
    samples = make_samples([5, 9, 7, 12], seed=3, loss_share=1.1)
    return samples, lay_out(samples, unit_ids=[0, 1, 0, 1])


microbatch_settings = st.sampled_from(
    [
        {},
        {"rows_per_microbatch": 100},
        {"max_tokens_per_microbatch": 1000},
        {"rows_per_microbatch": 1},
        {"rows_per_microbatch": 2},
        {"max_tokens_per_microbatch": 1},
        {"max_tokens_per_microbatch": 20},
        {"rows_per_microbatch": 2, "logits_chunk_tokens": 3},
        {"logits_chunk_tokens": 5, "activation_checkpointing": True},
    ]
)


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
@settings(max_examples=25, database=None)
@given(case=samples_and_layout(), split=microbatch_settings, loss=st.sampled_from(sorted(LOSSES)))
@example(case=interleaved_units(), split={"rows_per_microbatch": 100}, loss="cross_entropy")
@example(case=interleaved_units(), split={"max_tokens_per_microbatch": 1000}, loss="cross_entropy")
def test_any_layout_and_split_gives_the_gradients_of_one_padded_batch(
    precision: str, case: tuple[list[Sample], TrainingBatch], split: dict[str, Any], loss: str
) -> None:
    samples, batch = case
    objective = Objective(LOSSES[loss], normalizer=7.5)
    expected = backend(precision).gradients(lay_out(samples), objective)
    got = backend(precision, **split).gradients(batch, objective)
    assert_gradients_close(got, expected, TOLERANCES[precision], cancels_below=1e-3)


@settings(max_examples=10, database=None)
@given(case=samples_and_layout(), split=microbatch_settings)
@example(case=interleaved_units(), split={"max_tokens_per_microbatch": 1000})
def test_any_layout_and_split_gives_the_same_loss_sums_and_logprobs(
    case: tuple[list[Sample], TrainingBatch], split: dict[str, Any]
) -> None:
    samples, batch = case
    objective = Objective(LOSSES["cross_entropy"], normalizer=1.0)
    expected = backend("fp64").evaluate(lay_out(samples), objective)
    got = backend("fp64", **split).evaluate(batch, objective)
    assert got.tokens == expected.tokens
    assert got.weight == expected.weight
    assert got.loss == pytest.approx(expected.loss, rel=1e-12)
    logprobs = backend("fp64", **split).logprobs(batch)
    real = batch.without_padding_rows()
    assert logprobs.shape == (real.num_rows, real.length)
    weights = real.tokens["loss_weights"]
    assert float(-(logprobs.double() * weights).sum()) == pytest.approx(expected.loss, rel=1e-6)
    assert bool((logprobs[weights == 0] == 0).all())


@settings(max_examples=15, database=None)
@given(case=samples_and_layout(), split=microbatch_settings, loss=st.sampled_from(sorted(LOSSES)))
@example(case=interleaved_units(), split={"rows_per_microbatch": 100}, loss="cross_entropy")
def test_reproducible_sums_give_the_same_bits_for_any_layout_and_split(
    case: tuple[list[Sample], TrainingBatch], split: dict[str, Any], loss: str
) -> None:
    samples, batch = case
    objective = Objective(LOSSES[loss], normalizer=7.5)
    # Logits are recomputed for the last bits of a chunk, so both backends need chunks of one size.
    chunk = {"logits_chunk_tokens": split.get("logits_chunk_tokens", 3)}
    one, other = (backend("fp32", sums="reproducible", **(chunk | each)) for each in ({}, split))
    expected, got = dict(one.gradients(lay_out(samples), objective)), dict(other.gradients(batch, objective))
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    fast = backend("fp32").gradients(lay_out(samples), objective)
    assert_gradients_close(fast, expected, TOLERANCES["fp32"], cancels_below=1e-3)
    assert other.evaluate(batch, objective) == one.evaluate(lay_out(samples), objective)
    logprobs, wanted = other.logprobs(batch), one.logprobs(lay_out(samples))
    assert by_segment(batch, logprobs) == by_segment(lay_out(samples), wanted)


def by_segment(batch: TrainingBatch, values: Tensor) -> list[list[float]]:
    """Return the values of the tokens of each segment, in an order that does not depend on the layout."""
    real = batch.without_padding_rows()
    numbers = segment_numbers(real)[real.tokens["segment_ids"] > 0]
    found = values[real.tokens["segment_ids"] > 0]
    return sorted(found[numbers == number].tolist() for number in numbers.unique())


def test_with_reproducible_sums_a_minibatch_without_loss_decays_weights_as_on_ranks() -> None:
    trained = local_backend(model_folder(), sums="reproducible")
    before = {name: value.clone() for name, value in trained.trained_parameters().items()}
    trained.update(lay_out(make_samples([5, 9], loss_share=0)), Objective(LOSSES["cross_entropy"], normalizer=1.0))
    # The optimizer of `run_config` has the learning rate 0.01 and the weight decay 0.1. Vectors do not decay.
    for name, value in trained.trained_parameters().items():
        torch.testing.assert_close(value, before[name] * (1 - 0.01 * 0.1 if value.ndim > 1 else 1))
