"""`parallel` gives what `text/sequential` gives, whoever does the work and wherever the tokens are kept."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from run_helpers import wait_for
from worker_rows import TrappedRows, chat_rows, data_config, source

from spurline import load_config
from spurline.config.run_config import DataConfig
from spurline.data.token_store import Tokenized, summarize
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.cache import folder
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization import blocks
from spurline_collation_fast.tokenization import parallel as block_source
from spurline_collation_fast.tokenization.blocks import Chunk, WorkerPool, chunks_of
from spurline_collation_fast.tokenization.parallel import ParallelTokenization, show_progress
from spurline_text.configs import HfDatasetConfig, SequentialTokenizationConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.encoding import RowEncoder
from spurline_text.testing import TokenizationContract
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenization import SequentialTokenization, open_datasets

pytestmark = pytest.mark.usefixtures("warm_workers")

TOKENIZER = tiny_tokenizer()


class TestWhereItIsSoonest(TokenizationContract):
    def make_tokenization(self, tokenizer: Any, data: DataConfig) -> ParallelTokenization:
        return ParallelTokenization(ParallelTokenizationConfig(disable_cache=True), tokenizer=tokenizer, data=data)


def of_rows(patch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Let chunks have so many rows, however short those are."""
    patch.setattr(block_source, "ROWS_PER_CHUNK", num_rows)
    patch.setattr(block_source, "TOKENS_PER_CHUNK", 0)


def sequential(sources: Sequence[DatasetToTokenize], tokenizer: Any = TOKENIZER, **config: Any) -> Tokenized:
    data = data_config(*sources, **config)
    return SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tokenizer, data=data).tokenize(sources)


def parallel(sources: Sequence[DatasetToTokenize], settings: Mapping[str, Any], **config: Any) -> Tokenized:
    made = ParallelTokenizationConfig(**{"disable_cache": True, **settings})
    return ParallelTokenization(made, tokenizer=TOKENIZER, data=data_config(*sources, **config)).tokenize(sources)


def assert_equal(result: Tokenized, expected: Tokenized) -> None:
    for name in ("tokens", "loss_mask", "offsets", "source", "row"):
        got, wanted = getattr(result.store, name), getattr(expected.store, name)
        assert got.dtype == wanted.dtype, name
        assert np.array_equal(got, wanted), name
    assert result.store.labels == expected.store.labels
    for name in ("dropped", "truncated", "examples"):
        assert getattr(result, name) == getattr(expected, name), name


def mixed_files(folder: Path) -> list[DatasetToTokenize]:
    """Datasets of every format, in files, some with rows that are cut, left out or malformed."""
    random = np.random.default_rng(3)
    words = ["alpha", "ἄλφα", "词", "🙂", " ", "\n", "x" * 40]
    text = lambda: " ".join(random.choice(words, random.integers(1, 9)))  # noqa: E731
    chat = [
        {"messages": [{"role": role, "content": text()} for role in ("user", "assistant") * random.integers(1, 3)]}
        for _ in range(300)
    ]
    chat[250] = {"text": "not a conversation"}  # type: ignore[dict-item]
    alpaca = [{"instruction": text(), "input": text() if row % 2 else "", "output": text()} for row in range(90)]
    pairs = [{"prompt": text(), "completion": text()} for _ in range(90)]
    for name, rows in (("chat", chat), ("alpaca", alpaca), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    ids = [random.integers(0, 250, random.integers(1, 200)).tolist() for _ in range(400)]
    trained = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    labels = [kept if len(kept) % 9 else [-100] * len(kept) for kept in trained]
    tokens = pyarrow.table({"input_ids": ids, "labels": labels})
    pyarrow.parquet.write_table(tokens, folder / "tokens.parquet")
    configs = [
        HfDatasetConfig(path=str(folder / name), on_bad_row="skip" if name == "chat.jsonl" else "error")
        for name in ("chat.jsonl", "tokens.parquet", "alpaca.jsonl", "pairs.jsonl")
    ]
    return [DatasetToTokenize(HfDataset(config), config) for config in configs]


def note_workers(patch: pytest.MonkeyPatch) -> list[WorkerPool]:
    """Receives every pool when it is entered."""
    started: list[WorkerPool] = []
    enter = WorkerPool.__enter__
    patch.setattr(WorkerPool, "__enter__", lambda self: started.append(self) or enter(self))
    return started


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, "auto", 1, 3])
def test_datasets_of_every_format_come_out_as_in_the_reference(
    workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = mixed_files(tmp_path)
    of_rows(monkeypatch, 70)
    started = note_workers(monkeypatch)
    rules = {"max_length": 120, "train_on": "all_assistants"}
    expected = sequential(sources, **rules)
    assert {"malformed_row", "no_loss_tokens"} <= expected.dropped.keys()
    assert expected.truncated > 0
    result = parallel(sources, {"workers": workers}, **rules)
    assert_equal(result, expected)
    assert result.notes == ()
    # `auto` would not for so few rows.
    assert [len(pool.process_ids) for pool in started] == [workers] * (workers in (1, 3))


ROWS = st.one_of(
    st.builds(lambda text: {"prompt": text, "completion": text[::-1]}, st.text(max_size=12)),
    st.builds(lambda ids: {"prompt": "p", "completion": "c" * len(ids)}, st.lists(st.none(), max_size=30)),
    st.just({"prompt": "no completion"}),
)


@settings(max_examples=60, deadline=None)
@given(
    row_lists=st.lists(st.lists(ROWS, min_size=1, max_size=12), min_size=1, max_size=3),
    chunk=st.integers(1, 5),
    cores=st.sampled_from([1, 2]),
    max_length=st.integers(2, 20),
    too_long=st.sampled_from(["truncate", "drop", "error"]),
    on_bad_row=st.sampled_from(["skip", "error"]),
)
def test_samples_and_errors_do_not_depend_on_how_rows_are_cut(
    row_lists: list[list[dict[str, str]]], chunk: int, cores: int, max_length: int, too_long: str, on_bad_row: str
) -> None:
    sources = [
        source(TrappedRows(rows, label=f"d{number}"), format="prompt_completion", on_bad_row=on_bad_row)
        for number, rows in enumerate(row_lists)
    ]
    rules = {"max_length": max_length, "too_long": too_long}

    def outcome(tokenize: Any, *arguments: Any) -> Tokenized | str:
        try:
            return tokenize(sources, *arguments, **rules)
        except DataError as error:
            return str(error)

    expected = outcome(sequential)
    with pytest.MonkeyPatch.context() as patch:
        of_rows(patch, chunk)
        patch.setattr(blocks, "available_cores", lambda: cores)
        result = outcome(parallel, {"workers": 0})
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
    else:
        assert_equal(result, expected)


def test_the_first_bad_row_is_the_error_though_later_rows_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = chat_rows(30)
    rows[3] = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * 500}]}
    of_rows(monkeypatch, 4)
    sources = [source(TrappedRows(rows, {4: "cannot be read"}))]
    for tokenize in (sequential, lambda *a, **k: parallel(*a, {"workers": 0}, **k)):
        with pytest.raises(DataError, match=r"rows\.jsonl:4: the sample has"):
            tokenize(sources, max_length=300, too_long="error")


def test_data_that_cannot_be_shared_stays_in_this_process() -> None:
    dataset = TrappedRows(chat_rows(20))
    dataset.open = lambda: None  # type: ignore[attr-defined]
    sources = [source(dataset)]
    result = parallel(sources, {"workers": 2})
    assert_equal(result, sequential(sources))
    [note] = result.notes
    assert note.startswith("tokenized in one process instead of 2: the data cannot be sent to another")


@pytest.mark.processes
def test_the_sections_of_a_whole_run_reach_the_workers(
    spurline_chat_file: Path, spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = note_workers(monkeypatch)
    # The config classes of a run are put together while it is loaded; no module has them.
    loaded = load_config(
        {
            "run_dir": "unused",
            "plugins": ["collation_fast"],
            "model": {"path": str(spurline_tiny_model)},
            "data": {"train": {"path": str(spurline_chat_file), "columns": {"messages": "messages"}}},
            "batch_size": 2,
            "steps": 1,
            "tokenization": {"workers": 1, "disable_cache": True},
        }
    )
    data, registry = loaded.config.data, loaded.host.registry
    sources = open_datasets(data.train, registry, row_limit=40)
    made: Any = registry.create("tokenization", loaded.config.tokenization, tokenizer=TOKENIZER, data=data)
    assert isinstance(made, ParallelTokenization)
    assert_equal(made.tokenize(sources), sequential(sources))
    assert len(started) == 1


class Unread(TrappedRows):
    """Rows that must not be looked at."""

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        raise AssertionError(f"row {row} was read")


def test_tokens_in_the_cache_are_served_without_reading_a_row(tmp_path: Path) -> None:
    cached = {"disable_cache": False, "cache_dir": tmp_path, "workers": 0}
    sources = [source(TrappedRows(chat_rows(30)))]
    expected = sequential(sources, max_length=40)
    first = parallel(sources, cached, max_length=40)
    assert_equal(first, expected)
    assert first.notes == ()
    again = parallel([source(Unread(chat_rows(30)))], cached, max_length=40)
    assert_equal(again, expected)
    [note] = again.notes
    assert note.startswith(f"tokens read from the cache: {tmp_path}")
    assert summarize(again) | {"notes": []} == summarize(expected)


@pytest.mark.parametrize("reason", ["forced", "damaged"])
def test_tokens_are_made_again_when_that_is_forced_or_the_entry_is_damaged(tmp_path: Path, reason: str) -> None:
    cached = {"disable_cache": False, "cache_dir": tmp_path, "workers": 0}
    sources = [source(TrappedRows(chat_rows(5)))]
    parallel(sources, cached)
    [manifest] = tmp_path.glob("*/manifest.json")
    (manifest.parent / "of the old entry").touch()
    if reason == "damaged":
        manifest.write_text("{}")
    again = parallel(sources, {**cached, "force_recache": reason == "forced"})
    assert_equal(again, sequential(sources))
    assert not (manifest.parent / "of the old entry").exists()
    assert ["manifest.json" in note for note in again.notes] == [True] * (reason == "damaged")
    assert [note.split(":")[0] for note in parallel(sources, cached).notes] == ["tokens read from the cache"]


@pytest.mark.parametrize("why", ["a file is in the way", "there is no home"])
def test_a_cache_that_cannot_be_written_keeps_tokens_in_memory_and_says_so(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    sources = [source(TrappedRows(chat_rows(5)))]
    monkeypatch.delenv("SPURLINE_CACHE", raising=False)
    folder = tmp_path / "file" / "cache"
    if why == "there is no home":
        folder = None
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    result = parallel(sources, {"disable_cache": False, "cache_dir": folder, "workers": 0})
    assert_equal(result, sequential(sources))
    [note] = result.notes
    assert "stay in memory" in note
    assert "tokenization.cache_dir" in note


def test_workers_are_started_for_many_rows_on_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, num_rows, expected in ((2, 10**6, 0), (8, 1000, 0), (8, 10**6, 8), (99, 10**6, 64)):
        monkeypatch.setattr(block_source, "available_cores", lambda cores=cores: cores)
        assert block_source._num_workers("auto", num_rows) == expected
    assert [block_source._num_workers(workers, 5) for workers in (0, 3, 9)] == [0, 3, 5]


def test_chunks_stay_within_one_dataset_and_pass_over_empty_ones() -> None:
    sizes = [3, 0, 4]
    assert list(chunks_of(sizes, 1, lambda: 2)) == [Chunk(0, 1, 3), Chunk(2, 0, 2), Chunk(2, 2, 4)]
    assert list(chunks_of(sizes, 2, lambda: 9)) == [Chunk(0, 2, 3), Chunk(2, 0, 4)]
    assert list(chunks_of(sizes, 7, lambda: 2)) == []


def test_chunks_of_short_rows_have_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_source, "TOKENS_PER_CHUNK", 100 * 512)
    chunks: list[int] = []
    encode = RowEncoder.encode_texts
    monkeypatch.setattr(
        RowEncoder, "encode_texts", lambda self, prepared: chunks.append(len(prepared.rows)) or encode(self, prepared)
    )
    rows = [{"prompt": "p" * 50, "completion": "c" * 49} for _ in range(4000)]
    sources = [source(TrappedRows(rows), format="prompt_completion")]
    assert_equal(parallel(sources, {"workers": 0}), sequential(sources))
    assert chunks[0] == 256
    assert 500 < chunks[5] < 520


def test_data_that_changes_under_the_tokenization_is_an_error_and_not_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.jsonl"
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    path.write_text(line * 3)
    config = HfDatasetConfig(path=str(path))
    original = ParallelTokenization._encode

    def encode_while_the_file_grows(self: Any, *arguments: Any) -> Any:
        made = original(self, *arguments)
        path.write_text(line * 4)
        return made

    monkeypatch.setattr(ParallelTokenization, "_encode", encode_while_the_file_grows)
    with pytest.raises(DataError, match="chat: the data changed while it was being tokenized"):
        parallel(
            [DatasetToTokenize(HfDataset(config), config)],
            {"workers": 0, "disable_cache": False, "cache_dir": tmp_path / "cache"},
        )
    assert not list((tmp_path / "cache").rglob("manifest*"))


@pytest.mark.parametrize("force", [False, True])
def test_an_entry_in_the_way_is_known_before_tokenizing_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(manifest.parent))

    cached = {"disable_cache": False, "cache_dir": tmp_path, "workers": 0}
    sources = [source(TrappedRows(chat_rows(5)))]
    parallel(sources, cached)
    [manifest] = tmp_path.glob("*/manifest.json")
    manifest.write_text("{}")
    monkeypatch.setattr(folder, "remove", refuse)
    result = parallel(sources, {**cached, "force_recache": force})
    assert_equal(result, sequential(sources))
    [note] = result.notes
    assert str(manifest.parent) in note
    assert "stay in memory" in note


def test_a_template_that_prints_the_date_is_noted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{# strftime_now #}" + tokenizer.chat_template
    config = ParallelTokenizationConfig(cache_dir=tmp_path, workers=0)
    item = source(TrappedRows(chat_rows(5)))
    tokenization = ParallelTokenization(config, tokenizer=tokenizer, data=data_config(item))
    for _ in ("made", "served"):
        assert "the chat template prints the date" in tokenization.tokenize([item]).notes[0]


def test_a_terminal_shows_the_rows_done_so_far_and_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(
        block_source, "Console", lambda **_: Console(file=written, width=100, force_terminal=True, legacy_windows=False)
    )
    with suppress(ZeroDivisionError), show_progress(4000) as advance:
        advance(1500)
        wait_for(lambda: "38%" in written.getvalue(), "the bar to show rows")
        raise ZeroDivisionError
    # The last thing written erases the line.
    assert written.getvalue().endswith("\x1b[1A\x1b[2K")


def test_nothing_is_written_where_no_one_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(10) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")
