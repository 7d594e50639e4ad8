"""Rows of prompts in a file, a folder or on the hub: whatever `data.train` takes, read by the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spurline.config.loading import load_config
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.rows.rows import absent_column_problem
from spurline_text.tokenization import open_datasets


def prompt_rows(path: str, columns: Mapping[str, str]) -> DatasetToTokenize:
    """The rows, and the settings that they are read with. columns: see `DatasetConfig.columns`.

    Raises DataError for what cannot be found or read, and for columns that are not there.
    """
    train = {"path": path, "columns": dict(columns)}
    # Only the data is read; the rest is what a config must have.
    loaded = load_config({"model": {"path": "none"}, "steps": 1, "data": {"train": train}})
    [opened] = open_datasets(loaded.config.data.train, loaded.host.registry)
    if not len(opened.dataset):
        raise DataError(f"{path} has no rows.")
    return opened


def with_usual_columns(rows: DatasetToTokenize, usual: Mapping[str, str]) -> DatasetToTokenize:
    """The same rows with these columns, where none were given and the first row has them."""
    if rows.config.columns or absent_column_problem(usual, [rows.dataset[0]]) is not None:
        return rows
    return replace(rows, config=rows.config.model_copy(update={"columns": dict(usual)}))
