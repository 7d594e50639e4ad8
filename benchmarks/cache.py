"""Measure how fast a run gets from the token cache to its first batch, and the memory of an opened cache.

    python benchmarks/cache.py [--json] [--repeats 25] [--rows 100000]

Main entry: 100,000 samples with the lengths of D1 (`collation_inputs.py`). Open to first batch: the entry opened,
1,024 random samples packed into rows of 8,192 for 8 ranks. Against it the
list-building way of pipelines that keep tokenized data as a saved `datasets` folder: its rows as dicts of Python lists,
and the same samples packed by the same collator. Whole columns as lists, the quickest such way, is shown as well. Files
lie in the page cache for all; imports and compilation are not counted. The list ways run once, they take seconds.

Opening: 10,000, 100,000 and 1,000,000 short samples; as it is, and without the check of the whole that small entries
get. Memory: RssAnon (mapped pages are not in it) of a process that opens an entry and packs 200 batches.

Gates: first batch >= 500x faster; opening 1,000,000 rows <= 50 ms; RssAnon at 1,000,000 within 200 MB
of 10,000; a view of 1,024 samples <= 50 us. Needs 1 GB in the folder for temporary files (TMPDIR).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow
from collation_inputs import BATCH, DATA_SETS, FIRST_TOKEN, LAST_TOKEN
from numpy.typing import NDArray
from timing import Gate, Timing, gates_as_json, print_gates, print_timings, round_robin, speedup_gate, timings_as_json

from spurline.data.batch import TrainingBatch
from spurline.data.token_store import SampleBlock, Tokenized, TokenStore, TokenStoreBuilder
from spurline.protocols.collator import ParallelLayout
from spurline_collation_fast.cache import entry
from spurline_collation_fast.cache.entry import CacheKey
from spurline_collation_fast.cache.folder import TokenCache
from spurline_collation_fast.collators import FastPackedCollator
from spurline_collation_fast.configs import FastPackedCollatorConfig

SIZES = (10_000, 100_000, 1_000_000)
ROWS_PER_WRITE = 4096
BATCHES_FOR_MEMORY = 200
CAPACITY = DATA_SETS["D1"].capacity
BY_ROW, BY_COLUMN = "lists by row to first batch", "lists by column to first batch"

Lists = Callable[[Path], tuple[list[list[int]], list[list[int]]]]
"""A way to read a saved dataset: tokens and masks of all samples."""


def key(rows: int) -> CacheKey:
    """Name of the entry with so many rows."""
    return CacheKey(f"{rows:032x}", {"rows": rows}, ("synthetic",))


def short(random: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """Lengths that keep a million samples small."""
    return random.integers(16, 105, rows)


def write_entry(folder: Path, lengths: NDArray[np.int64]) -> float:
    """Write random samples of these lengths; seconds that the cache took for it."""
    random, seconds = np.random.default_rng(1), 0.0
    cache = TokenCache(folder)
    with cache.writer(key(len(lengths))) as writer:
        for first in range(0, len(lengths), ROWS_PER_WRITE):
            part = lengths[first : first + ROWS_PER_WRITE]
            total = int(part.sum())
            tokens = random.integers(FIRST_TOKEN, LAST_TOKEN + 1, total, dtype=np.int32)
            mask = (random.random(total, dtype=np.float32) < 0.5).astype(np.uint8)
            start = time.perf_counter()
            writer.extend(SampleBlock(0, tokens, mask, part, np.arange(first, first + len(part))))
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        writer.finish(Tokenized(writer.build()))
        cache.commit(writer.folder, key(len(lengths)))
        return seconds + time.perf_counter() - start


def open_store(folder: Path, rows: int) -> TokenStore:
    """The entry with so many rows, opened as a run opens it."""
    found = TokenCache(folder).open(key(rows))
    assert found is not None
    return found.store


def pack(store: TokenStore, chosen: NDArray[np.int64]) -> TrainingBatch:
    """These samples as a batch, in fresh buffers as the first batch of a run."""
    config = FastPackedCollatorConfig(max_tokens=CAPACITY)
    collator = FastPackedCollator(config, 0, ParallelLayout(data=8))
    return collator.collate(store.view(chosen), training=True)


def save_dataset(store: TokenStore, folder: Path) -> None:
    """The same samples as a `datasets` folder with a list of ints per row."""
    columns = {"input_ids": store.tokens, "loss_mask": store.loss_mask}
    table = pyarrow.table(
        {name: pyarrow.LargeListArray.from_arrays(store.offsets, values) for name, values in columns.items()}
    )
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(str(folder))


def lists_by_row(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and masks of all samples, from the rows."""
    rows: Any = list(datasets.load_from_disk(str(folder)))
    return [row["input_ids"] for row in rows], [row["loss_mask"] for row in rows]


def lists_by_column(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The same from whole columns."""
    table: Any = datasets.load_from_disk(str(folder)).data
    return table["input_ids"].to_pylist(), table["loss_mask"].to_pylist()


def pack_from_lists(lists: Lists, folder: Path, chosen: NDArray[np.int64]) -> TrainingBatch:
    """A list-building way to the same batch."""
    tokens, masks = lists(folder)
    builder = TokenStoreBuilder(["synthetic"])
    for row in chosen.tolist():
        builder.add(tokens[row], masks[row], 0, row)
    return pack(builder.build(), np.arange(len(chosen)))


def measure_first_batch(folder: Path, rows: int, repeats: int) -> dict[str, Any]:
    """The main entry: writing, first batch both ways, full check, view."""
    lengths = DATA_SETS["D1"].draw(np.random.default_rng(0), rows)
    write_s = write_entry(folder, lengths)
    chosen = np.random.default_rng(2).permutation(rows)[:BATCH]
    store = open_store(folder, rows)
    save_dataset(store, folder / "dataset")
    expected, timings = pack(store, chosen), {}
    for name, lists in {BY_ROW: lists_by_row, BY_COLUMN: lists_by_column}.items():
        timings[name], batch = once(lambda lists=lists: pack_from_lists(lists, folder / "dataset", chosen))
        for column, values in expected.tokens.items():
            assert values.equal(batch.tokens[column]), f"{name}: {column} differs"
    functions: dict[str, Callable[[], object]] = {
        "open": lambda: open_store(folder, rows),
        "open to first batch": lambda: pack(open_store(folder, rows), chosen),
        "open and check everything": lambda: entry.open_entry(folder / key(rows).digest, whole=True),
    }
    timings |= round_robin(functions, repeats)
    timings |= round_robin({"view of 1,024 samples": lambda: store.view(chosen)}, 50 * repeats)
    return {"timings": timings, "tokens": int(lengths.sum()), "write_s": write_s}


def once(function: Callable[[], TrainingBatch]) -> tuple[Timing, TrainingBatch]:
    """Time one call."""
    cpu_start, start = time.process_time(), time.perf_counter()
    result = function()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return Timing(wall, wall, cpu), result


def measure_opening(folder: Path, repeats: int) -> dict[str, Any]:
    """Opening short rows in growing numbers, with and without the check of small entries."""
    for rows in SIZES:
        write_entry(folder, short(np.random.default_rng(0), rows))
    usual = round_robin({f"open {rows:,} rows": lambda rows=rows: open_store(folder, rows) for rows in SIZES}, repeats)
    whole_bytes, entry._READ_WHOLE_BYTES = entry._READ_WHOLE_BYTES, -1
    lazy = round_robin(
        {f"open {rows:,} rows, no check": lambda rows=rows: open_store(folder, rows) for rows in SIZES}, 3 * repeats
    )
    entry._READ_WHOLE_BYTES = whole_bytes
    return usual | lazy


def anonymous_mb(folder: Path, rows: int) -> float:
    """RssAnon in MB of a fresh process that packs batches from an entry."""
    command = [sys.executable, __file__, "--memory", str(folder), str(rows)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(result.stdout)


def print_own_memory(folder: Path, rows: int) -> None:
    """The measured process of `anonymous_mb`."""
    store, random = open_store(folder, rows), np.random.default_rng(0)
    for _ in range(BATCHES_FOR_MEMORY):
        pack(store, random.integers(0, rows, BATCH)).release()
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    print(int(line.split()[1]) * 1024 / 1e6)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--rows", type=int, default=100_000, help="samples of the main entry")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print_own_memory(Path(arguments.memory[0]), int(arguments.memory[1]))
        return
    with TemporaryDirectory() as main_folder, TemporaryDirectory() as short_folder:
        first = measure_first_batch(Path(main_folder), arguments.rows, arguments.repeats)
        opening = measure_opening(Path(short_folder), arguments.repeats)
        memory = {rows: anonymous_mb(Path(short_folder), rows) for rows in (SIZES[0], SIZES[-1])}
    timings = first["timings"] | opening
    names = [f"open {rows:,} rows, no check" for rows in SIZES]
    gates = [
        speedup_gate("first batch, against lists", timings[BY_ROW], timings["open to first batch"], 500),
        Gate("opening 1,000,000 rows, ms", timings[names[-1]].min_s * 1e3, 50, False),
        Gate("RssAnon, 1,000,000 rows - 10,000, MB", memory[SIZES[-1]] - memory[SIZES[0]], 200, False),
        Gate("view of 1,024 samples, us", timings["view of 1,024 samples"].min_s * 1e6, 50, False),
    ]
    facts = {
        "rows": arguments.rows,
        "tokens": first["tokens"],
        "write_s": first["write_s"],
        "rss_anon_mb": {f"{rows:,} rows": megabytes for rows, megabytes in memory.items()},
    }
    if arguments.json:
        print(json.dumps({**facts, "timings": timings_as_json(timings), "gates": gates_as_json(gates)}, indent=2))
        return
    print(f"{facts['rows']:,} samples, {facts['tokens']:,} tokens, written in {facts['write_s']:.2f} s")
    print_timings("cache", timings)
    print(", ".join(f"RssAnon at {rows}: {megabytes:.0f} MB" for rows, megabytes in facts["rss_anon_mb"].items()))
    print_gates(gates)


if __name__ == "__main__":
    main()
