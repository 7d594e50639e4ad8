"""Both answers of a pair lie in one row, and gradients depend neither on rows nor on micro-batches nor on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from spurline.data.batch import Ragged, TrainingBatch
from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenStore, TokenStoreBuilder
from spurline.protocols.collator import Collator, ParallelLayout
from spurline.protocols.loss import ENTROPY, Objective
from spurline.testing.samples import check_batch
from spurline.update.reduction import REDUCTIONS
from spurline_models.dealing import deal
from spurline_models.local.backend import LocalBackend
from spurline_preference.configs import DpoConfig, OrpoConfig, SimpoConfig
from spurline_preference.dpo import Dpo
from spurline_preference.pair_layout import join_pairs, split_pairs
from spurline_preference.reference_free import Orpo, Simpo
from spurline_rl.testing.backend_cases import assert_gradients_close

TOLERANCES = {"fp64": 1e-10, "fp32": 3e-6}

LOSSES = {
    "sigmoid": Dpo(DpoConfig(beta=0.5, label_smoothing=0.1, sft_weight=0.3)),
    "ipo": Dpo(DpoConfig(beta=0.5, loss_type="ipo")),
    # A small beta keeps pairs away from the corner, where rounding would decide whether there is a gradient.
    "hinge": Dpo(DpoConfig(beta=0.05, loss_type="hinge")),
    "robust": Dpo(DpoConfig(beta=0.5, loss_type="robust", label_smoothing=0.2)),
    "simpo": Simpo(SimpoConfig()),
    "orpo": Orpo(OrpoConfig(beta=0.5)),
}


@lru_cache(maxsize=1)
def model_folder() -> Path:
    return write_model_folder(Path(mkdtemp(prefix="spurline-tiny-")))


@lru_cache(maxsize=16)
def backend(precision: str, **settings: Any) -> LocalBackend:
    return excite(local_backend(model_folder(), precision=precision, **settings))


PAD = 0
COLLATORS: dict[str, Callable[[ParallelLayout], Collator]] = {
    "padded": lambda layout: PaddedCollator(PaddedCollatorConfig(), PAD, layout),
    "padded_left": lambda layout: PaddedCollator(PaddedCollatorConfig(pad_side="left"), PAD, layout),
    "packed": lambda layout: PackedCollator(PackedCollatorConfig(max_tokens=48), PAD, layout),
}


def make_answers(lengths: list[tuple[int, int]], seed: int) -> TokenStore:
    """Chosen, rejected, chosen, ...; each has loss on a random end of at least one token."""
    random = np.random.default_rng(seed)
    builder = TokenStoreBuilder(["answers"])
    for row, length in enumerate(length for pair in lengths for length in pair):
        mask = np.zeros(length, np.uint8)
        mask[random.integers(1, length) :] = 1
        builder.add(random.integers(4, 61, length), mask, 0, row)
    return builder.build()


def laid_out(
    store: TokenStore, collator: Collator, align_to: int = 1, pairs: Sequence[int] | None = None
) -> TrainingBatch:
    """The pairs of the store, or those that are given, in one batch."""
    rows = np.arange(len(store) // 2) if pairs is None else np.array(pairs)
    answers = store.view(np.stack([2 * rows, 2 * rows + 1], axis=1).ravel())
    joint, shapes = join_pairs(answers, ["pairs"], 0 * rows, rows, align_to=align_to, pad_token_id=PAD)
    batch = collator.collate(joint.view(np.arange(len(rows))), training=True)
    return split_pairs(batch, shapes)


def answers_in(batch: TrainingBatch) -> Iterator[tuple[str, int, int, Tensor]]:
    """Yield uid, sample, row and the columns of each segment."""
    for row in range(batch.num_rows):
        names = zip(batch.segments["uid"][row].tolist(), batch.segments["sample"][row].tolist(), strict=True)
        for segment, (uid, sample) in enumerate(names, start=1):
            (where,) = torch.nonzero(batch.tokens["segment_ids"][row] == segment, as_tuple=True)
            yield uid, sample, row, where


def with_reference(batch: TrainingBatch, reference: dict[int, Tensor]) -> TrainingBatch:
    """The batch with the logprobs of each answer, by its number in the store."""
    column = torch.zeros(batch.num_rows, batch.length)
    for uid, sample, row, where in answers_in(batch):
        column[row, where] = reference[2 * int(uid.removeprefix("pairs:")) + sample]
    return batch.with_tokens(reference_logprobs=column)


PAIRS = st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=7)


@pytest.mark.parametrize("name", sorted(COLLATORS))
@given(lengths=PAIRS, seed=st.integers(0, 1000), ranks=st.integers(1, 4), align_to=st.sampled_from([1, 4]))
@settings(max_examples=40, database=None)
def test_every_answer_is_a_segment_beside_its_partner_with_weights_that_sum_to_one(
    name: str, lengths: list[tuple[int, int]], seed: int, ranks: int, align_to: int
) -> None:
    store = make_answers(lengths, seed)
    batch = laid_out(store, COLLATORS[name](ParallelLayout(data=ranks, tensor=align_to)), align_to)
    check_batch(batch)
    assert batch.num_rows % ranks == 0
    view, rows_of_pairs, seen = store.view(np.arange(len(store))), dict[int, set[int]](), 0
    for uid, sample, row, where in answers_in(batch):
        columns = {name: column[row, where] for name, column in batch.tokens.items()}
        number, seen = 2 * int(uid.removeprefix("pairs:")) + sample, seen + 1
        assert columns["input_ids"].tolist() == view.tokens(number).tolist()
        assert (columns["loss_weights"] > 0).tolist() == view.loss_mask(number).astype(bool).tolist()
        if name != "padded_left":
            assert int(where[0]) % align_to == 0
        (pair_id,) = columns["pair_ids"].unique().tolist()
        assert (pair_id > 0) == (sample == 0)
        rows_of_pairs.setdefault(abs(pair_id), set()).add(row)
    assert seen == len(store)
    assert len(rows_of_pairs) == len(lengths)
    for number, rows in rows_of_pairs.items():
        assert len(rows) == 1
        weights = batch.tokens["loss_weights"][batch.tokens["pair_ids"].abs() == number]
        assert float(weights.double().sum()) == pytest.approx(1, abs=1e-6)
        assert len(weights[weights > 0].unique()) == 1
    unpaired = batch.tokens["pair_ids"] == 0
    assert bool((batch.tokens["segment_ids"][unpaired] == 0).all())
    assert bool((batch.tokens["input_ids"][unpaired] == PAD).all())


def test_a_pair_that_is_in_the_batch_twice_is_two_pairs() -> None:
    store = make_answers([(3, 4), (5, 2)], seed=0)
    batch = laid_out(store, COLLATORS["packed"](ParallelLayout()), pairs=[0, 1, 0])
    check_batch(batch)
    assert set(batch.tokens["pair_ids"].unique().tolist()) - {0} == {-3, -2, -1, 1, 2, 3}
    assert float(batch.tokens["loss_weights"].sum()) == pytest.approx(3)


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
    both = replace(
        batch,
        tokens={name: torch.cat([row.tokens[name] for row in rows]) for name in batch.tokens},
        segments={
            name: Ragged(np.concatenate([row.segments[name].values for row in rows]), np.arange(2 * batch.num_rows + 1))
            for name in batch.segments
        },
        unit_ids=torch.arange(2 * batch.num_rows),
        is_padding_row=torch.cat([row.is_padding_row for row in rows]),
        on_release=None,
    )
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
    padded, packed = (
        with_reference(laid_out(store, COLLATORS[name](ParallelLayout())), reference) for name in ("padded", "packed")
    )
    layouts = {
        "padded": lambda: padded,
        "packed": lambda: packed,
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
    batch = with_reference(laid_out(store, COLLATORS["padded"](ParallelLayout())), reference)
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
