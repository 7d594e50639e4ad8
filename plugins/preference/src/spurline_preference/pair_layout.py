"""Lay out pairs of answers: join the answers of a pair to one sample for the collator, and split them in the batch.

The collator gets a pair as one sample, and micro-batches and ranks do not divide rows, so pairs stay together. In the
batch each answer is its own segment, which does not attend to the other answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import Ragged, TrainingBatch, sums_by_number
from spurline.data.collators.packing import round_up
from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView


def join_pairs(
    samples: TokenView,
    labels: Sequence[str],
    datasets: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    align_to: int,
    pad_token_id: int,
) -> tuple[TokenStore, dict[str, tuple[int, int]]]:
    """Join the two samples of each pair into one sample.

    Args:
        samples: The samples chosen, rejected, chosen, rejected, ...
        labels: Names of the datasets.
        datasets: int64 [pairs], the dataset of each pair.
        rows: int64 [pairs], the row of each pair. Dataset and row together make the uid of a pair.
        align_to: The rejected answer starts at a multiple of this.
        pad_token_id: The token that fills the gap between the answers.

    Returns:
        A store with one sample per pair: chosen tokens, filling, rejected tokens. Also a dict that maps the uid of each
        pair to the length of the chosen sample and the start of the rejected sample.
    """
    builder = TokenStoreBuilder(labels)
    shapes: list[tuple[int, int]] = []
    for pair, (dataset, row) in enumerate(zip(datasets.tolist(), rows.tolist(), strict=True)):
        chosen, rejected = 2 * pair, 2 * pair + 1
        length = len(samples.tokens(chosen))
        start = round_up(length, align_to)
        filling = np.zeros(start - length, np.int32)
        builder.add(
            np.concatenate([samples.tokens(chosen), filling + pad_token_id, samples.tokens(rejected)]),
            np.concatenate([samples.loss_mask(chosen), filling, samples.loss_mask(rejected)]),
            dataset,
            row,
        )
        shapes.append((length, start))
    store = builder.build()
    return store, {store.uid(pair): shape for pair, shape in enumerate(shapes)}


def split_pairs(batch: TrainingBatch, shapes: Mapping[str, tuple[int, int]]) -> TrainingBatch:
    """Split each joint segment of a batch into the chosen and the rejected answer, and add the column `pair_ids`.

    The loss weights of each pair are scaled to sum to 1, so the loss is a mean over pairs.
    """
    ids, positions = batch.tokens["segment_ids"], batch.tokens["position_ids"]
    table = np.array([shapes[uid] for uid in batch.segments["uid"].values.tolist()], np.int64).reshape(-1, 2)
    # Number the pairs of the batch from 1. Padding has number 0. By row 0 below, it is in neither answer.
    before = torch.from_numpy(batch.segments["uid"].offsets[:-1]).unsqueeze(1)
    pairs = torch.where(ids > 0, ids.long() + before, 0)
    length, start = torch.from_numpy(np.concatenate([[[0, 2**62]], table]))[pairs].unbind(-1)
    chosen, rejected = positions < length, positions >= start
    kept = chosen | rejected
    weights = batch.tokens["loss_weights"]
    sums = sums_by_number(weights, pairs)
    columns = {
        "segment_ids": torch.where(kept, 2 * ids - chosen.int(), 0),
        "position_ids": torch.where(rejected, positions - start, torch.where(chosen, positions, 0)).int(),
        "loss_weights": torch.where(kept, weights / sums[pairs].clamp(min=1e-30), 0.0).to(weights.dtype),
        "pair_ids": torch.where(chosen, pairs, torch.where(rejected, -pairs, 0)).int(),
    }
    return replace(batch, tokens={**batch.tokens, **columns}, segments=_two_for_one(batch.segments, table))


def _two_for_one(segments: Mapping[str, Ragged], table: NDArray[np.int64]) -> dict[str, Ragged]:
    """Return the metadata of each answer. `sample` is 0 for a chosen and 1 for a rejected answer."""
    chosen, start = table.T
    halves: dict[str, Any] = {
        "length": np.stack([chosen, segments["length"].values - start], axis=1).ravel(),
        "sample": np.tile([0, 1], len(table)),
    }
    return {
        name: Ragged(
            halves.get(name, np.repeat(column.values, 2)).astype(column.values.dtype, copy=False), 2 * column.offsets
        )
        for name, column in segments.items()
    }
