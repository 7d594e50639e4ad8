"""Data files that would fill memory or never end are refused, or their rows left out, before that happens."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.errors import DataError, listing, suggestion
from spurline_text.configs import HfDatasetConfig, HfStreamConfig, TableLimits
from spurline_text.datasets import json_rows, local_files, table_checks
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.datasets.json_rows import JsonArray
from spurline_text.datasets.row_streams import HfStream
from spurline_text.datasets.table_checks import check_rows, open_parquet
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
    for name, kind in (("pipe.jsonl", "a pipe"), ("socket.jsonl", "a socket"), ("/dev/zero", "a device")):
        with pytest.raises(DataError, match=rf"{name}: is {kind} and no regular file"):
            opened(Path(tmp_path, name))
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    assert len(opened(tmp_path)) == 1


def test_links_among_folders_are_no_tree_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(".")
    assert len(opened(tmp_path)) == 1
    monkeypatch.setattr(local_files, "_MAX_MATCHES", 500)
    with pytest.raises(DataError, match=r"matches more than 500 names, among them .*write the way without \*\*"):
        opened(tmp_path / "**" / "*.jsonl")


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz", "rows.pkl", "rows.pt", "rows.py"])
def test_files_that_may_hold_objects_or_programs_are_not_opened(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([{"text": "a"}], dtype=object), allow_pickle=True)
    (tmp_path / "rows.npy").rename(tmp_path / name)
    with pytest.raises(DataError, match="cannot read files ending in"):
        opened(tmp_path / name)
    with pytest.raises(DataError, match="has no file ending in"):
        opened(tmp_path)


# JSON


def test_a_row_that_is_too_large_is_named_or_left_out_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"n": 0}\n{"text": "')
        file.truncate(64 * MB)
        file.seek(0, 2)
        file.write(b'"}\n\n{"n": 2}')
    tracemalloc.start()
    with pytest.raises(DataError, match=r"rows\.jsonl:2: a row has more than 1,048,576 bytes.*max_row_mb"):
        opened(path, max_row_mb=1)
    dataset = opened(path, max_row_mb=1, on_bad_row="skip")
    assert (dataset[0], dataset[2], dataset.location(2)) == ({"n": 0}, {"n": 2}, f"{path}:4")
    rows = stream(path, max_row_mb=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (rows[0], rows[2]) == ({"n": 0}, {"n": 2})
    assert isinstance(rows[1], DataError)
    assert peak < 8 * MB


def test_a_reader_that_goes_on_after_a_row_that_is_too_large_is_at_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "' + b"a" * (3 * MB) + b'"}\n{"n": 1}\n')
    source = HfStream(HfStreamConfig(path=str(path), max_row_mb=1))
    reader = source.open()
    assert isinstance(reader.read().values, DataError)  # type: ignore[union-attr]
    row = source.open(reader.position()).read()
    assert row is not None
    assert (row.values, row.location) == ({"n": 1}, f"{path}:2")


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


def test_a_list_in_a_file_is_read_a_row_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [{"text": "ä" * 5000, "n": n} for n in range(1500)]
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    tracemalloc.start()
    dataset = opened(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [dataset[row] for row in (0, 777, 1499)] == [rows[row] for row in (0, 777, 1499)]
    assert path.stat().st_size > 14 * MB
    assert peak < 8 * MB
    path.write_text(json.dumps([{"text": "a" * 3 * MB}]))
    with pytest.raises(DataError, match=r"rows\.json row 0: a row has more than 1,048,576 bytes"):
        opened(path, max_row_mb=1)


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
        opened(path, max_row_mb=1)


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
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 0, 1]),
    plain=st.booleans(),
    cut=st.none() | st.integers(0, 60),
)
def test_a_list_is_read_as_the_json_library_reads_it(
    rows: list[Any], chunk: int, indent: int | None, plain: bool, cut: int | None, tmp_path_factory: Any
) -> None:
    """In pieces of any size; and where it is cut off or goes on, it is an error for both."""
    text = json.dumps(rows, indent=indent, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    content = text if cut is None else text[:-cut] + b"]" * (cut % 2) if cut else text + b" 1"
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK_BYTES", chunk)
        try:
            expected = json.loads(content)
        except ValueError:
            with pytest.raises(DataError, match=r"array\.json:\d+: not valid"):
                JsonArray(path, TableLimits(MB, 1))
            return
        found = JsonArray(path, TableLimits(MB, 1))
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
    assert listing(["x" * MB]) == "x" * 300 + "..."


# Tables


def write_parquet(path: Path, table: pyarrow.Table, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    return path


def repeated(text: str, rows: int) -> pyarrow.Array:
    """One text, held once, for all rows."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(rows, np.int32)), pyarrow.array([text]))


def nested(values: pyarrow.Array, per_row: int) -> pyarrow.Array:
    offsets = pyarrow.array(range(0, len(values) + 1, per_row), pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, pyarrow.StructArray.from_arrays([values], ["content"]))


@pytest.mark.parametrize("shape", ["texts", "messages", "numbers", "numbers without end"])
def test_a_small_file_that_stands_for_an_endless_table_is_refused(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_checks, "_ALWAYS_ALLOWED_BYTES", 64 * MB)
    columns: dict[str, Any] = {
        "texts": lambda: repeated("a" * MB, 20_000),
        "messages": lambda: nested(repeated("a" * MB, 20_000), 4),
        "numbers": lambda: pyarrow.array(np.zeros((9_000_000), np.int64)),
        "numbers without end": lambda: nested(pyarrow.array(np.zeros((9_000_000), np.int64)), 100_000),
    }
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"x": columns[shape]()}))
    before = pyarrow.default_memory_pool().max_memory()
    with pytest.raises(DataError, match=r"rows\.parquet: stands for a table of more than 67,108,864 bytes.*max_exp"):
        opened(path)
    assert pyarrow.default_memory_pool().max_memory() - before < 64 * MB


def test_a_table_that_is_repetitive_but_not_endless_is_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"text": repeated("a" * 1000, 5000)}))
    assert opened(path)[4999] == {"text": "a" * 1000}


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_row_of_a_table_that_is_too_large_is_named(dictionary: bool, inside: bool, tmp_path: Path) -> None:
    texts = pyarrow.array(["a", "b" * 3 * MB, *"c" * 2000])
    column = nested(texts, 1) if inside else texts
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"x": column}), use_dictionary=dictionary)
    with pytest.raises(DataError, match=r"rows\.parquet row 1: a row has more than 1,048,576 bytes"):
        opened(path, max_row_mb=1)
    with pytest.raises(DataError, match=r"rows\.parquet row 1: a row has more than 1,048,576 bytes"):
        stream(path, max_row_mb=1)
    assert len(opened(path, max_row_mb=4)) == len(stream(path)) == 2002


def test_a_row_that_the_files_own_description_gives_away_is_not_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", pyarrow.table({"x": ["a" * 9 * MB]}), use_dictionary=False)
    before = pyarrow.default_memory_pool().max_memory()
    with pytest.raises(DataError, match=r"rows\.parquet row group 0: a row has more than 1,048,576 bytes"):
        opened(path, max_row_mb=1)
    assert pyarrow.default_memory_pool().max_memory() == before


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "text": st.none() | st.sampled_from(["", "a", "äöü" * 9]),
                "messages": st.none()
                | st.lists(st.none() | st.sampled_from([{"content": "a" * 40}, {"content": None}])),
                "ids": st.none() | st.lists(st.integers(0, 9)),
            }
        ),
        min_size=1,
        max_size=20,
    )
)
def test_checked_tables_have_the_rows_that_the_library_reads(rows: list[Any], tmp_path_factory: Any) -> None:
    schema = pyarrow.schema(
        {
            "text": pyarrow.string(),
            "messages": pyarrow.list_(pyarrow.struct({"content": pyarrow.string()})),
            "ids": pyarrow.list_(pyarrow.int64()),
        }
    )
    path = tmp_path_factory.getbasetemp() / "same.parquet"
    table = pyarrow.Table.from_pylist(rows, schema)
    write_parquet(path, table, row_group_size=7)
    with open_parquet(path) as file:
        found = [
            row
            for group in range(file.num_row_groups)
            for batch in file.iter_batches(3, row_groups=[group])
            if check_rows(batch, path, 0, TableLimits(MB, 1)) >= 0
            for row in batch.to_pylist()
        ]
    assert found == table.to_pylist()


def test_csv_rows_that_are_too_large_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for begin, line in (("x" * 3 * MB, 2001), ('x,"' + "a\n" * 2 * MB, 2001)):
        path.write_text("text,n\na,1\n" * 1000 + begin)
        with pytest.raises(DataError, match=rf"rows\.csv:{line}: a row has more than 1,048,576 bytes"):
            opened(path, max_row_mb=1)
    path.write_text("x" * 3 * MB)
    with pytest.raises(DataError, match=r"rows\.csv:1: a row has more than 1,048,576 bytes"):
        opened(path, max_row_mb=1)
    # A field beyond what Python's own reader takes by itself is no attack.
    path.write_text(f'text,n\n"{"a" * 200_000}",1\n' * 6)
    assert len(opened(path, max_row_mb=1)) == 11


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
