"""Columns of the rows behind samples, which orders may go by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spurline.data.configs import CurriculumOrderConfig
from spurline.data.orders.epochs import CurriculumOrder
from spurline.errors import DataError
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.order import SampleFacts
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.sources.sft import ColumnsOfRows
from spurline_text.testing.tokenization_contract import ListDataset


class BadRows(ListDataset):
    """Rows of which some cannot be read."""

    def __getitem__(self, row: int) -> Any:
        if self._rows[row] is None:
            raise DataError(f"{self.location(row)}: is no JSON.")
        return super().__getitem__(row)


def columns_of(rows: Sequence[Any], on_bad_row: Any = "error") -> ColumnsOfRows:
    config = DatasetConfig(name="rows", on_bad_row=on_bad_row)
    return ColumnsOfRows([DatasetToTokenize(BadRows(rows), config)], [np.arange(len(rows))])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"meta": {"levle": 1}}, r"rows\.jsonl:2: meta\.level is missing or null.*mean 'meta\.levle'\?.*has: meta, "),
        ({"meta": {"level": None}}, r"rows\.jsonl:2: meta\.level is missing or null, and data\.order needs it"),
        ({"meta": {"level": "hard"}}, r"rows\.jsonl:2: meta\.level is text \('hard'\), but data\.order needs a finite"),
        ({"meta": {"level": float("nan")}}, r"rows\.jsonl:2: meta\.level is a number \(nan\)"),
        (None, r"rows\.jsonl:2: is no JSON"),
    ],
)
def test_a_row_without_a_number_is_an_error_that_names_row_and_column(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        columns_of([{"meta": {"level": 1}}, row]).numbers("meta.level")


def test_numbers_in_text_count_since_csv_knows_nothing_else() -> None:
    assert columns_of([{"level": "2"}, {"level": "1e1"}, {"level": True}]).numbers("level").tolist() == [2, 10, 1]


def test_a_column_that_has_dots_in_its_name_is_found() -> None:
    assert columns_of([{"meta.level": 3, "meta": {"level": 4}}]).numbers("meta.level").tolist() == [3]


def test_a_row_that_will_be_skipped_comes_last() -> None:
    columns = columns_of([{"level": 2}, None, {"level": 1}], "skip")
    samples = SampleFacts((3,), (1.0,), 1, columns)
    for direction, expected in (("ascending", [2, 0, 1]), ("descending", [0, 2, 1])):
        config = CurriculumOrderConfig(column="level", direction=direction)
        assert CurriculumOrder(config, samples=samples, seed=0).positions(0, 3).tolist() == expected


def test_columns_belong_to_the_samples_where_rows_were_left_out() -> None:
    datasets = [
        DatasetToTokenize(ListDataset([{"level": 10 * number + row} for row in range(6)]), DatasetConfig(name="rows"))
        for number in range(2)
    ]
    columns = ColumnsOfRows(datasets, [np.array([1, 4]), np.array([0, 5])])
    assert columns.values("level") == [1, 4, 10, 15]
    assert columns.location(3) == "rows.jsonl:6"
