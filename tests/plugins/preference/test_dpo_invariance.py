"""Gradients of pair losses do not depend on rows, padding, micro-batches or ranks, as long as units stay whole."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import excite, local_backend, write_model_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packed import PackedCollator
from spurline.data.collators.padded import PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenStore, TokenStoreBuilder
from spurline.protocols.collator import Collator, ParallelLayout
from spurline.protocols.loss import ENTROPY, Objective
from spurline.update.reduction import REDUCTIONS
from spurline_models.dealing import deal
from spurline_models.local.backend import LocalBackend
from spurline_preference.configs import DpoConfig
from spurline_preference.dpo import Dpo
from spurline_preference.source import join_pairs, split_pairs
from spurline_rl.testing.backend_cases import assert_gradients_close

TOLERANCES = {"fp64": 1e-10, "fp32": 3e-6}

LOSSES = {
    "sigmoid": Dpo(DpoConfig(beta=0.5, label_smoothing=0.1, sft_weight=0.3)),
    "ipo": Dpo(DpoConfig(beta=0.5, loss_type="ipo")),
    # A small beta keeps pairs away from the corner, where rounding would decide whether there is a gradient.
    "hinge": Dpo(DpoConfig(beta=0.05, loss_type="hinge")),
}


@lru_cache(maxsize=1)
def model_folder() -> Path:
    return write_model_folder(Path(mkdtemp(prefix="spurline-tiny-")))


@lru_cache(maxsize=16)
def backend(precision: str, **settings: Any) -> LocalBackend:
    return excite(local_backend(model_folder(), precision=precision, **settings))


def make_answers(lengths: list[tuple[int, int]], seed: int) -> TokenStore:
    random = np.random.default_rng(seed)
    builder = TokenStoreBuilder(["answers"])
    for row, length in enumerate(length for pair in lengths for length in pair):
        mask = np.zeros(length, np.uint8)
        mask[random.integers(1, length) :] = 1
        builder.add(random.integers(4, 61, length), mask, 0, row)
    return builder.build()


def laid_out(store: TokenStore, collator: Collator, reference: dict[int, Tensor]) -> TrainingBatch:
    """reference: logprobs of each answer, by its number in the store."""
    count = len(store) // 2
    everything, pairs = store.view(np.arange(len(store))), np.arange(count)
    joint = join_pairs(everything, ["pairs"], 0 * pairs, pairs, align_to=1, pad_token_id=0)
    batch = split_pairs(collator.collate(joint.store.view(pairs), training=True), joint.shapes)
    column = torch.zeros(batch.num_rows, batch.length)
    for row in range(batch.num_rows):
        names = zip(batch.segments["uid"][row].tolist(), batch.segments["sample"][row].tolist(), strict=True)
        for segment, (uid, sample) in enumerate(names, start=1):
            number = 2 * int(uid.removeprefix("pairs:")) + sample
            column[row, batch.tokens["segment_ids"][row] == segment] = reference[number]
    return batch.with_tokens(reference_logprobs=column)


def with_unit_per_pair(batch: TrainingBatch) -> TrainingBatch:
    """The padded batch with each answer in a row of its own and both rows of a pair in one unit."""
    chosen = batch.tokens["segment_ids"] == 1
    rows = []
    for side in (chosen, batch.tokens["segment_ids"] == 2):
        kept = {name: torch.where(side, column, 0) for name, column in batch.tokens.items()}
        kept["segment_ids"] = side.int()
        number = 0 if side is chosen else 1
        segments = {
            name: type(column)(column.values[number::2].copy(), np.arange(batch.num_rows + 1))
            for name, column in batch.segments.items()
        }
        rows.append(replace(batch, tokens=kept, segments=segments, on_release=None))
    both = TrainingBatch.concatenate(rows)
    order = torch.arange(2 * batch.num_rows).view(2, -1).T.flatten()
    return replace(both.take(order), unit_ids=torch.arange(batch.num_rows).repeat_interleave(2))


def rank_gradients(
    precision: str, batch: TrainingBatch, objective: Objective, ranks: int, split: dict[str, Any]
) -> dict[str, Tensor]:
    """The sum over ranks of what each computes from its share of the rows, as an all-reduce would give it."""
    total: dict[str, Tensor] = {}
    for share in deal(batch, ranks, columns=objective.loss.needs - {ENTROPY}).shares:
        for name, gradient in backend(precision, **split).gradients(share.batch, objective):
            total[name] = total[name] + gradient if name in total else gradient.clone()
    return total


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=6, database=None, deadline=None)
def test_any_layout_split_and_number_of_ranks_gives_the_gradients_of_one_padded_batch(
    precision: str, loss: str, data: st.DataObject, seed: int
) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=5))
    store = make_answers(lengths, seed)
    random = np.random.default_rng(seed)
    reference = {
        number: torch.from_numpy(-4 * random.random(int(length))).float()
        for number, length in enumerate(store.lengths())
    }
    padded = laid_out(store, PaddedCollator(PaddedCollatorConfig(), 0, ParallelLayout()), reference)
    packed = PackedCollator(PackedCollatorConfig(max_tokens=40), 0, ParallelLayout())
    layouts = {
        "padded": lambda: padded,
        "packed": lambda: laid_out(store, packed, reference),
        "a_row_per_answer": lambda: with_unit_per_pair(padded),
    }
    reduction = data.draw(st.sampled_from(sorted(REDUCTIONS)))
    split = data.draw(st.sampled_from([{}, {"rows_per_microbatch": 1}, {"max_tokens_per_microbatch": 20}]))

    plain, normalizer = REDUCTIONS[reduction](padded)
    expected = dict(backend(precision).gradients(plain, Objective(LOSSES[loss], normalizer)))
    batch, other_normalizer = REDUCTIONS[reduction](layouts[data.draw(st.sampled_from(sorted(layouts)))]())
    assert other_normalizer == pytest.approx(normalizer, rel=1e-12)
    got = rank_gradients(precision, batch, Objective(LOSSES[loss], normalizer), data.draw(st.integers(1, 4)), split)
    assert_gradients_close(got, expected, TOLERANCES[precision], cancels_below=1e-3)


def test_every_reduction_is_the_mean_over_pairs() -> None:
    store = make_answers([(3, 9), (8, 2), (5, 5)], seed=1)
    reference = {number: torch.full((int(length),), -4.0) for number, length in enumerate(store.lengths())}
    batch = laid_out(store, PaddedCollator(PaddedCollatorConfig(), 0, ParallelLayout()), reference)
    alone = [
        dict(backend("fp64").gradients(batch.take([row]), Objective(LOSSES["sigmoid"], 1.0)))
        for row in range(batch.num_rows)
    ]
    expected = {name: torch.stack([gradients[name] for gradients in alone]).mean(0) for name in alone[0]}
    for name, reduce in REDUCTIONS.items():
        reduced, normalizer = reduce(batch)
        assert normalizer == pytest.approx(6 if name == "sequence_mean" else 3, rel=1e-6)
        got = dict(backend("fp64").gradients(reduced, Objective(LOSSES["sigmoid"], normalizer)))
        # The weights of a pair are float32, so that they sum to 1 only up to its rounding.
        assert_gradients_close(got, expected, 3e-7)
