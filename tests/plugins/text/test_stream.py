"""Source `stream`: one block in memory, an order by seed, and an exact place to go on from."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from spurline import load_config
from spurline.errors import CheckpointError, ConfigError, DataError
from spurline.protocols.source import SourceContext
from spurline.run.checkpoints.state_files import read_state, write_state
from spurline_text import hub
from spurline_text.configs import HfStreamConfig
from spurline_text.datasets.row_streams import HfStream, JsonLinesReader, TableReader
from spurline_text.sources.stream import StreamSource
from spurline_text.tokenizer import load_tokenizer

NUM_ROWS = 50


def write(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> str:
    """The rows in three files of unequal size; returns the glob."""
    for number, (start, stop) in enumerate(pairwise((0, 7, 30, len(rows)))):
        path, part = folder / f"part-{number}.{suffix}", rows[start:stop]
        if suffix == "jsonl":
            path.write_text("\n".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=5)
    return f"{folder}/*.{suffix}"


ROWS = [{"text": f"{number:04d} " + "word " * (number % 5)} for number in range(NUM_ROWS)]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path, "jsonl", ROWS)


def make_source(model: Path, train: Any, **settings: Any) -> StreamSource:
    config = {
        "model": {"path": str(model)},
        "data": {"train": train, "max_length": 64},
        "source": {
            "name": "stream",
            "buffer_rows": settings.pop("buffer_rows", 12),
            "shuffle": settings.pop("shuffle", True),
        },
        "collator": {"name": "core/packed", "max_tokens": 128},
        "batch_size": settings.pop("batch_size", 4),
        "steps": 200,
        **settings,
    }
    loaded = load_config(config)
    run = loaded.config
    context = SourceContext(run, loaded.host, load_tokenizer(run.model), run.backend.layout())
    return loaded.host.registry.create("source", run.source, context=context)


def stream(path: str, **settings: Any) -> dict[str, Any]:
    return {"name": "hf_stream", "path": path, **settings}


def contents(source: StreamSource, first: int, last: int) -> list[list[int]]:
    return [source.build(step).tokens["input_ids"].flatten().tolist() for step in range(first, last + 1)]


def uids(source: StreamSource, first: int, last: int) -> list[str]:
    return [uid for step in range(first, last + 1) for uid in source.build(step).segments["uid"].values.tolist()]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 13])
def test_a_run_that_was_cut_goes_on_with_the_very_same_batches(
    spurline_tiny_model: Path, tmp_path: Path, suffix: str, cut: int
) -> None:
    path = write(tmp_path, suffix, ROWS)
    whole = contents(make_source(spurline_tiny_model, stream(path)), 1, 30)
    before = make_source(spurline_tiny_model, stream(path))
    assert contents(before, 1, cut) == whole[:cut]
    # Through a file, as a checkpoint holds it.
    write_state(tmp_path / "state" / "source", before.state_dict())
    after = make_source(spurline_tiny_model, stream(path))
    after.load_state_dict(read_state(tmp_path / "state" / "source"))
    assert contents(after, cut + 1, 30) == whole[cut:]


def test_a_parquet_file_without_rows_is_passed_over(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    for name, rows in {"a": table[:0], "b": table}.items():
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    reader = HfStream(HfStreamConfig(name="hf_stream", path=str(tmp_path))).open()
    read = iter(reader.read, None)
    assert [row.values for row in read] == [{"text": "a"}, {"text": "b"}]


def test_each_pass_shows_every_row_once_shuffled_by_the_seed_within_blocks(
    spurline_tiny_model: Path, corpus: str
) -> None:
    first = uids(make_source(spurline_tiny_model, stream(corpus), batch_size=1), 1, 100)
    assert Counter(first[:NUM_ROWS]) == Counter(first[NUM_ROWS:])
    rows = [int(uid.rpartition(":")[2]) for uid in first]
    assert sorted(rows[:NUM_ROWS]) == list(range(NUM_ROWS))
    for start in range(0, 48, 12):
        assert sorted(rows[start : start + 12]) == list(range(start, start + 12))
    assert rows[:12] != list(range(12))
    assert rows[NUM_ROWS : NUM_ROWS + 12] != rows[:12]
    again = make_source(spurline_tiny_model, stream(corpus), batch_size=1)
    other = make_source(spurline_tiny_model, stream(corpus), batch_size=1, seed=5)
    assert uids(again, 1, 100) == first
    assert uids(other, 1, 100) != first
    # Samples that are still to come may have the most tokens that are allowed.
    assert (again.longest().tokens, again.longest().setting) == (64, "data.max_length")
    in_order = make_source(spurline_tiny_model, stream(corpus), batch_size=1, shuffle=False)
    assert [int(uid.rpartition(":")[2]) for uid in uids(in_order, 1, 50)] == list(range(NUM_ROWS))
    assert in_order.epoch(50) == 0.0


def test_no_more_rows_than_a_block_are_read_ahead(
    spurline_tiny_model: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    original = JsonLinesReader.read

    def counting(reader: JsonLinesReader) -> Any:
        nonlocal read
        read += 1
        return original(reader)

    monkeypatch.setattr(JsonLinesReader, "read", counting)
    source = make_source(spurline_tiny_model, stream(corpus), batch_size=4, buffer_rows=12)
    assert read == 12
    for step in range(1, 4):
        source.build(step)
    assert read == 12
    source.build(4)
    assert read == 24


def test_streams_are_mixed_by_their_weights_and_a_short_one_keeps_its_share(
    spurline_tiny_model: Path, tmp_path: Path
) -> None:
    for name, rows in (("long", ROWS), ("short", ROWS[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    weights = {"long": 3, "short": 1}
    entries = [stream(f"{tmp_path}/{name}.jsonl", label=name, weight=weights[name]) for name in weights]
    source = make_source(spurline_tiny_model, entries, batch_size=4, buffer_rows=20)
    seen = uids(source, 1, 10)
    assert Counter(uid.partition(":")[0] for uid in seen) == {"long": 30, "short": 10}
    assert {uid for uid in seen if uid.startswith("short")} == {"short:0", "short:1", "short:2"}
    later = make_source(spurline_tiny_model, entries, batch_size=4, buffer_rows=20)
    later.load_state_dict(source.state_dict())
    assert uids(later, 11, 15) == uids(source, 11, 15)


def test_rows_left_out_are_counted_on_where_a_whole_block_of_them_was_passed_over(
    spurline_tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(ROWS[number] if number < 4 or number > 11 else {"text": 5}) for number in range(20)]
    path.write_text("\n".join(lines), encoding="utf-8")
    settings = {"buffer_rows": 4, "batch_size": 2}
    source = make_source(spurline_tiny_model, stream(str(path), on_bad_row="skip"), **settings)
    contents(source, 1, 3)
    later = make_source(spurline_tiny_model, stream(str(path), on_bad_row="skip"), **settings)
    later.load_state_dict(source.state_dict())
    assert later.build(4).info["stream/left_out"] == source.build(4).info["stream/left_out"] == 8.0


def test_bad_rows_stop_the_run_or_are_left_out_wherever_they_are(spurline_tiny_model: Path, tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[2], lines[20] = '{"text": 5}', '{"text": '
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:3: text is a number"):
        make_source(spurline_tiny_model, stream(str(path)))
    source = make_source(spurline_tiny_model, stream(str(path), on_bad_row="skip"), batch_size=8)
    seen = [source.build(step) for step in range(1, 7)]
    assert seen[-1].info["stream/left_out"] == 2.0


def test_a_resume_on_other_data_is_refused(spurline_tiny_model: Path, tmp_path: Path) -> None:
    source = make_source(spurline_tiny_model, stream(write(tmp_path, "jsonl", ROWS)))
    source.build(1)
    path = write(tmp_path, "jsonl", [{"text": f"other {row['text']}"} for row in ROWS])
    with pytest.raises(CheckpointError, match="next data of the stream"):
        make_source(spurline_tiny_model, stream(path)).load_state_dict(source.state_dict())


def test_data_without_rows_or_usable_rows_is_an_error(spurline_tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows: has no rows"):
        make_source(spurline_tiny_model, stream(str(path)))
    path.write_text('{"text": ""}\n' * 9, encoding="utf-8")
    with pytest.raises(DataError, match=r"rows: no usable sample in a whole pass"):
        make_source(spurline_tiny_model, stream(str(path)), buffer_rows=4)
    (tmp_path / "rows.csv").write_text("text\na\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.csv: cannot be read as a stream"):
        make_source(spurline_tiny_model, stream(str(tmp_path / "rows.csv")))


def test_settings_that_do_not_fit_a_stream_are_refused(spurline_tiny_model: Path, corpus: str) -> None:
    with pytest.raises(ConfigError, match=r"source\.name is stream.*Set steps"):
        make_source(spurline_tiny_model, stream(corpus), steps=None, epochs=1)
    with pytest.raises(ConfigError, match=r"source\.name is stream, but dataset 'hf' has name: hf"):
        make_source(spurline_tiny_model, corpus)
    with pytest.raises(ConfigError, match=r"data\.train\.0\.name is hf_stream.*Set source: stream"):
        make_source(spurline_tiny_model, stream(corpus), source="sft")
    held_out = {"train": stream(corpus), "eval": stream(corpus, label="held out"), "max_length": 64}
    with pytest.raises(ConfigError, match=r"data\.eval\.0\.name is hf_stream.*reads a stream\. Set name: hf\."):
        make_source(spurline_tiny_model, None, data=held_out)


def test_a_hub_stream_that_cannot_be_reached_is_asked_for_once(
    connected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "_last_answer", None)
    with pytest.raises(DataError, match="someone/rows: cannot be streamed from the Hugging Face hub"):
        HfStream(HfStreamConfig(path="someone/rows")).open()
    assert connected == [("127.0.0.1", 9)]


def test_a_hub_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    write(tmp_path, "parquet", ROWS)

    def open_rows() -> datasets.IterableDataset:
        files = sorted(str(path) for path in tmp_path.glob("*.parquet"))
        made = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        assert isinstance(made, datasets.IterableDataset)
        return made

    for cut in (0, 1, 8, 33):
        reader = TableReader(open_rows(), "org/rows", None, {})
        for _ in range(cut):
            assert reader.read() is not None
        position = json.loads(json.dumps(reader.position()))
        # A run that ends before it reads on keeps its place all the same.
        untouched = TableReader(open_rows(), "org/rows", position, {})
        assert untouched.position() == position
        again = TableReader(open_rows(), "org/rows", untouched.position(), {})
        rest = []
        while (row := again.read()) is not None:
            rest.append((row.values, row.location))
        assert rest == [(ROWS[number], f"org/rows row {number}") for number in range(cut, NUM_ROWS)]
