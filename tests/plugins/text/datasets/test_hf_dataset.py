"""The `hf` dataset: what a path stands for, where rows are, and what is said when they cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import datasets
import pytest

from spurline.errors import DataError
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """A cache of its own, a fresh working folder, and no network."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"went to the network: {args}")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("spurline_text.datasets.arrow_rows.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def open_data(path, **settings) -> HfDataset:
    """Opened and checked, as before tokenization."""
    dataset = HfDataset(HfDatasetConfig(path=str(path), **settings))
    dataset.check()
    return dataset


def rows_of(dataset) -> list[dict]:
    return [dict(dataset[row]) for row in range(len(dataset))]


def write_lines(path, *lines: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{line}\n" for line in lines))
    return Path(path)


def numbered(path, count: int, start: int = 0) -> Path:
    return write_lines(path, *(json.dumps({"n": n}) for n in range(start, start + count)))


def test_json_lines_know_the_line_of_each_row_past_blank_lines():
    write_lines("train.jsonl", '{"n": 0}', "", "  ", '{"n": 1}')
    dataset = open_data("train.jsonl")
    assert rows_of(dataset) == [{"n": 0}, {"n": 1}]
    assert [dataset.location(0), dataset.location(1)] == ["train.jsonl:1", "train.jsonl:4"]
    assert dataset.label == "train"
    assert open_data("train.jsonl", label="mine").label == "mine"


def test_rows_whose_fields_differ_in_type_are_read():
    write_lines("train.jsonl", '{"a": 1}', '{"a": "x", "b": {"c": null}}', '{"a": [1, "y"]}')
    assert rows_of(open_data("train.jsonl")) == [{"a": 1}, {"a": "x", "b": {"c": None}}, {"a": [1, "y"]}]


def test_a_json_list_and_json_lines_named_json_are_read():
    Path("list.json").write_text('[\n {"n": 0},\n {"n": 1}\n]')
    dataset = open_data("list.json")
    assert rows_of(dataset) == [{"n": 0}, {"n": 1}]
    assert dataset.location(1) == "list.json row 1"
    dataset = open_data(numbered("lines.json", 2))
    assert dataset.location(1) == "lines.json:2"


def test_a_byte_order_mark_is_no_part_of_the_data():
    Path("train.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 0}\n{"n": 1}\n')
    Path("list.json").write_bytes(b'\xef\xbb\xbf[{"n": 0}, {"n": 1}]')
    assert rows_of(open_data("train.jsonl")) == rows_of(open_data("list.json")) == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.jsonl", b'{"n": 0}\n{"n": \n', "train.jsonl:2: not valid JSON: Expecting value (column 7)."),
        ("train.jsonl", gzip.compress(b'{"n": 0}\n', mtime=0), "train.jsonl:1: not valid JSON: 'utf-8' codec"),
        ("train.jsonl", b'{"n": 0}\n[1]\n', "train.jsonl:2: is a list, expected a JSON object with named fields."),
        ("train.jsonl", b'{"n": 0}\n{"n": "\xff"}\n', "train.jsonl:2: not valid JSON: 'utf-8' codec"),
        ("train.jsonl", b'[{"n": 0}]\n', "A file with one JSON list should end in .json."),
        ("train.jsonl", b"", "train.jsonl: split 'train' is empty; the data has 0 rows."),
        ("train.jsonl", b"\n\n", "split 'train' is empty"),
        ("train.json", b'[\n{"n": 0},\n{"n" 1}\n]', "not valid JSON: Expecting ':' delimiter (line 3, column 6)."),
        ("train.json", b'[{"n": 0}, 3]', "row 1: is a number (3), expected a JSON object with named fields."),
        ("train.json", b'{\n"data": []\n}', "Expected one object per line, or in a .json file a list of objects"),
        ("train.json", b"[]", "train.json: split 'train' is empty"),
        ("rows.csv", b"a,b\n1,2\n1,2,3,4\n", "rows.csv: cannot be read: Error tokenizing data. C error: Expected 2"),
        ("rows.csv", b"", "rows.csv: is empty."),
        ("rows.csv", b"a,b\n", "rows.csv: is empty; it has no rows."),
        ("rows.parquet", b"not parquet", "rows.parquet: cannot be read: "),
        ("rows.arrow", b"not arrow", "rows.arrow: cannot be read: "),
    ],
)
def test_a_malformed_file_is_an_error_naming_file_and_place(name, content, problem):
    Path(name).write_bytes(content)
    with pytest.raises(DataError) as error:
        open_data(name)
    assert str(error.value).startswith(name)
    assert problem in str(error.value)


def test_a_malformed_line_outside_the_split_or_in_a_skipping_dataset_does_not_stop_the_run():
    write_lines("train.jsonl", '{"n": 0}', '{"n": 1', '{"n": 2}')
    assert len(open_data("train.jsonl", split="train[:1]")) == 1
    dataset = open_data("train.jsonl", on_bad_row="skip")
    assert dataset[2] == {"n": 2}
    with pytest.raises(DataError, match=r"^train\.jsonl:2: not valid JSON"):
        dataset[1]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:3]", [0, 1, 2]),
        ("train[10%:50%]", [1, 2, 3, 4]),
        ("train[-2:]", [8, 9]),
        ("train[:99]", list(range(10))),
        ("train[8:]+train[:1]", [8, 9, 0]),
    ],
)
def test_split_strings_choose_rows_of_local_files_and_keep_their_places(split, expected):
    numbered("train.jsonl", 10)
    dataset = open_data("train.jsonl", split=split)
    assert [row["n"] for row in rows_of(dataset)] == expected
    assert dataset.location(0) == f"train.jsonl:{expected[0] + 1}"


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ("train[3", "split 'train[3' cannot be read"),
        ("train[:300%]", "split 'train[:300%]' cannot be read"),
        ("trian", "has no split 'trian'. Did you mean 'train'? Splits: train."),
        ("train[5:5]", "split 'train[5:5]' is empty; the data has 10 rows."),
    ],
)
def test_a_wrong_split_string_is_an_error_with_what_there_is(split, problem):
    numbered("train.jsonl", 10)
    with pytest.raises(DataError) as error:
        open_data("train.jsonl", split=split)
    assert str(error.value).startswith("train.jsonl: ")
    assert problem in str(error.value)


def test_a_folder_has_splits_by_the_names_of_its_files():
    numbered("data/train-0.jsonl", 2)
    numbered("data/train-1.jsonl", 2, start=2)
    numbered("data/test.jsonl", 1, start=9)
    Path("data/README.md").write_text("no data")
    dataset = open_data("data")
    assert [row["n"] for row in rows_of(dataset)] == [0, 1, 2, 3]
    assert dataset.location(3) == "data/train-1.jsonl:2"
    assert dataset.label == "data"
    assert [row["n"] for row in rows_of(open_data("data", split="test"))] == [9]
    assert [row["n"] for row in rows_of(open_data("data", split="train[1:3]+test[:1]"))] == [1, 2, 9]
    with pytest.raises(DataError, match=r"data: has no split 'tests'\. Did you mean 'test'\? Splits: test, train\."):
        open_data("data", split="tests")


def test_a_glob_is_one_split_in_order_of_names():
    for name, start in (("b", 2), ("a", 0)):
        numbered(f"parts/{name}.jsonl", 2, start=start)
    dataset = open_data("parts/*.jsonl", split="train[1:3]")
    assert [row["n"] for row in rows_of(dataset)] == [1, 2]
    assert [dataset.location(0), dataset.location(1)] == ["parts/a.jsonl:2", "parts/b.jsonl:1"]
    assert dataset.label == "parts"


def test_parquet_and_arrow_files_and_saved_datasets_are_read():
    table = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": str(n)}]} for n in range(300)])
    table.to_parquet("rows.parquet")
    table.save_to_disk("saved")
    datasets.DatasetDict({"train": table, "test": table.select([7])}).save_to_disk("both")
    [arrow] = Path("saved").glob("*.arrow")
    shutil.copy(arrow, "rows.arrow")
    for path in ("rows.parquet", "rows.arrow", "saved", "both"):
        dataset = open_data(path, split="train[10:]")
        assert len(dataset) == 290
        assert dataset[289] == {"messages": [{"role": "user", "content": "299"}]}
        assert dataset[0]["messages"][0]["content"] == "10"
        assert dataset.location(0) == f"{path} row 10"
    assert open_data("both", split="test")[0]["messages"][0]["content"] == "7"
    assert sorted(os.listdir()) == ["both", "rows.arrow", "rows.parquet", "saved"]


def test_keys_that_arrow_adds_to_objects_are_taken_away_again():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    other = {"role": "assistant", "content": "x", "tool_calls": [{"name": "g", "arguments": {"b": "y"}}]}
    datasets.Dataset.from_list([{"messages": [call]}, {"messages": [other]}]).to_parquet("rows.parquet")
    first = open_data("rows.parquet")[0]["messages"][0]
    assert first["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


def test_csv_cells_stay_text_whatever_they_look_like():
    Path("rows.csv").write_text('prompt,completion\n"6 x 7?",42\nNA,\n"a\nb",true\n')
    dataset = open_data("rows.csv")
    assert rows_of(dataset) == [
        {"prompt": "6 x 7?", "completion": "42"},
        {"prompt": "NA", "completion": ""},
        {"prompt": "a\nb", "completion": "true"},
    ]
    assert dataset.location(1) == "rows.csv row 1"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("data/trian.jsonl", "data/trian.jsonl: no such file or folder. Did you mean 'train.jsonl'?"),
        ("data/zzz.json", "contains: train.jsonl."),
        ("dato/train.jsonl", "Did you mean 'data'?"),
        ("./nothing", "./nothing: no such file or folder."),
        ("/nowhere/at/all", "/nowhere/at/all: no such file or folder. / contains: "),
        ("a/b/c", "a/b/c: no such file or folder."),
        ("data/*.parquet", "data/*.parquet: matches no file ending in .jsonl"),
        ("notes", "notes: has no file ending in .jsonl, .json, .parquet, .arrow, .csv. It contains: notes.txt."),
        ("notes/notes.txt", "notes/notes.txt: cannot read files ending in '.txt'. Known: .jsonl"),
    ],
)
def test_a_path_that_looks_local_never_goes_to_the_network_and_names_near_misses(path, problem):
    numbered("data/train.jsonl", 1)
    write_lines("notes/notes.txt", "hello")
    with pytest.raises(DataError) as error:
        open_data(path)
    assert problem in str(error.value)


def test_hub_settings_on_a_local_path_are_an_error():
    numbered("train.jsonl", 1)
    with pytest.raises(DataError, match=r"train\.jsonl: subset is for hub datasets"):
        open_data("train.jsonl", subset="main")


def test_a_hub_name_that_cannot_be_loaded_says_so_in_one_line(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'org/data' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError) as error:
        open_data("org/data")
    assert str(error.value) == (
        "org/data: cannot be loaded from the Hugging Face hub: Couldn't reach 'org/data' on the Hub. "
        "There is no local file or folder org/data either. If you meant a local path, write ./ before it."
    )


def test_a_hub_dataset_gets_name_subset_split_and_revision(monkeypatch):
    asked = []
    table = datasets.Dataset.from_list([{"n": n} for n in range(10)])

    def load(path, **settings):
        asked.append((path, settings))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    dataset = open_data("org/data", subset="main", revision="v1", split="test[:20%]")
    assert asked == [("org/data", {"name": "main", "split": "test", "revision": "v1"})]
    assert [row["n"] for row in rows_of(dataset)] == [0, 1]
    assert (dataset.label, dataset.location(1)) == ("org/data", "org/data row 1")
    fingerprints = {
        dataset.fingerprint(),
        open_data("org/data", subset="main", revision="v2", split="test[:20%]").fingerprint(),
        open_data("org/data", subset="other", revision="v1", split="test[:20%]").fingerprint(),
        open_data("org/data", subset="main", revision="v1", split="test[:30%]").fingerprint(),
    }
    assert len(fingerprints) == 4


def test_the_fingerprint_follows_content_and_split_and_not_the_place():
    numbered("a/train.jsonl", 4)
    numbered("b/other.jsonl", 4)
    numbered("c/train.jsonl", 4, start=1)
    first = open_data("a/train.jsonl").fingerprint()
    assert open_data("b/other.jsonl").fingerprint() == first
    assert open_data("c/train.jsonl").fingerprint() != first
    assert open_data("a/train.jsonl", split="train[:2]").fingerprint() != first
    assert open_data("a/train.jsonl", split="train[:100%]").fingerprint() == first


def test_a_changed_file_is_read_again_even_with_its_old_time_and_size():
    Path("rows.csv").write_text("a,b\n1,2\n")
    before = Path("rows.csv").stat()
    first = open_data("rows.csv")
    fingerprint = first.fingerprint()
    Path("rows.csv").write_text("a,b\n1,3\n")
    os.utime("rows.csv", ns=(before.st_atime_ns, before.st_mtime_ns))
    second = open_data("rows.csv")
    assert (rows_of(first), rows_of(second)) == ([{"a": "1", "b": "2"}], [{"a": "1", "b": "3"}])
    assert fingerprint != second.fingerprint()
    assert first.fingerprint() == second.fingerprint(), "a change under an open dataset must show"


@pytest.mark.parametrize("split", ["train", "train+test"])
def test_the_fingerprint_of_whole_splits_opens_no_file(split, monkeypatch):
    numbered("data/train.jsonl", 3)
    numbered("data/test.jsonl", 3)
    dataset = HfDataset(HfDatasetConfig(path="data", split=split))
    expected = open_data("data", split=split).fingerprint()

    def refuse(path):
        raise AssertionError(f"opened {path}")

    monkeypatch.setattr("spurline_text.datasets.hf_dataset.JsonLines", refuse)
    assert dataset.fingerprint() == expected
    with pytest.raises(AssertionError, match="opened"):
        len(dataset)


def test_a_dataset_can_be_pickled_for_worker_processes():
    numbered("train.jsonl", 50)
    Path("rows.csv").write_text("a\n1\n")
    for path in ("train.jsonl", "rows.csv"):
        dataset = open_data(path)
        copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301 - our own bytes
        assert rows_of(copy) == rows_of(dataset)
        assert copy.location(0) == dataset.location(0)
        assert copy.fingerprint() == dataset.fingerprint()
