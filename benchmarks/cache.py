"""Measure how fast a run gets from the token cache to its first batch, and the memory of an opened cache.

    python benchmarks/cache.py [--json] [--repeats 25] [--rows 100000]

First batch: the benchmark opens an entry of 100,000 samples with the lengths of D1 (`collation_inputs.py`), and packs
1,024 random samples into rows of 8,192 for 8 ranks. It compares this with pipelines that keep tokenized data as a saved
`datasets` folder, read all rows as dicts of Python lists, and pack the same samples with the same collator. It also
reads whole columns as lists, which is the fastest way to get lists. All files are in the page cache. Imports and
compilation are not counted. The two list candidates take seconds, so they run only once.

Opening: the benchmark opens entries of 10,000, 100,000 and 1,000,000 short samples, with and without the check of whole
files that small entries get. Memory: the RssAnon (memory without mapped files) of a process that opens an entry and
packs 200 batches.

Gates: first batch >= 500x faster; opening 1,000,000 rows <= 50 ms; RssAnon with 1,000,000 rows within 200 MB of RssAnon
with 10,000; a view of 1,024 samples <= 50 us. Needs 1 GB in the folder for temporary files (TMPDIR).
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
"""A function that reads a saved dataset and returns the tokens and masks of all samples."""


def key(rows: int) -> CacheKey:
    """Return the name of the entry with this number of rows."""
    return CacheKey(f"{rows:032x}", {"rows": rows}, ("synthetic",))


def short(random: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """Draw short lengths, so that a million samples need little memory."""
    return random.integers(16, 105, rows)


def write_entry(folder: Path, lengths: NDArray[np.int64]) -> float:
    """Write random samples of these lengths, and return the seconds that the cache took."""
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
    """Open the entry with this number of rows, as a run opens it."""
    found = TokenCache(folder).open(key(rows))
    assert found is not None
    return found.store


def pack(store: TokenStore, chosen: NDArray[np.int64]) -> TrainingBatch:
    """Pack these samples into a batch with new buffers, as in the first batch of a run."""
    config = FastPackedCollatorConfig(max_tokens=CAPACITY)
    collator = FastPackedCollator(config, 0, ParallelLayout(data=8))
    return collator.collate(store.view(chosen), training=True)


def save_dataset(store: TokenStore, folder: Path) -> None:
    """Save the samples as a `datasets` folder with a list of ints in each row."""
    columns = {"input_ids": store.tokens, "loss_mask": store.loss_mask}
    table = pyarrow.table(
        {name: pyarrow.LargeListArray.from_arrays(store.offsets, values) for name, values in columns.items()}
    )
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(str(folder))


def lists_by_row(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Read the tokens and masks of all samples row by row."""
    rows: Any = list(datasets.load_from_disk(str(folder)))
    return [row["input_ids"] for row in rows], [row["loss_mask"] for row in rows]


def lists_by_column(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Read the tokens and masks of all samples as whole columns."""
    table: Any = datasets.load_from_disk(str(folder)).data
    return table["input_ids"].to_pylist(), table["loss_mask"].to_pylist()


def pack_from_lists(lists: Lists, folder: Path, chosen: NDArray[np.int64]) -> TrainingBatch:
    """Build the same batch from lists."""
    tokens, masks = lists(folder)
    builder = TokenStoreBuilder(["synthetic"])
    for row in chosen.tolist():
        builder.add(tokens[row], masks[row], 0, row)
    return pack(builder.build(), np.arange(len(chosen)))


def measure_first_batch(folder: Path, rows: int, repeats: int) -> dict[str, Any]:
    """Time the main entry: writing, the first batch of all candidates, the full check, and a view."""
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
    """Time the opening of more and more short rows, with and without the check of small entries."""
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
    """Return the RssAnon, in MB, of a new process that packs batches from an entry."""
    command = [sys.executable, __file__, "--memory", str(folder), str(rows)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(result.stdout)


def print_own_memory(folder: Path, rows: int) -> None:
    """Pack batches and print the memory, in the process that `anonymous_mb` starts."""
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
