"""Dataset `rows_where`: the rows of another dataset that have a certain value in a column."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from spurline.plugins.registry import Registry
from spurline.protocols.dataset import Dataset
from spurline_plugin_template.config import RowsWhereConfig


class RowsWhere:
    """Selects the rows when the first of them is needed. The other dataset may be any that a plugin offers."""

    def __init__(self, config: RowsWhereConfig, *, registry: Registry) -> None:
        # Keep the dataset only. A registry cannot be pickled, and the processes that tokenize get a pickled copy.
        self._rows: Dataset = registry.create("dataset", config.of, registry=registry)
        self._config = config
        self.label = config.label or self._rows.label

    @cached_property
    def _chosen(self) -> list[int]:
        column, values = self._config.column, self._config.values
        return [row for row in range(len(self._rows)) if str(self._rows[row].get(column)) in values]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        if row < 0:
            raise IndexError(row)
        return self._rows[self._chosen[row]]

    def location(self, row: int) -> str:
        return self._rows.location(self._chosen[row])

    def fingerprint(self) -> str:
        return f"{self._rows.fingerprint()}[{self._config.column} in {sorted(self._config.values)}]"
