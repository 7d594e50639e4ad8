"""Measure the cost of asynchronous rollouts in the controller: CPU time, and the lag of its event loop.

    python benchmarks/controller.py [--json] [--steps 4] [--in-flight 24576] [--prompts 512] [--tokens 2048]

The benchmark runs the source `async_rollouts` with the collators of collation_fast. Engine, environment and trainer are
scripted (`scripted_plugin.py`) and cost almost nothing, so that the figures show the cost of Spurline itself. Attempts
take lognormal times (sigma 0.5), with a mean for which engines finish a batch in the time of a step. The first step,
which fills the engines, is left out. The run stops long before its last step, because fewer groups start at its end.

CPU time of an attempt: the CPU time of the event loop's thread without the scripted engine. Hand-over: the CPU time of
the training thread from the last group of a batch until the backend is asked to update. Lag: the delay of a task that
should run every 5 ms. Memory: the memory of the process after each step. For a checkpoint it is the peak while groups
are written.

The gates apply only to the default size or larger sizes. The event loop has a cost that does not depend on the number
of attempts, so with fewer attempts each of them would seem more expensive. With 65,536 attempts at once, no lag may be
over 200 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scripted_plugin
from scripted_plugin import OBSERVED, resident_bytes
from timing import Gate, gates_as_json, print_gates

from spurline import Run, load_config
from spurline.errors import SpurlineError
from spurline.plugins.hookspecs import hookimpl
from spurline.plugins.host import installed_plugins
from spurline_async_rl.source.producer import Producer

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny-qwen3"
SAMPLES = 16
MAX_STALENESS = 4
FULL_IN_FLIGHT = 24_576
FULL_BATCH = 512 * SAMPLES * 2048
"""Tokens of a batch of the default size."""
MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        prompts: Prompts of a batch.
        tokens: Tokens of a response.
        in_flight: Attempts that run at once.
        steps: Steps that are measured.
        checkpoint: Whether the run writes a checkpoint after these steps.
    """

    prompts: int
    tokens: int
    in_flight: int
    steps: int
    step_s: float
    checkpoint: bool = False

    @property
    def groups_at_once(self) -> int:
        return self.in_flight // SAMPLES


class EnoughError(SpurlineError):
    """Ends the run when all steps have been measured."""


@dataclass
class Measured:
    """Hooks that add an entry to each list after each step. They end the run after `steps` steps."""

    steps: int
    attempts: list[int] = field(default_factory=list[int])
    loop_s: list[float] = field(default_factory=list[float])
    wall_s: list[float] = field(default_factory=list[float])
    handed_over: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """CPU time of the training thread and wall time of each hand-over, in seconds."""
    rss: list[int] = field(default_factory=list[int])
    collections: list[float] = field(default_factory=list[float])
    """Seconds of each full garbage collection."""
    num_lags: list[int] = field(default_factory=list[int])
    checkpoint_peak: int = 0
    checkpoint_rss: int = 0

    def __post_init__(self) -> None:
        self._training = time.pthread_getcpuclockid(threading.get_ident())
        self._there = (0.0, 0.0)
        self._updates = 0
        self._collecting = 0.0
        self._last = (0, 0.0, time.perf_counter())

    def taken(self) -> None:
        """Record that a batch has its last group. The event loop calls this while the training thread waits."""
        self._there = (time.clock_gettime(self._training), time.perf_counter())

    def collected(self, phase: str, info: Mapping[str, int]) -> None:
        """Record a garbage collection. The garbage collector calls this."""
        if phase == "start":
            self._collecting = time.perf_counter()
        elif info["generation"] == 2:
            self.collections.append(time.perf_counter() - self._collecting)

    @hookimpl
    def on_step_end(self) -> None:
        ended, loop_s, now = OBSERVED.ended, OBSERVED.loop_seconds(), time.perf_counter()
        before = self._last
        self._last = (ended, loop_s, now)
        self.attempts.append(ended - before[0])
        self.loop_s.append(loop_s - before[1])
        self.wall_s.append(now - before[2])
        first = OBSERVED.updates[self._updates]
        self._updates = len(OBSERVED.updates)
        self.handed_over.append((first[0] - self._there[0], first[1] - self._there[1]))
        self.rss.append(resident_bytes())
        self.num_lags.append(len(OBSERVED.lags))

    @hookimpl
    def on_step_start(self) -> None:
        if len(self.rss) == self.steps:
            raise EnoughError

    @hookimpl
    def on_checkpoint_saved(self) -> None:
        if not self.checkpoint_peak:
            self.checkpoint_peak, self.checkpoint_rss = resident_bytes("VmHWM"), OBSERVED.rss_before_save


def measure(size: Size, folder: Path) -> Measured:
    """Run it."""
    loaded = load_config(
        settings(size, folder), available={**installed_plugins(), "scripted": scripted_plugin.INSTALLED}
    )
    measured = Measured(1 + size.steps)
    loaded.host.attach(measured, "controller")
    take = Producer.take

    def taking(self: Producer, step: int, *more: Any) -> Any:
        found = take(self, step, *more)
        if found is not None:
            measured.taken()
        return found

    Producer.take = taking
    gc.callbacks.append(measured.collected)
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(EnoughError):
            Run(loaded).train()
    finally:
        gc.callbacks.remove(measured.collected)
        Producer.take = take
    return measured


def settings(size: Size, folder: Path) -> dict[str, Any]:
    mean_s = size.step_s * size.groups_at_once / size.prompts
    return {
        "plugins": ["collation_fast", "async_rl", "scripted"],
        "run_dir": str(folder),
        "model": {"path": str(TINY)},
        "data": {"train": str(ROOT / "examples" / "data" / "sort_train.jsonl")},
        "steps": 1 + size.steps + 2 * MAX_STALENESS,
        "backend": {"name": "scripted", "step_s": size.step_s},
        "checkpoint": {"every_steps": 1 + size.steps if size.checkpoint else None, "export_hf": False},
        "report": {"enabled": False},
        "source": {
            "name": "async_rollouts",
            "prompts_per_step": size.prompts,
            "samples_per_prompt": SAMPLES,
            "max_staleness": MAX_STALENESS,
            "max_concurrent_groups": size.groups_at_once,
            "max_concurrent": size.in_flight,
            "environment": "scripted",
            "advantage": "grpo",
            "correction": "tis",
            # The logprobs of a scripted engine prove nothing.
            "proof": {"every": 0},
            "engine": {"name": "scripted", "tokens": size.tokens, "mean_s": mean_s, "sigma": 0.5},
            "sampling": {"max_new_tokens": size.tokens},
        },
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": size.prompts},
    }


def figures(measured: Measured) -> dict[str, Any]:
    """Figures over the measured steps."""
    steady = slice(1, None)
    lags = np.array(OBSERVED.lags[measured.num_lags[0] : measured.num_lags[-1]])
    attempts = sum(measured.attempts[steady])
    handed_over = measured.handed_over[steady]
    return {
        "loop_us_per_attempt": 1e6 * sum(measured.loop_s[steady]) / max(attempts, 1),
        "attempts": attempts,
        "loop_share": sum(measured.loop_s[steady]) / sum(measured.wall_s[steady]),
        "hand_over_cpu_s": min(cpu for cpu, _ in handed_over),
        "hand_over_wall_s": min(wall for _, wall in handed_over),
        "lag_p99_ms": 1e3 * float(np.percentile(lags, 99)),
        "lag_max_ms": 1e3 * float(lags.max()),
        "step_wall_s": [round(seconds, 2) for seconds in measured.wall_s],
        "rss_mib": [rss // MIB for rss in measured.rss],
        "full_collections_ms": [round(1e3 * seconds, 1) for seconds in measured.collections],
        "checkpoint_rss_mib": measured.checkpoint_rss // MIB,
        "checkpoint_peak_mib": measured.checkpoint_peak // MIB,
    }


def gates(size: Size, found: Mapping[str, Any]) -> list[Gate]:
    judged: list[Gate] = []
    if size.in_flight >= FULL_IN_FLIGHT:
        judged.append(Gate("CPU time of the event loop per attempt, us", found["loop_us_per_attempt"], 120, False))
    if size.prompts * SAMPLES * size.tokens >= FULL_BATCH:
        judged.append(Gate("hand-over of a batch, CPU s of its thread", found["hand_over_cpu_s"], 1.5, False))
    judged.append(Gate("lag of the event loop, p99, ms", found["lag_p99_ms"], 50, False))
    if size.in_flight >= 65_536:
        judged.append(Gate("longest lag of the event loop, ms", found["lag_max_ms"], 200, False))
    if size.checkpoint:
        grown = found["checkpoint_peak_mib"] / found["checkpoint_rss_mib"]
        judged.append(Gate("memory while a checkpoint is written, times that before", grown, 1.1, False))
    return judged


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--in-flight", type=int, default=24576, help="attempts at once")
    parser.add_argument("--step-seconds", type=float, default=1.5)
    parser.add_argument("--checkpoint", action="store_true", help="write a checkpoint after the last step")
    arguments = parser.parse_args()
    if not TINY.exists():
        parser.error(f"{TINY} is missing; make it with: python examples/make_tiny_model.py {TINY}")
    size = Size(
        arguments.prompts,
        arguments.tokens,
        arguments.in_flight,
        arguments.steps,
        arguments.step_seconds,
        arguments.checkpoint,
    )
    with tempfile.TemporaryDirectory() as name:
        found = figures(measure(size, Path(name) / "run"))
    judged = gates(size, found)
    if arguments.json:
        print(json.dumps({"figures": found, "gates": gates_as_json(judged), "size": vars(arguments)}, indent=2))
        return
    for what, value in found.items():
        print(f"  {what:<24} {value:.4g}" if isinstance(value, float) else f"  {what:<24} {value}")
    print_gates(judged)


if __name__ == "__main__":
    main()
