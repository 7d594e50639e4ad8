"""Check the rows of a dataset, their locations, and its fingerprint."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from spurline.errors import DataError
from spurline.protocols.dataset import Dataset
from spurline_text.datasets.protocols import CheckableDataset


class DatasetContract:
    """A test suite for datasets: define `make_dataset(folder, rows)` in a subclass.

    If your data can contain an unreadable row, such as a line that is not JSON, define `make_damaged` too.
    """

    rows: Sequence[Mapping[str, Any]] = [{"prompt": f"question {i}", "completion": "answer " * i} for i in range(1, 12)]

    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        """Write the rows to the empty folder, and return your dataset of these rows."""
        raise NotImplementedError("subclass DatasetContract with make_dataset(self, folder, rows)")

    def make_damaged(self, folder: Path) -> Dataset | None:
        """Return a dataset of three rows whose second row cannot be read, or None if that is impossible."""
        return None

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Dataset:
        return self._make(tmp_path / "data", self.rows)

    def _make(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        folder.mkdir()
        return self.make_dataset(folder, rows)

    def test_it_has_as_many_rows_as_were_given_and_gives_each_by_its_number(self, dataset: Dataset) -> None:
        assert len(dataset) == len(self.rows)
        # Rows may be read in any order, and more than once.
        for row in [*reversed(range(len(self.rows))), 0, len(self.rows) - 1]:
            assert dict(dataset[row]) == dict(self.rows[row])

    @pytest.mark.parametrize("beyond", [0, -1], ids=["first row after the last", "last row counted from the end"])
    def test_a_row_that_is_not_there_is_an_index_error(self, dataset: Dataset, beyond: int) -> None:
        with pytest.raises(IndexError):
            dataset[beyond or len(dataset)]

    def test_every_row_has_a_place_of_its_own(self, dataset: Dataset) -> None:
        places = [dataset.location(row) for row in range(len(dataset))]
        assert all(places)
        assert len(set(places)) == len(places)

    def test_its_label_is_short_text_on_one_line(self, dataset: Dataset) -> None:
        assert dataset.label
        assert dataset.label == dataset.label.strip()
        assert "\n" not in dataset.label

    def test_its_fingerprint_is_of_the_content_and_not_of_the_place(self, dataset: Dataset, tmp_path: Path) -> None:
        first = dataset.fingerprint()
        assert first
        assert first == dataset.fingerprint()
        assert first == self._make(tmp_path / "elsewhere", self.rows).fingerprint()

    @pytest.mark.parametrize("change", ["a value", "one row less", "another order"])
    def test_its_fingerprint_changes_with_the_rows(self, dataset: Dataset, tmp_path: Path, change: str) -> None:
        rows = [dict(row) for row in self.rows]
        if change == "a value":
            rows[-1]["completion"] += "!"
        elif change == "one row less":
            rows.pop()
        else:
            rows.reverse()
        assert self._make(tmp_path / "changed", rows).fingerprint() != dataset.fingerprint()

    def test_a_pickled_copy_gives_the_same_rows(self, dataset: Dataset) -> None:
        try:
            copy: Dataset = pickle.loads(pickle.dumps(dataset))  # noqa: S301 - made here
        except (pickle.PicklingError, TypeError, AttributeError):
            pytest.skip("the dataset cannot be pickled, so one process tokenizes it")
        assert [dict(copy[row]) for row in range(len(copy))] == [dict(row) for row in self.rows]
        assert copy.fingerprint() == dataset.fingerprint()

    def test_a_row_that_cannot_be_read_is_a_data_error_that_says_where(self, tmp_path: Path) -> None:
        folder = tmp_path / "damaged"
        folder.mkdir()
        damaged = self.make_damaged(folder)
        if damaged is None:
            pytest.skip("make_damaged returns no dataset")
        assert len(damaged) == 3
        assert damaged[0]
        assert damaged[2]
        with pytest.raises(DataError) as error:
            damaged[1]
        assert damaged.location(1) in str(error.value)
        if isinstance(damaged, CheckableDataset):
            with pytest.raises(DataError):
                damaged.check()
