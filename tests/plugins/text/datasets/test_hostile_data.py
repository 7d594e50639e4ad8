"""Data files that are broken, or are no data, are errors that say where."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from spurline.errors import DataError, suggestion
from spurline_text.configs import HfDatasetConfig, HfStreamConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.datasets.row_streams import HfStream
from spurline_text.rows.rows import BadRowError, RowView, absent_column_problem, describe


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spurline_text.datasets.arrow_rows.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def opened(path: Path, **settings: Any) -> HfDataset:
    dataset = HfDataset(HfDatasetConfig(path=str(path), **settings))
    dataset.check()
    return dataset


def stream(path: Path, **settings: Any) -> list[Any]:
    reader = HfStream(HfStreamConfig(path=str(path), **settings)).open()
    return [row.values for row in iter(reader.read, None)]


# What is no file


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        # Paths of sockets are short.
        monkeypatch.chdir(tmp_path)
        listening.bind("socket.jsonl")
    for name in ("pipe.jsonl", "socket.jsonl", "/dev/zero"):
        with pytest.raises(DataError, match=f"{name}: is not a regular file"):
            opened(Path(tmp_path, name))
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    assert len(opened(tmp_path)) == 1


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz", "rows.pkl", "rows.pt", "rows.py"])
def test_files_that_may_hold_objects_or_programs_are_not_opened(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([{"text": "a"}], dtype=object), allow_pickle=True)
    (tmp_path / "rows.npy").rename(tmp_path / name)
    with pytest.raises(DataError, match="cannot read files ending in"):
        opened(tmp_path / name)
    with pytest.raises(DataError, match="has no file ending in"):
        opened(tmp_path)


# JSON


@pytest.mark.parametrize(
    "value",
    ["[" * 20_000 + "]" * 20_000, '{"a":' * 20_000, "1" * 5000, "-" + "9" * 5000],
    ids=["lists", "objects", "long", "negative"],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_that_no_reader_takes_is_named(value: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text(f'{{"text": {value}}}' if suffix == "jsonl" else f'[{{"text": {value}}}]')
    with pytest.raises(DataError, match=r"rows\.json(l:1)?: not (valid|readable) JSON"):
        opened(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_are_the_same_in_whatever_order_they_are_asked_for(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    rows = [{"n": n, "text": "ä" * (40_000 if n == 50 else n)} for n in range(200)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("[" + ",".join(lines) + "]" if suffix == "json" else "\n".join(lines), encoding="utf-8")
    dataset = opened(path)
    for order in (range(200), range(199, -1, -1), random.Random(0).sample(range(200), 200), range(45, 60)):
        assert [dataset[row] for row in order] == [rows[row] for row in order]


# Names without end


def test_a_row_of_a_million_columns_is_said_in_a_few_words() -> None:
    row: dict[str, Any] = {f"column {number}": number for number in range(200_000)} | {"x" * 2**20: 1}
    with pytest.raises(BadRowError, match=r"has: .* and 199,901 more") as failure:
        RowView(row, {}).require("messages")
    assert len(str(failure.value)) < 10_000
    assert len(describe(row)) < 10_000
    assert len(str(absent_column_problem({"text": "body"}, [row]))) < 40_000
    assert suggestion("y" * 2**20, ["x" * 200, "x" * 2**20]) == ""


# Tables


def write_parquet(path: Path, table: pyarrow.Table, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    return path


@pytest.mark.parametrize("kind", [HfDatasetConfig, HfStreamConfig])
def test_a_damaged_table_is_an_error_that_names_it(kind: type[HfDatasetConfig], tmp_path: Path) -> None:
    texts = pyarrow.array([f"row {number} " + "ab" * number for number in range(300)])
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"text": texts}), row_group_size=100)
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.parquet.*: cannot be read"):
        stream(path) if kind is HfStreamConfig else len(opened(path))


def test_offsets_that_point_anywhere_are_an_error_and_no_crash(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["some text"] * 8}).save_to_disk(str(tmp_path / "saved"))
    offsets = np.array([0, 9, 2**31 - 1, 27, 36, 45, 54, 63, 72], np.int32)
    (file,) = (tmp_path / "saved").glob("*.arrow")
    # As the library writes it, with one number changed.
    content = file.read_bytes()
    honest = np.arange(0, 73, 9, dtype=np.int32).tobytes()
    assert content.count(honest) == 1
    file.write_bytes(content.replace(honest, offsets.tobytes()))
    dataset = HfDataset(HfDatasetConfig(path=str(tmp_path / "saved")))
    with pytest.raises(DataError, match=r"rows 0 to 7: cannot be read"):
        dataset[0]


def test_columns_that_say_they_are_images_open_no_path_and_no_address(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    place = {"bytes": None, "path": str(tmp_path / "pipe")}
    kinds = {"image": datasets.Image(), "more": datasets.List({"sound": datasets.Audio()}), "text": datasets.Json()}
    schema = datasets.Features(kinds).arrow_schema
    rows = [{"image": place, "more": [{"sound": place}], "text": '{"a": [1, "b"]}'}]
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.Table.from_pylist(rows, schema))
    found = opened(path)[0]
    # What is in the row itself is what it always was.
    assert found["text"] == {"a": [1, "b"]}
    assert (found["image"]["path"], found["more"][0]["sound"]["path"]) == (place["path"], place["path"])
