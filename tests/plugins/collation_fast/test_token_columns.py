"""Token ids read from Arrow columns equal what the reference makes of the same rows, errors included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_rows import data_config, source

from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.block_encoder import TokenColumns
from spurline_collation_fast.tokenization.chunks import Chunk
from spurline_collation_fast.tokenization.parallel import ParallelTokenization
from spurline_text.configs import SequentialTokenizationConfig
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenization import SequentialTokenization

TOKENIZER = tiny_tokenizer()


class TableRows:
    """Rows of an Arrow table."""

    label = "table"

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table
        self._rows = table.to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]

    def location(self, row: int) -> str:
        return f"table row {row}"

    def fingerprint(self) -> str:
        return "table"

    def arrow(self, start: int, stop: int) -> pyarrow.Table:
        return self._table.slice(start, stop - start)


class PlainRows(TableRows):
    """The same rows, not told to be a table."""

    arrow = None  # type: ignore[assignment]


@st.composite
def tables(draw: st.DrawFn) -> pyarrow.Table:
    """Tables whose loss is given by one of the columns, in types that vary; in some, one row breaks a rule."""
    rule = draw(st.sampled_from(["loss_mask", "labels", "prompt_length", "num_actions"]))
    ids: list[list[Any]] = draw(
        st.lists(st.lists(st.integers(0, 250), min_size=1, max_size=12), min_size=1, max_size=9)
    )
    values: list[Any] = [draw(values_of(rule, tokens)) for tokens in ids]
    id_types, value_types = [pyarrow.int32(), pyarrow.int64(), pyarrow.uint32()], [pyarrow.int64()]
    if draw(st.booleans()):
        break_a_row(ids, values, draw(st.integers(0, len(ids) - 1)), draw(st.sampled_from(FAULTS)))
        id_types = [pyarrow.int64()]
    elif rule == "loss_mask":
        value_types += [pyarrow.int8(), pyarrow.bool_()]
    wrap = draw(st.sampled_from([pyarrow.list_, pyarrow.large_list]))
    columns = {"input_ids": pyarrow.array(ids, wrap(draw(st.sampled_from(id_types))))}
    if draw(st.booleans()):
        # A column that is there but says nothing leaves the choice to the next one.
        columns["loss_mask"] = pyarrow.nulls(len(ids), pyarrow.list_(pyarrow.int64()))
    if rule in ("prompt_length", "num_actions"):
        columns[rule] = pyarrow.array(values, pyarrow.int64())
    else:
        columns[rule] = pyarrow.array(values, wrap(pyarrow.int64())).cast(wrap(draw(st.sampled_from(value_types))))
    table = pyarrow.table(columns)
    # Slices and several chunks: offsets that begin elsewhere than 0.
    return pyarrow.concat_tables([table, table]).slice(draw(st.integers(0, len(ids) - 1)))


FAULTS = ("null", "null id", "negative", "unknown", "empty", "value", "null value")


def break_a_row(ids: list[list[Any]], values: list[Any], row: int, fault: str) -> None:
    """Make one row malformed, or leave its loss to a column that is not there."""
    if fault == "null":
        values[row] = None
    elif fault == "empty":
        ids[row] = []
    elif fault in ("negative", "unknown", "null id"):
        ids[row][-1] = {"negative": -1, "unknown": 100_000, "null id": None}[fault]
    else:
        wrong = 7777 if fault == "value" else None
        if isinstance(values[row], list):
            values[row][0] = wrong
        else:
            values[row] = wrong


def values_of(rule: str, tokens: list[int]) -> st.SearchStrategy[Any]:
    length = len(tokens)
    if rule == "loss_mask":
        return st.lists(st.integers(0, 1), min_size=length, max_size=length)
    if rule == "labels":
        chosen = st.lists(st.booleans(), min_size=length, max_size=length)
        return chosen.map(lambda flags: [token if flag else -100 for token, flag in zip(tokens, flags, strict=True)])
    return st.integers(0, length)


def tokenized(kind: str, table: pyarrow.Table, **all_settings: Any) -> Tokenized | str:
    """The tokens of the table, or the text of the error."""
    skip = {"on_bad_row": all_settings.pop("on_bad_row")}
    dataset = TableRows(table) if kind == "columns" else PlainRows(table)
    item = source(dataset, format="pretokenized", **skip)
    data = data_config(item, **all_settings)
    if kind == "reference":
        made: Any = SequentialTokenization(SequentialTokenizationConfig(), tokenizer=TOKENIZER, data=data)
    else:
        config = ParallelTokenizationConfig(workers=0, disable_cache=True)
        made = ParallelTokenization(config, tokenizer=TOKENIZER, data=data)
    try:
        return made.tokenize([item])
    except DataError as error:
        return str(error)


@settings(max_examples=200, deadline=None)
@given(
    table=tables(),
    on_bad_row=st.sampled_from(["error", "skip"]),
    max_length=st.integers(2, 13),
    too_long=st.sampled_from(["truncate", "drop", "error"]),
)
def test_columns_give_what_the_reference_gives(
    table: pyarrow.Table, on_bad_row: str, max_length: int, too_long: str
) -> None:
    given_settings = {"on_bad_row": on_bad_row, "max_length": max_length, "too_long": too_long}
    expected = tokenized("reference", table, **given_settings)
    result = tokenized("columns", table, **given_settings)
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
        return
    assert result.store.fingerprint == expected.store.fingerprint
    assert result.store.row.tolist() == expected.store.row.tolist()
    assert (result.store.tokens.dtype, result.store.loss_mask.dtype) == (np.int32, np.uint8)
    assert result.dropped == expected.dropped
    assert result.truncated == expected.truncated
    assert result.examples == expected.examples


def regular(**columns: Any) -> pyarrow.Table:
    return pyarrow.table({"input_ids": [[1, 2, 3], [4, 5]], "prompt_length": [1, 1]} | columns)


def read(table: pyarrow.Table, **config: Any) -> Any:
    item = source(TableRows(table), format="pretokenized", **config)
    return TokenColumns(item, data_config(item), len(TOKENIZER)).read(Chunk(0, 0, len(table)))


def test_regular_rows_are_read_without_the_reference() -> None:
    block = read(regular())
    assert block.tokens.tolist() == [1, 2, 3, 4, 5]
    assert block.loss_mask.tolist() == [0, 1, 1, 0, 1]
    assert (block.lengths.tolist(), block.rows.tolist(), block.counts) == ([3, 2], [0, 1], ())


def test_columns_under_other_names_are_found() -> None:
    table = regular().rename_columns(["tokens", "prompt"])
    block = read(table, columns={"input_ids": "tokens", "prompt_length": "prompt"})
    assert block.loss_mask.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1, 2, 3], None]},
        {"input_ids": [[1, 2, 3], [4, None]]},
        {"input_ids": [[1, 2, 3], []]},
        {"input_ids": [[1, 2, 3], [4, -5]]},
        {"input_ids": [[1, 2, 3], [4, 10_000]]},
        {"input_ids": [[1.0, 2.0, 3.0], [4.0, 5.0]]},
        {"prompt_length": [1, 3]},
        {"prompt_length": [1, None]},
        {"prompt_length": [True, False]},
        {"prompt_length": [None, None]},
        {"loss_mask": [[0, 1, 1], [1]]},
        {"loss_mask": [[0, 1, 2], [0, 1]]},
        {"loss_mask": [[0.0, 1.0, 1.0], [0.0, 1.0]]},
        {"labels": [[-100, 2, 3], [-100, 4]]},
        {"labels": [[-100, 2], [3, -100, 4]]},
    ],
    ids=str,
)
def test_a_chunk_with_anything_unusual_is_left_to_the_reference(columns: dict[str, Any]) -> None:
    assert read(regular(**columns)) is None
