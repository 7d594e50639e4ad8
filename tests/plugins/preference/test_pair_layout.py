"""Both answers of a pair lie in one row as two segments, whichever collator laid the row out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packed import PackedCollator
from spurline.data.collators.padded import PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenStore, TokenStoreBuilder
from spurline.protocols.collator import Collator, ParallelLayout
from spurline_preference.source import join_pairs, split_pairs

PAD = 0

MakeCollator = Callable[[ParallelLayout], Collator]

COLLATORS: dict[str, MakeCollator] = {
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
        builder.add(random.integers(1, 100, length), mask, 0, row)
    return builder.build()


def laid_out(store: TokenStore, collator: Collator, align_to: int = 1) -> TrainingBatch:
    count = len(store) // 2
    joint = join_pairs(
        store.view(np.arange(len(store))),
        ["pairs"],
        np.zeros(count, np.int64),
        np.arange(count),
        align_to=align_to,
        pad_token_id=PAD,
    )
    batch = collator.collate(joint.store.view(np.arange(count)), training=True)
    return split_pairs(batch, joint.shapes)


def segments_of(batch: TrainingBatch) -> dict[tuple[str, int], tuple[list[int], list[bool], int, int]]:
    """(uid, sample) -> tokens, which have loss, the column it begins in, the pair's id."""
    found = {}
    for row in range(batch.num_rows):
        names = zip(batch.segments["uid"][row].tolist(), batch.segments["sample"][row].tolist(), strict=True)
        for segment, name in enumerate(names, start=1):
            (where,) = torch.nonzero(batch.tokens["segment_ids"][row] == segment, as_tuple=True)
            columns = {name: column[row, where] for name, column in batch.tokens.items()}
            (pair_id,) = columns["pair_ids"].unique().tolist()
            has_loss = (columns["loss_weights"] > 0).tolist()
            assert name not in found
            found[name] = columns["input_ids"].tolist(), has_loss, int(where[0]), pair_id
    return found


PAIRS = st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=7)


@pytest.mark.parametrize("name", sorted(COLLATORS))
@given(lengths=PAIRS, seed=st.integers(0, 1000), ranks=st.integers(1, 4), align_to=st.sampled_from([1, 4]))
@settings(max_examples=40, database=None)
def test_every_answer_is_a_segment_beside_its_partner_with_weights_that_sum_to_one(
    name: str, lengths: list[tuple[int, int]], seed: int, ranks: int, align_to: int
) -> None:
    store = make_answers(lengths, seed)
    batch = laid_out(store, COLLATORS[name](ParallelLayout(data=ranks, tensor=align_to)), align_to)
    batch.check()
    assert batch.num_rows % ranks == 0
    found = segments_of(batch)
    assert len(found) == len(store)
    view = store.view(np.arange(len(store)))
    for pair in range(len(lengths)):
        ids = set()
        for sample in (0, 1):
            tokens, has_loss, start, pair_id = found[f"pairs:{pair}", sample]
            assert tokens == view.tokens(2 * pair + sample).tolist()
            assert has_loss == view.loss_mask(2 * pair + sample).astype(bool).tolist()
            if name != "padded_left":
                assert start % align_to == 0
            ids.add(pair_id if sample == 0 else -pair_id)
        (number,) = ids
        (rows,) = torch.nonzero((batch.tokens["pair_ids"].abs() == number).any(1), as_tuple=True)
        assert len(rows) == 1
        weights = batch.tokens["loss_weights"][batch.tokens["pair_ids"].abs() == number]
        assert float(weights.double().sum()) == pytest.approx(1, abs=1e-6)
        assert len(weights[weights > 0].unique()) == 1
    unpaired = batch.tokens["pair_ids"] == 0
    assert bool((batch.tokens["segment_ids"][unpaired] == 0).all())
    assert bool((batch.tokens["input_ids"][unpaired] == PAD).all())


def test_a_pair_that_is_in_the_batch_twice_is_two_pairs() -> None:
    store = make_answers([(3, 4), (5, 2)], seed=0)
    collator = COLLATORS["packed"](ParallelLayout())
    joint = join_pairs(
        store.view(np.array([0, 1, 2, 3, 0, 1])),
        ["pairs"],
        np.zeros(3, np.int64),
        np.array([0, 1, 0]),
        align_to=1,
        pad_token_id=PAD,
    )
    batch = split_pairs(collator.collate(joint.store.view(np.arange(3)), training=True), joint.shapes)
    batch.check()
    assert set(batch.tokens["pair_ids"].unique().tolist()) - {0} == {-3, -2, -1, 1, 2, 3}
    assert float(batch.tokens["loss_weights"].sum()) == pytest.approx(3)
