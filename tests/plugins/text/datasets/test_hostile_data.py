"""Data files that are broken, or are no data, are errors that say where."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.errors import DataError, suggestion
from spurline_text.configs import HfDatasetConfig, HfStreamConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.datasets.json_rows import JsonArray
from spurline_text.datasets.row_streams import HfStream
from spurline_text.rows.rows import BadRowError, RowView, absent_column_problem, describe

MB = 1 << 20


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
    with pytest.raises(DataError, match=r"rows\.json(l:1| row 0): not (valid|readable) JSON"):
        opened(path)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"a": 1,}', "Expecting property name enclosed in double quotes (column 9)"),
        ('{"a" 1}', "Expecting ':' delimiter (column 6)"),
        ('{"a": tru}', "Expecting value (column 7)"),
        ('{"a": "\\x"}', "Invalid \\escape (column 8)"),
        ('{"a": "b}', "Invalid control character at (column 11)"),
    ],
)
def test_a_mistake_in_a_long_list_is_named_where_it_is(broken: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = json.dumps({"a": "b" * 1000})
    path.write_text("[" + ",\n".join([row, row, broken, *[row] * 3000]) + "]")
    with pytest.raises(DataError, match=rf"rows\.json:3: not valid JSON: {re.escape(message)}"):
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=6),
    indent=st.sampled_from([None, 0, 1]),
    plain=st.booleans(),
    cut=st.none() | st.integers(0, 60),
)
def test_a_list_is_read_as_the_json_library_reads_it(
    rows: list[Any], indent: int | None, plain: bool, cut: int | None, tmp_path_factory: Any
) -> None:
    """Where it is cut off or goes on, it is an error for both."""
    text = json.dumps(rows, indent=indent, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    content = text if cut is None else text[:-cut] + b"]" * (cut % 2) if cut else text + b" 1"
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_bytes(content)
    try:
        expected = json.loads(content)
    except ValueError:
        with pytest.raises(DataError, match=r"array\.json:\d+: not valid"):
            JsonArray(path)
        return
    found = JsonArray(path)
    assert [found[row] for row in range(len(found))] == expected


# Names without end


def test_a_row_of_a_million_columns_is_said_in_a_few_words() -> None:
    row: dict[str, Any] = {f"column {number}": number for number in range(200_000)} | {"x" * MB: 1}
    with pytest.raises(BadRowError, match=r"has: .* and 199,901 more") as failure:
        RowView(row, {}).require("messages")
    assert len(str(failure.value)) < 10_000
    assert len(describe(row)) < 10_000
    assert len(str(absent_column_problem({"text": "body"}, [row]))) < 40_000
    assert suggestion("y" * MB, ["x" * 200, "x" * MB]) == ""


# Tables


def write_parquet(path: Path, table: pyarrow.Table, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    return path


@pytest.mark.parametrize("kind", [HfDatasetConfig, HfStreamConfig])
def test_a_damaged_row_group_is_an_error_that_names_it(kind: type[HfDatasetConfig], tmp_path: Path) -> None:
    texts = pyarrow.array([f"row {number} " + "ab" * number for number in range(300)])
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"text": texts}), row_group_size=100)
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.parquet row group 1: cannot be read"):
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
    for ask in (lambda: dataset[0], lambda: dataset.arrow(0, 8)):
        with pytest.raises(DataError, match=r"rows 0 to 7: are not what the file says they are"):
            ask()


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
