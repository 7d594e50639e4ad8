"""Measure the cost of a checkpoint that is written at once or beside training, and of the copy of the tensors alone.

    python benchmarks/checkpoint.py [--json] [--hidden 512] [--layers 4] [--rounds 8] [--steps 4] [--threads 1]

A run of a random model alternates between four kinds of spans of a few steps: without a checkpoint, with a checkpoint
that is written at once, with only the copy that `checkpoint.async` makes first, and with a checkpoint that is written
during the following steps. The time of a span begins with the checkpoint and ends with the last step, so it contains
the slowdown by the writing thread. Ratios compare smallest times, which other processes disturb least. The benchmark
also measures the bytes that a save at once reads (`/proc/self/io`), and how long each checkpoint blocks training.

Gates: `checkpoint.async` blocks training <= 1.25 x as long as the copy alone, and its span takes <= 1.05 x the time. A
save reads less than 1 % of the bytes that it writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import Gate, gates_as_json, print_gates
from transformers import Qwen3Config

from spurline import Run, load_config
from spurline.plugins.hookspecs import hookimpl
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.checkpoints.saving import Writing

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "models" / "tiny-qwen3"
NONE, COPY, ASYNC, SYNC = "none", "copy alone", "async", "at once"
WARM_UP = 2
"""Steps before the first span."""


class Spans:
    """Hooks that begin a span after the last step of the previous span, and time it."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._writing: Writing | None = None
        self._kinds: dict[str, Callable[[int], object]] = {
            NONE: lambda step: None,
            COPY: self._copy,
            ASYNC: self._beside,
            SYNC: self._at_once,
        }
        self._kind: str | None = None
        self.seconds: dict[str, list[float]] = {kind: [] for kind in self._kinds}
        self.cpu_seconds: dict[str, list[float]] = {kind: [] for kind in self._kinds}
        self.begins: dict[str, list[float]] = {kind: [] for kind in self._kinds}
        self.write_s: list[float] = []
        self.bytes_read = self.bytes_written = 0

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._run = run

    @hookimpl
    def on_step_end(self, step: int) -> None:
        if step < WARM_UP or (step - WARM_UP) % self._steps:
            return
        if self._kind is not None:
            self.seconds[self._kind].append(time.perf_counter() - self._begin)
            self.cpu_seconds[self._kind].append(time.process_time() - self._cpu_begin)
        # Wait for a checkpoint that is still being written, so that it does not slow down the next span.
        if self._writing is not None:
            self._writing.is_done(60.0)
            self._writing.result()
            self._writing = None
        if self._kind == ASYNC:
            self.write_s.append(time.perf_counter() - self._begin)
        self._kind = list(self._kinds)[(step - WARM_UP) // self._steps % len(self._kinds)]
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()
        self._kinds[self._kind](step)
        self.begins[self._kind].append(time.perf_counter() - self._begin)

    def _checkpoint(self, step: int, *, copied: bool = True) -> Writing:
        session = self._run._session
        assert session is not None
        store = CheckpointStore(self._run.directory.checkpoints)
        return Writing.of(store, step, session.components, self._run.loaded, session._course(None), copied=copied)

    def _copy(self, step: int) -> None:
        self._checkpoint(step)

    def _beside(self, step: int) -> None:
        self._writing = self._checkpoint(step).write_beside()

    def _at_once(self, step: int) -> None:
        before = bytes_read()
        writing = self._checkpoint(step, copied=False)
        writing.write()
        self.bytes_read = bytes_read() - before
        self.bytes_written = sum(file.stat().st_size for file in writing.result().rglob("*") if file.is_file())


def bytes_read() -> int:
    """Return the bytes that this process has read, from disks or from caches."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def model_folder(folder: Path, hidden: int, layers: int) -> Path:
    """Write the config of a model without weights, and return the folder."""
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def measure(hidden: int, layers: int, rounds: int, steps: int, threads: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each kind of span, and the sizes of a checkpoint."""
    spans = Spans(steps)
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model_folder(folder / "model", hidden, layers)), "init": "random"},
        "data": {"train": str(ROOT / "examples/data/sort_train.jsonl"), "max_length": 256},
        "batch_size": 4,
        "steps": WARM_UP + steps * len(spans.seconds) * (rounds + 1) + 1,
        "optimizer": {"learning_rate": 1e-4},
        "checkpoint": {"every_minutes": None, "keep_last": 1, "async": True},
        "backend": {"name": "local", "device": "cpu", "num_threads": threads},
        "report": {"enabled": False},
        "trackers": [{"name": "console", "every_steps": 1_000_000}],
    }
    config["model"]["tokenizer"] = str(TOKENIZER)
    loaded = load_config(config)
    loaded.host.attach(spans, "spans")
    Run(loaded).train()
    # The first round allocates memory that later rounds use again.
    seconds = {kind: values[1:] for kind, values in spans.seconds.items()}
    cpu_seconds = {kind: values[1:] for kind, values in spans.cpu_seconds.items()}
    return {
        "checkpoint_mib": spans.bytes_written / 2**20,
        "bytes_read_back": spans.bytes_read,
        "read_back_share": spans.bytes_read / spans.bytes_written,
        "step_s": statistics.median(seconds[NONE]) / steps,
        "span_s": {kind: statistics.median(values) for kind, values in seconds.items()},
        "stands_still_s": {kind: min(values[1:]) for kind, values in spans.begins.items()},
        "write_s": statistics.median(spans.write_s[1:]),
        "async_to_copy": min(seconds[ASYNC]) / min(seconds[COPY]),
        "async_to_copy_cpu": min(cpu_seconds[ASYNC]) / min(cpu_seconds[COPY]),
        "async_to_none": min(seconds[ASYNC]) / min(seconds[NONE]),
        "sync_to_none": min(seconds[SYNC]) / min(seconds[NONE]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of a span")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sizes = options.hidden, options.layers, options.rounds, options.steps, options.threads
        figures = measure(*sizes, Path(folder))
    stands = figures["stands_still_s"]
    by_clock, by_cpu = figures["async_to_copy"], figures["async_to_copy_cpu"]
    gates = [
        Gate("training is blocked: checkpoint.async / the copy alone", stands[ASYNC] / stands[COPY], 1.25, False),
        Gate("a span with checkpoint.async / with the copy alone", by_clock, 1.05, False, by_cpu),
        Gate("bytes read by a save / written", figures["read_back_share"], 0.01, False),
    ]
    if options.json:
        print(json.dumps({**figures, "gates": gates_as_json(gates)}, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")
        print_gates(gates)
    raise SystemExit(0 if all(gate.met for gate in gates) else 1)


if __name__ == "__main__":
    main()
