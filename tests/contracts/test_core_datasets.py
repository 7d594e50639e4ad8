"""Core's dataset passes the contract for each way in which rows are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spurline.protocols.dataset import Dataset
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.testing import DatasetContract


class TestJsonLines(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rows.jsonl").write_text(text, encoding="utf-8")
        return HfDataset(HfDatasetConfig(path=str(folder / "rows.jsonl")))

    def make_damaged(self, folder: Path) -> Dataset:
        (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n{"prompt": "b"}\n', encoding="utf-8")
        return HfDataset(HfDatasetConfig(path=str(folder / "rows.jsonl")))


class TestParquet(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), folder / "rows.parquet")
        return HfDataset(HfDatasetConfig(path=str(folder / "rows.parquet")))


class TestSeveralFiles(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        for number, part in enumerate((rows[:4], rows[4:])):
            (folder / f"part-{number}.json").write_text(json.dumps(list(part)), encoding="utf-8")
        return HfDataset(HfDatasetConfig(path=f"{folder}/*.json"))
