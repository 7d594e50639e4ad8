"""Write segments into the columns of a TrainingBatch, one token at a time: what every reference collator shares.

Readable before fast: these loops say what a batch must contain; vectorized collators are tested against them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, SEGMENT_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.ragged import Ragged


@dataclass(frozen=True)
class Segment:
    """One sub-sequence to lay out.

    tokens: [length]. loss_weights: [length]; the first is ignored, since nothing predicts a first token.
    start: column of its first token. uid, sample, turn: metadata.
    extra: further token columns, each [length, ...].
    """

    tokens: NDArray[np.int32]
    loss_weights: NDArray[Any]
    start: int
    uid: str
    sample: int = 0
    turn: int = 0
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def lay_out(
    rows: Sequence[Sequence[Segment]], length: int, pad_token_id: int, info: Mapping[str, float] | None = None
) -> TrainingBatch:
    """A batch of these rows, `length` tokens wide. A row without segments becomes a padding row.

    info: more numbers for metrics; `packing/fill`, `packing/rows` and `packing/row_tokens` are added here.
    """
    columns = _empty_columns(rows, length, pad_token_id)
    for row, segments in enumerate(rows):
        for number, segment in enumerate(segments, start=1):
            _write(columns, row, number, segment)
    num_tokens = sum(len(segment.tokens) for segments in rows for segment in segments)
    layout_info = {
        "packing/fill": num_tokens / (len(rows) * length) if rows and length else 0.0,
        "packing/rows": float(len(rows)),
        "packing/row_tokens": float(length),
    }
    return TrainingBatch(
        tokens={name: torch.from_numpy(column) for name, column in columns.items()},
        segments=_metadata(rows),
        unit_ids=torch.arange(len(rows), dtype=torch.int64),
        is_padding_row=torch.tensor([not segments for segments in rows], dtype=torch.bool),
        info={**layout_info, **(info or {})},
    )


def _empty_columns(rows: Sequence[Sequence[Segment]], length: int, pad_token_id: int) -> dict[str, NDArray[Any]]:
    # Written as numpy arrays: setting one element of a tensor costs some thirty times as much.
    shape = (len(rows), length)
    columns = {name: np.zeros(shape, _numpy_dtype(dtype)) for name, dtype in TOKEN_COLUMNS.items()}
    columns["input_ids"].fill(pad_token_id)
    segments = [segment for row in rows for segment in row]
    for name, dtype in OPTIONAL_TOKEN_COLUMNS.items():
        # Present only when every segment has it: a half-filled column would pass zeros off as data.
        if segments and all(name in segment.extra for segment in segments):
            trailing = segments[0].extra[name].shape[1:]
            columns[name] = np.zeros((*shape, *trailing), _numpy_dtype(dtype))
    return columns


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _write(columns: Mapping[str, NDArray[Any]], row: int, number: int, segment: Segment) -> None:
    for offset in range(len(segment.tokens)):
        column = segment.start + offset
        columns["input_ids"][row, column] = segment.tokens[offset]
        columns["segment_ids"][row, column] = number
        columns["position_ids"][row, column] = offset
        columns["loss_weights"][row, column] = segment.loss_weights[offset] if offset > 0 else 0.0
        for name, values in segment.extra.items():
            if name in columns:
                columns[name][row, column] = values[offset]


def _metadata(rows: Sequence[Sequence[Segment]]) -> dict[str, Ragged]:
    read = {
        "uid": lambda segment: segment.uid,
        "sample": lambda segment: segment.sample,
        "turn": lambda segment: segment.turn,
        "length": lambda segment: len(segment.tokens),
    }
    return {
        name: Ragged.from_rows([[read[name](segment) for segment in segments] for segments in rows], dtype)
        for name, dtype in SEGMENT_COLUMNS.items()
    }
