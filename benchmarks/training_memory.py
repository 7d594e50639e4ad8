"""Measure the memory of a run over many samples, and the time to open its data.

    make models/tiny-qwen3
    python benchmarks/training_memory.py [--json] [--rows 1000000] [--steps 30] [--repeats 5] [--skip-tokenizing]

Training: `Run.train` takes some steps of 256 samples, with 10,000 and with 1,000,000 chats as JSON lines, the tiny
model and a usual config. Each run has its own process, and its tokens are in the cache. The real cache writer puts them
there under the real key, but the tokens are random (16 to 64 per sample), since tokenizing a million rows would take
minutes. The parent process reads RssAnon (memory without mapped files) every few milliseconds, and takes the peak of
the steps after the third, and of the whole process.

Opening: the time from config to first batch in a process with all modules loaded. It checks the config, loads the
tokenizer, computes the cache key, opens the entry, draws the order, and packs a batch. For information, the time in the
new process of each run is also printed. It includes importing torch and loading weights.

Tokenizing: 20,000 and 200,000 rows are tokenized into an empty cache, in one process and with two workers. The figure
is the peak RssAnon of the parent.

Gates: the peak with 1,000,000 samples is within 200 MB of the peak with 10,000; 1,000,000 samples are opened in less
than a second; the peak of tokenizing 200,000 rows is within 200 MB of the peak with 20,000. Needs 0.6 GB in the folder
for temporary files (TMPDIR).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timing import Gate, gates_as_json, print_gates, print_timings, round_robin, timings_as_json
from training_data import fill_cache, write_config, write_rows

SMALL = 10_000
TOKENIZED = (20_000, 200_000)
WORKERS = (0, 2)
WARM_STEPS = 3
"""Number of steps after which the buffers of model, optimizer and collator no longer grow."""

SAMPLE_EVERY_S = 0.005
LIMIT_MB = 200
SETTLED_AFTER_S = 2.5
"""Seconds to wait after writing files. Files that were written just before are hashed again."""

Marks = dict[str, float]
"""Times by name, from the system's monotonic clock, which all processes share."""


@dataclass(frozen=True)
class Watched:
    """A finished process, with the times of its marks, and its RssAnon in MB over time."""

    marks: Marks
    readings: list[tuple[float, float]]
    notes: list[str]

    def peak(self, begin: str | None = None, end: str | None = None) -> float:
        """Return the largest RssAnon between two marks, or of the whole process by default."""
        first = self.marks[begin] if begin else 0.0
        last = self.marks[end] if end else float("inf")
        return max(megabytes for instant, megabytes in self.readings if first <= instant <= last)


def watch(mode: str, config: Path) -> Watched:
    """Run this file in a child process in this mode, and read the memory of the process until it ends."""
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__, "--mode", mode, str(config)], stdout=subprocess.PIPE, text=True
    ) as process:
        readings: list[tuple[float, float]] = []
        while process.poll() is None:
            megabytes = anonymous_mb(process.pid)
            if megabytes is not None:
                readings.append((time.monotonic(), megabytes))
            time.sleep(SAMPLE_EVERY_S)
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0, f"{mode} {config} ended with {process.returncode}"
    said = json.loads(output.splitlines()[-1])
    return Watched({"process": started, **said["marks"]}, readings, said["notes"])


def anonymous_mb(pid: int) -> float | None:
    """Return the RssAnon of a process in MB, or None if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0].split()[1]) * 1024 / 1e6 if lines else None


def tokenize(config: Path) -> tuple[Marks, list[str]]:
    """Open the data of a config in the child process. This tokenizes the data if it is not in the cache."""
    from spurline import load_config
    from spurline.run.build import build_data

    marks = {"config": time.monotonic()}
    with ExitStack() as stack:
        data = build_data(load_config(config), stack)
        marks["data"] = time.monotonic()
        notes: Any = data.source.summary()["notes"]
        return marks, list(notes)


def train(config: Path) -> tuple[Marks, list[str]]:
    """Run the whole training in the child process."""
    from spurline import Run, load_config
    from spurline.plugins.hookspecs import hookimpl

    marks = {"config": time.monotonic()}

    class Clock:
        @hookimpl
        def on_run_start(self, run: Run) -> None:
            notes.extend(run.source.summary()["notes"])  # type: ignore[arg-type]

        @hookimpl(wrapper=True)
        def train_step(self, step: int) -> Any:
            if step == 1:
                marks["first batch"] = time.monotonic()
            return (yield)

        @hookimpl
        def on_step_end(self, step: int) -> None:
            marks["warm" if step == WARM_STEPS else "trained"] = time.monotonic()

    notes: list[str] = []
    loaded = load_config(config)
    loaded.host.attach(Clock(), "clock")
    assert Run(loaded).train().status == "finished"
    return marks, notes


def measure_opening(configs: dict[int, Path], repeats: int) -> dict[str, Any]:
    """Time the way from config to first batch in this process. The configs take turns."""
    from spurline import load_config
    from spurline.run.build import build_data

    def open_and_build(config: Path) -> None:
        with ExitStack() as stack:
            build_data(load_config(config), stack).source.build(1).release()

    return round_robin(
        {f"{rows:,} samples": lambda config=config: open_and_build(config) for rows, config in configs.items()}, repeats
    )


def measure_tokenizing(folder: Path) -> dict[str, dict[str, float]]:
    """Return the memory peaks and times of processes that tokenize."""
    measured: dict[str, dict[str, float]] = {}
    for rows in TOKENIZED:
        write_rows(folder / f"{rows}.jsonl", rows)
        for workers in WORKERS:
            config = write_config(folder, rows, 1, workers=workers, cache_dir=str(folder / f"cache-{workers}"))
            watched = watch("tokenize", config)
            assert not any("from the cache" in note for note in watched.notes), watched.notes
            seconds = watched.marks["data"] - watched.marks["config"]
            measured[tokenized(rows, workers)] = {"whole_peak_mb": watched.peak(), "seconds": seconds}
    return measured


def tokenized(rows: int, workers: int) -> str:
    """Return the name of a case of `measure_tokenizing`."""
    return f"{rows:,} rows, {workers} workers"


def measure_training(config: Path) -> dict[str, float]:
    """Return the memory peaks of a run over cached tokens, and the times to its first batch."""
    watched = watch("train", config)
    assert any("from the cache" in note for note in watched.notes), watched.notes
    marks = watched.marks
    return {
        "steps_peak_mb": watched.peak("warm", "trained"),
        "whole_peak_mb": watched.peak(),
        "until_first_batch_peak_mb": watched.peak(end="first batch"),
        "config_to_first_batch_s": marks["first batch"] - marks["config"],
        "process_to_first_batch_s": marks["first batch"] - marks["process"],
    }


def growth_gate(name: str, large: dict[str, float], small: dict[str, float], key: str) -> Gate:
    """Return the gate that the larger case needs at most `LIMIT_MB` more."""
    return Gate(f"RssAnon, {name}, MB", large[key] - small[key], LIMIT_MB, False)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000, help="samples of the large run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-tokenizing", action="store_true")
    parser.add_argument("--mode", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        mode, config = arguments.mode
        marks, notes = {"tokenize": tokenize, "train": train}[mode](Path(config))
        print("\n" + json.dumps({"marks": marks, "notes": notes}))
        return
    sizes = (SMALL, arguments.rows)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # This folder has the stored hashes of files. The benchmark must not use or change the user's.
        os.environ["SPURLINE_CACHE"] = str(folder / "memory")
        tokenizing = {} if arguments.skip_tokenizing else measure_tokenizing(folder)
        for rows in sizes:
            write_rows(folder / f"{rows}.jsonl", rows)
        time.sleep(SETTLED_AFTER_S)
        configs = {rows: write_config(folder, rows, arguments.steps) for rows in sizes}
        for rows, config in configs.items():
            fill_cache(config, rows)
        training = {f"{rows:,} samples": measure_training(config) for rows, config in configs.items()}
        opening = measure_opening(configs, arguments.repeats)
    small, large = (f"{rows:,} samples" for rows in sizes)
    gates = [
        growth_gate(f"{large} - {small}, steps", training[large], training[small], "steps_peak_mb"),
        growth_gate(f"{large} - {small}, whole run", training[large], training[small], "whole_peak_mb"),
        Gate(f"config to first batch, {large}, s", opening[large].min_s, 1.0, False, opening[large].min_cpu_s),
        *(
            growth_gate(f"tokenizing with {workers} workers", tokenizing[many], tokenizing[few], "whole_peak_mb")
            for workers in WORKERS
            for few, many in [[tokenized(rows, workers) for rows in TOKENIZED]]
            if tokenizing
        ),
    ]
    if arguments.json:
        figures = {"tokenizing": tokenizing, "training": training, "opening": timings_as_json(opening)}
        print(json.dumps({**figures, "gates": gates_as_json(gates)}, indent=2))
        return
    for name, figures in {**tokenizing, **training}.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    print_timings("config to first batch", opening)
    print_gates(gates)


if __name__ == "__main__":
    main()
