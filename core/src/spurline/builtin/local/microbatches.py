"""Cut a mini-batch into micro-batches, and lay each out as one padding-free stream of tokens.

Place on the way: TrainingBatch -> row groups -> `TokenStream` -> decoder. Padding of any kind (row ends, alignment
between segments, filler rows) is dropped here, so padded and packed batches run the very same computation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.builtin.configs import LocalBackendConfig
from spurline.builtin.local.device_profile import DeviceProfile
from spurline.builtin.local.segment_plan import SegmentPlan, plan_segments
from spurline.data.batch import TrainingBatch
from spurline.errors import DataError, listing

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class TokenStream:
    """T tokens of S segments, N of them with loss. On the device, except `batch_index`.

    input_ids, position_ids: [1, T]. plan: which tokens belong together.
    source: [N], stream position whose hidden state predicts the token: the one before it in its segment.
    targets: [N] token ids. weights: [N]. segment_index: [N], from 0.
    columns: further token columns at the N positions.
    batch_index: [N] on CPU, where the token stands in the flattened [rows, length] of the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: SegmentPlan
    source: Tensor
    targets: Tensor
    weights: Tensor
    segment_index: Tensor
    columns: dict[str, Tensor]
    batch_index: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_loss_tokens(self) -> int:
        return self.batch_index.shape[0]


def check_columns(batch: TrainingBatch, needed: Collection[str]) -> None:
    """Raise DataError when the batch lacks a column that the loss needs."""
    missing = [name for name in needed if name not in batch.tokens]
    if missing:
        raise DataError(
            f"The loss needs {listing(missing)}, which this run's batches do not have. "
            "Choose another `loss`, or a `source` that provides it."
        )


def cut_rows(batch: TrainingBatch, config: LocalBackendConfig) -> list[Rows]:
    """Row numbers of each micro-batch, in row order. Rows of one unit stay together, also when over the limit alone."""
    tokens = tokens_per_row(batch)
    rows = np.flatnonzero(tokens)
    if config.rows_per_microbatch is not None:
        cost, limit = np.ones_like(tokens), config.rows_per_microbatch
    elif config.max_tokens_per_microbatch is not None:
        cost, limit = tokens, config.max_tokens_per_microbatch
    else:
        return [rows] if len(rows) else []
    units: dict[int, list[int]] = {}
    for row, unit in zip(rows.tolist(), batch.unit_ids.numpy()[rows].tolist(), strict=True):
        units.setdefault(unit, []).append(row)
    groups: list[list[int]] = []
    used = limit
    for members in units.values():
        size = int(cost[members].sum())
        if used + size > limit or not groups:
            groups.append([])
            used = 0
        groups[-1].extend(members)
        used += size
    # Units may interleave; within a micro-batch the rows keep the order of the batch.
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]


def tokens_per_row(batch: TrainingBatch) -> NDArray[np.int64]:
    """Tokens of each row, padding not counted, int64 [R]."""
    lengths = batch.segments["length"]
    ends = np.concatenate([[0], np.cumsum(lengths.values, dtype=np.int64)])
    return np.diff(ends[lengths.offsets])


def token_stream(
    batch: TrainingBatch, rows: Rows, columns: Collection[str], profile: DeviceProfile
) -> TokenStream | None:
    """The chosen rows as one stream; None when none of their tokens has loss, as there is nothing to compute then.

    columns: token columns to gather besides the standard ones.
    """
    index, lengths = _stream_order(batch, rows)
    weights = batch.tokens["loss_weights"].flatten()[index]
    target_positions = torch.nonzero(weights).flatten()
    if len(target_positions) == 0:
        return None
    batch_index = index[target_positions]
    input_ids = batch.tokens["input_ids"].flatten()[index]
    segment_index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))[target_positions]
    send = profile.send
    return TokenStream(
        input_ids=send(input_ids).unsqueeze(0),
        position_ids=send(batch.tokens["position_ids"].flatten()[index]).unsqueeze(0),
        plan=plan_segments(lengths, profile.slots_per_attention_call, send),
        source=send(target_positions - 1),
        targets=send(input_ids[target_positions]),
        weights=send(weights[target_positions].to(profile.weight_dtype)),
        segment_index=send(segment_index),
        columns={name: send(batch.tokens[name].flatten(0, 1)[batch_index]) for name in columns},
        batch_index=batch_index,
    )


def _stream_order(batch: TrainingBatch, rows: Rows) -> tuple[Tensor, NDArray[np.int64]]:
    """Flat batch index of each stream token, and the segment lengths: segments from short to long (see SegmentPlan)."""
    everything = np.array_equal(rows, np.arange(batch.num_rows))
    segment_ids = batch.tokens["segment_ids"]
    index = torch.nonzero((segment_ids if everything else segment_ids[torch.from_numpy(rows)]).flatten()).flatten()
    if not everything:
        # From the flat index among the chosen rows to the one in the whole batch.
        row_shift = torch.from_numpy((rows - np.arange(len(rows))) * batch.length)
        index += row_shift[index // batch.length]
    lengths = batch.segments["length"].take(rows).values.astype(np.int64)
    assert int(lengths.sum()) == len(index), f"segment lengths sum to {lengths.sum()}, but {len(index)} tokens have one"
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    new_starts = np.cumsum(lengths) - lengths
    source = np.arange(len(index)) + np.repeat(starts[order] - new_starts, lengths)
    return index[torch.from_numpy(source)], lengths
