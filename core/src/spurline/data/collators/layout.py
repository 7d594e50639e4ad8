"""Write segments into the columns of a TrainingBatch, one token at a time, for all reference collators.

Data flow: samples -> Segment -> `lay_out` -> TrainingBatch. Collators of other data make segments of their own. The
loops are slow, but easy to read. Tests compare the results of vectorized collators with the results of these loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, SEGMENT_COLUMNS, TOKEN_COLUMNS, Ragged, TrainingBatch

if TYPE_CHECKING:
    from spurline.data.token_store import TokenView


@dataclass(frozen=True)
class Segment:
    """One sequence to lay out.

    Attributes:
        tokens: [length].
        loss_weights: [length]; the first is ignored, since nothing predicts the first token.
        start: Position of the segment's first token in the row.
        uid: Name of the sample or prompt.
        sample: The attempt at the prompt, counted from 0.
        turn: The turn of the attempt, counted from 0.
        extra: Further token columns, each [length, ...].
    """

    tokens: NDArray[np.int32]
    loss_weights: NDArray[Any]
    start: int
    uid: str
    sample: int = 0
    turn: int = 0
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])

    @property
    def length(self) -> int:
        return len(self.tokens)


def lay_out(
    rows: Sequence[Sequence[Segment]], length: int, pad_token_id: int, info: Mapping[str, float] | None = None
) -> TrainingBatch:
    """Return a batch of these rows, `length` tokens wide. A row without segments becomes a padding row.

    `info` contains metrics to add to the result of `layout_info`.
    """
    extra = _shared_extra_columns(rows)
    written = [_write_row(segments, length, pad_token_id, extra) for segments in rows]
    dtypes = TOKEN_COLUMNS | {name: OPTIONAL_TOKEN_COLUMNS[name] for name in extra}
    columns = {name: _to_tensor([row[name] for row in written], dtype, length) for name, dtype in dtypes.items()}
    num_tokens = sum(len(segment.tokens) for segments in rows for segment in segments)
    return TrainingBatch(
        tokens=columns,
        segments={
            name: Ragged.from_rows([[getattr(segment, name) for segment in segments] for segments in rows], dtype)
            for name, dtype in SEGMENT_COLUMNS.items()
        },
        unit_ids=torch.arange(len(rows), dtype=torch.int64),
        is_padding_row=torch.tensor([not segments for segments in rows], dtype=torch.bool),
        info={**layout_info(num_tokens, len(rows), length), **(info or {})},
    )


def layout_info(num_tokens: int, num_rows: int, length: int) -> dict[str, float]:
    """Return metrics of a layout. `num_tokens` is the batch's tokens without padding, `length` the width of a row."""
    return {
        "packing/fill": num_tokens / (num_rows * length) if num_rows and length else 0.0,
        "packing/rows": float(num_rows),
        "packing/row_tokens": float(length),
    }


def _write_row(
    segments: Sequence[Segment], length: int, pad_token_id: int, extra: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Return the columns of one row as lists. `extra` maps each extra column to its padding value."""
    paddings = {"input_ids": pad_token_id, "segment_ids": 0, "position_ids": 0, "loss_weights": 0.0, **extra}
    row = {name: [padding] * length for name, padding in paddings.items()}
    for number, segment in enumerate(segments, start=1):
        tokens, weights = segment.tokens.tolist(), segment.loss_weights.tolist()
        for offset in range(len(tokens)):
            column = segment.start + offset
            row["input_ids"][column] = tokens[offset]
            row["segment_ids"][column] = number
            row["position_ids"][column] = offset
            row["loss_weights"][column] = weights[offset] if offset > 0 else 0.0
            for name in extra:
                row[name][column] = segment.extra[name][offset]
    return row


def _shared_extra_columns(rows: Sequence[Sequence[Segment]]) -> dict[str, Any]:
    """Return the optional columns that every segment has, with their padding value.

    A column that only some segments have is left out, since zeros in the other segments would look like data.
    """
    segments = [segment for row in rows for segment in row]
    return {
        name: np.zeros(segments[0].extra[name].shape[1:], segments[0].extra[name].dtype)
        for name in OPTIONAL_TOKEN_COLUMNS
        if segments and all(name in segment.extra for segment in segments)
    }


def _to_tensor(rows: list[list[Any]], dtype: torch.dtype, length: int) -> Tensor:
    values = np.array(rows, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    return torch.from_numpy(values if rows else values.reshape(0, length))


def sample_segments(samples: TokenView) -> list[Segment]:
    """Return one segment per sample, in order, all with `start` 0. Collators move them with `dataclasses.replace`."""
    return [
        Segment(samples.tokens(position), samples.loss_mask(position), 0, samples.uid(position))
        for position in range(len(samples))
    ]
