"""Measure how many bytes a publish of changes sends, by learning rate and kind of tensor, and how long it takes.

    python benchmarks/weight_changes.py [--json] [--model FOLDER] [--steps 4] [--only-sizes]

Sizes: the example `rl_sort` (GRPO, AdamW, fp32 master weights) trains at several constant learning rates. After each
step, the weights are converted to bf16, as for an engine, and compared with those of the step before. The table has the
bytes that `full_every` sends for a publish, relative to all bytes; a step is four optimizer steps. The model is the one
that the README's quickstart warms up; without it, `--model` names another folder.

Times: a tensor of 256 MiB in bf16, in which 3 of 100 values differ by their last bit, is sent whole and as changes. The
seconds are those of comparing and compressing, and of the way back, by threads of this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spurline import Run, load_config
from spurline_async_rl.weights.changes import ChangesMaker, ChangesReader
from spurline_models.weight_buckets import TensorPlace, WeightBucket

RATES = (1e-6, 1e-5, 1e-4)
KINDS = {"embed": "embedding", "self_attn": "attention", "mlp": "mlp", "norm": "norms"}
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


def seconds(repeats: int = 5) -> dict[str, float]:
    """Return the seconds per GiB of comparing and compressing, and of the way back."""
    old = torch.randn(128 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    new.view(torch.int16)[::33] ^= 1
    sender, reader = maker(), ChangesReader()
    taken: dict[str, list[float]] = {"send": [], "receive": []}
    for version in range(repeats + 1):
        begin = time.perf_counter()
        bucket = sender.make(version, 1, [("weight", new if version % 2 else old)])
        middle = time.perf_counter()
        list(reader.read(bucket, zip((place.name for place in bucket.places), bucket.tensors, strict=True)))
        if version:
            taken["send"].append((middle - begin) * 4)
            taken["receive"].append((time.perf_counter() - middle) * 4)
    return {name: statistics.median(values) for name, values in taken.items()}


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
        figures["seconds_per_gib"] = seconds()
    if options.json:
        print(json.dumps(figures))
        return
    kinds = list(next(iter(figures["shares"].values())))
    print(f"{'learning rate':15}" + "".join(f"{kind:>12}" for kind in kinds))
    for rate, shares in figures["shares"].items():
        print(f"{rate:15}" + "".join(f"{100 * shares[kind]:>11.2f}%" for kind in kinds))
    for name, value in figures.get("seconds_per_gib", {}).items():
        print(f"{name}: {value:.2f} s per GiB")


if __name__ == "__main__":
    main()
