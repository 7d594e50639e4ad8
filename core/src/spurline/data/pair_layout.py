"""Lay both answers of a preference pair out in one row, with any collator.

Place on the way: chosen and rejected samples -> one joint sample per pair -> collator -> `split_pairs` -> batch. The
collator sees a pair as one sample, so it cannot part it: whoever keeps rows whole (micro-batches, ranks) keeps pairs
whole. Afterwards each answer is a segment of its own, which sees nothing of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.packing import round_up
from spurline.data.ragged import Ragged
from spurline.data.segment_sums import sums_by_number
from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView


@dataclass(frozen=True)
class JointSamples:
    """Pairs as one sample each. store: chosen tokens, filling, rejected tokens. shapes: uid -> (length of the chosen
    answer's sample, where the rejected one's starts)."""

    store: TokenStore
    shapes: Mapping[str, tuple[int, int]]


def join_pairs(
    samples: TokenView,
    labels: Sequence[str],
    datasets: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    align_to: int,
    pad_token_id: int,
) -> JointSamples:
    """The samples chosen, rejected, chosen, rejected, ... as joint samples.

    datasets, rows: of each pair, int64 [pairs]; they and `labels` make its uid. align_to: the rejected answer starts at
    a multiple of this.
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
    return JointSamples(store, {store.uid(pair): shape for pair, shape in enumerate(shapes)})


def split_pairs(batch: TrainingBatch, shapes: Mapping[str, tuple[int, int]]) -> TrainingBatch:
    """The same rows with two segments where there was a joint one: the chosen answer, then the rejected.

    Adds the column `pair_ids`. The loss weights of a pair come to sum to 1, so that a mean over weights is one over
    pairs.
    """
    ids, positions = batch.tokens["segment_ids"], batch.tokens["position_ids"]
    table = np.array([shapes[uid] for uid in batch.segments["uid"].values.tolist()], np.int64).reshape(-1, 2)
    pairs = _pair_numbers(batch)
    # Number 0 is padding, of which nothing is kept.
    length, start = torch.from_numpy(np.concatenate([[[0, 2**62]], table]))[pairs].unbind(-1)
    chosen, rejected = positions < length, positions >= start
    kept = chosen | rejected
    weights = batch.tokens["loss_weights"]
    sums = sums_by_number(weights, pairs)
    columns = {
        "segment_ids": torch.where(kept, 2 * ids - chosen.int(), 0),
        "position_ids": torch.where(rejected, positions - start, torch.where(chosen, positions, 0)),
        "loss_weights": torch.where(kept, weights / sums[pairs].clamp(min=1e-30), 0.0).to(weights.dtype),
        "pair_ids": torch.where(chosen, pairs, torch.where(rejected, -pairs, 0)).int(),
    }
    return replace(batch, tokens={**batch.tokens, **columns}, segments=_two_for_one(batch.segments, table))


def _pair_numbers(batch: TrainingBatch) -> Tensor:
    """int64 [R, L]: which joint segment of the batch each token is in, from 1; 0 on padding."""
    ids = batch.tokens["segment_ids"].long()
    before = torch.from_numpy(batch.segments["uid"].offsets[:-1]).unsqueeze(1)
    return torch.where(ids > 0, ids + before, 0)


def _two_for_one(segments: Mapping[str, Ragged], table: NDArray[np.int64]) -> dict[str, Ragged]:
    """Metadata of the halves. `sample` is 0 for the chosen answer and 1 for the rejected one."""
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
