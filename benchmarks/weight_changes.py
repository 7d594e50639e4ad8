"""Measure how many bytes a publish of changes sends, by learning rate and kind of tensor, and how long it takes.

    python benchmarks/weight_changes.py [--json] [--model FOLDER] [--steps 4] [--only-sizes]

Sizes: the example `rl_sort` (GRPO, AdamW, fp32 master weights) trains at several constant learning rates. After each
step, the weights are converted to bf16, as for an engine, and compared with those of the step before. The table has the
bytes that `full_every` sends for a publish, relative to all bytes; a step is four optimizer steps. The model is the one
that the README's quickstart warms up; without it, `--model` names another folder.

Times: random weights of 256 MiB in bf16 are published to an engine in this process, whole and as changes. About as many
values change as in the example. The CPU seconds per GiB are those of both sides: comparing and compressing, the
transport, the way back, and a copy into the engine's weights. `collective` uses the loopback device.

From these, it computes how many times as fast as a publish of all weights a publish of changes is over a network of 1,
10 and 100 Gbit/s, and the speed at which both are equal. Comparing and compressing, and the way back, take what changes
take more than all weights with `shared_memory`, divided by 8 threads. The rest of a publish is the time of its bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spurline import Run, load_config
from spurline_async_rl.weights.changes import ChangesMaker
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig, DiskSyncConfig, SharedMemorySyncConfig
from spurline_async_rl.weights.disk import DiskSync
from spurline_async_rl.weights.reading import BucketReader
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_concurrency.calls import in_thread
from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_rl.protocols.rollout_engine import TakesWeights

RATES = (1e-6, 1e-5, 1e-4)
KINDS = {"embed": "embedding", "self_attn": "attention", "mlp": "mlp", "norm": "norms"}
TRANSPORTS: dict[str, tuple[Any, Any]] = {
    "shared_memory": (SharedMemorySync, SharedMemorySyncConfig),
    "disk": (DiskSync, DiskSyncConfig),
    "collective": (CollectiveSync, CollectiveSyncConfig),
}
GBIT_PER_GIB = 2**33 / 1e9
SPEEDS = (1, 10, 100)
"""Gbit/s of networks."""
THREADS = 8
"""The most threads that compare and compress, or undo it."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "rl_sort.yaml"


class Passed:
    """A `BucketMaker` that keeps its tensors in this process."""

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        held = list(weights)
        places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
        return WeightBucket("passed", places, tensors=tuple(tensor for _, tensor in held))

    def taken(self) -> None:
        """Free nothing."""

    close = taken


def bytes_sent(bucket: WeightBucket) -> int:
    return sum(tensor.nbytes for tensor in bucket.tensors)


def maker() -> ChangesMaker:
    return ChangesMaker(f"{__name__}:Passed", {}, chain=1)


def kind_of(name: str) -> str:
    # Norms of attention are norms.
    return next((kind for part, kind in reversed(KINDS.items()) if part in name), "other")


def sizes(rate: float, steps: int, model: str | None, folder: Path) -> dict[str, float]:
    """Return the share of the bytes that publishes send at this learning rate, by kind of tensor."""
    settings = {
        "run_dir": folder / str(rate),
        "steps": steps,
        "schedule": "constant",
        "optimizer.learning_rate": rate,
        "report.enabled": "false",
        "evaluation.every_steps": 1000,
        "checkpoint.export_hf": "false",
    } | ({} if model is None else {"model.path": model})
    makers = defaultdict(maker)
    sent: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = defaultdict(int)

    def publish(step: int, _: Mapping[str, float]) -> None:
        for name, tensor in run.backend.named_weights():
            weight = tensor.to(torch.bfloat16)
            made = bytes_sent(makers[name].make(step, 1, [(name, weight)]))
            if step > 1:
                for kind in (kind_of(name), "all"):
                    sent[kind] += made
                    whole[kind] += weight.nbytes

    run = Run(load_config(EXAMPLE, [f"{name}={value}" for name, value in settings.items()]), on_step=publish)
    run.train()
    return {kind: sent[kind] / whole[kind] for kind in sorted(whole)}


class Receiver(TakesWeights):
    """An engine that copies what arrives into weights of its own."""

    transports = tuple(TRANSPORTS)

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self._reader = BucketReader()

    async def begin_update(self, version: int) -> None:
        """Stop nothing."""

    async def load_bucket(self, bucket: WeightBucket) -> None:
        def load() -> None:
            for name, tensor in self._reader.read(replace(bucket, receiver="the engine")):
                self._weights[name].copy_(tensor)

        await in_thread(load)

    async def finish_update(self, version: int) -> None:
        self._reader.end_update()


def pair(rate: float, count: int = 16) -> list[Any]:
    """Return two backends with 256 MiB of bf16 weights, before and after a step at this learning rate."""
    random = torch.Generator().manual_seed(0)
    # With 1.5 times the rate, about as many bytes change as in the example.
    before = {str(number): 0.02 * torch.randn(8 << 20, generator=random) for number in range(count)}
    after = {name: tensor + 1.5 * rate * torch.randn(tensor.shape, generator=random) for name, tensor in before.items()}
    halves = [{name: tensor.bfloat16() for name, tensor in weights.items()} for weights in (before, after)]
    return [SimpleNamespace(named_weights=weights.items) for weights in halves]


def publishes(folder: Path, repeats: int = 5) -> dict[str, Any]:
    """Return the CPU seconds per GiB of publishes of all weights and of changes, and the share of the bytes sent."""
    found: dict[str, Any] = {}
    for rate in RATES:
        states = pair(rate)
        whole = sum(tensor.nbytes for _, tensor in states[0].named_weights())
        row = found[str(rate)] = {}
        for transport, (sync, config) in TRANSPORTS.items():
            given = {"folder": str(folder)} if transport == "disk" else {}
            syncs = {"all": sync(config(**given)), "changes": sync(config(full_every=1000, **given))}
            receivers = {name: Receiver(dict(states[0].named_weights())) for name in syncs}
            taken: dict[str, list[float]] = {name: [] for name in syncs}
            for version in range(repeats + 1):
                for name, each in syncs.items():
                    began = time.process_time()
                    report = asyncio.run(each.publish(version, states[version % 2], [receivers[name]]))
                    row["bytes"] = report.bytes_sent / whole
                    # The first publish has all weights and allocates memory.
                    if version:
                        taken[name].append((time.process_time() - began) * 2**30 / whole)
            row[transport] = {name: statistics.median(values) for name, values in taken.items()}
            for each in syncs.values():
                each.close()
        coding = (row["shared_memory"]["changes"] - row["shared_memory"]["all"]) / THREADS
        row["break_even_gbit_s"] = GBIT_PER_GIB * (1 - row["bytes"]) / coding
        times = {speed: GBIT_PER_GIB / speed for speed in SPEEDS}
        row["times_as_fast"] = {speed: wire / (wire * row["bytes"] + coding) for speed, wire in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--model", help="folder of the model, instead of the example's")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only-sizes", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        figures["shares"] = {str(rate): sizes(rate, options.steps, options.model, Path(folder)) for rate in RATES}
        if not options.only_sizes:
            figures["times"] = publishes(Path(folder))
    if options.json:
        print(json.dumps(figures))
        return
    kinds = list(next(iter(figures["shares"].values())))
    print(f"{'learning rate':15}" + "".join(f"{kind:>12}" for kind in kinds))
    for rate, shares in figures["shares"].items():
        print(f"{rate:15}" + "".join(f"{100 * shares[kind]:>11.2f}%" for kind in kinds))
    for rate, row in figures.get("times", {}).items():
        faster = ", ".join(f"{times:.1f} x at {speed} Gbit/s" for speed, times in row["times_as_fast"].items())
        print(f"{rate}: {row['bytes']:.1%} of the bytes; {faster}; equal at {row['break_even_gbit_s']:.1f} Gbit/s")
        for name in TRANSPORTS:
            print(f"  {name:14} all {row[name]['all']:.2f}, changes {row[name]['changes']:.2f} s per GiB")


if __name__ == "__main__":
    main()
