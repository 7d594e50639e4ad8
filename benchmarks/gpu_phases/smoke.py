"""Train the examples by `spurline train` on this device, and check that they learn.

Runs begin with a warm-up by supervised fine-tuning, as the examples' own text says. The figures are printed after every
command, so that a run which is stopped leaves what is known by then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Smoke:
    """A run. `metric` is to change by `factor` at least: below 1 it must fall, above it must rise.

    `steps` and `warm_up_steps` are pairs: on a GPU, and tiny.
    """

    example: str
    metric: str
    factor: float
    steps: tuple[int, int]
    warm_up_steps: tuple[int, int] = (0, 0)
    precision: str = "bf16"
    settings: tuple[str, ...] = ()


CONSTANT, ROLLOUTS = ("schedule=constant",), ("schedule=constant", "source.prompts_per_step=16")
SMOKES = {
    "sft": Smoke("sft_sort", "loss", 0.7, (200, 12), settings=CONSTANT),
    "dpo": Smoke("dpo_sort", "loss", 0.97, (60, 6), (130, 12), precision="fp32", settings=CONSTANT),
    "rl": Smoke("rl_sort", "reward/mean", 1.02, (30, 4), (180, 12), settings=ROLLOUTS),
    "vllm": Smoke("rl_sort_vllm", "reward/mean", 1.02, (30, 4), (180, 12), settings=ROLLOUTS),
}
Command = tuple[Path, list[str]]
"""A config, and what `--set` changes in it."""


def train(config: Path, settings: Sequence[str]) -> float:
    """Run `spurline train`, and return its seconds. Ends this process with its last words if it fails."""
    command = [sys.executable, "-m", "spurline", "train", str(config)]
    began = time.perf_counter()
    changes = [part for setting in settings for part in ("--set", setting)]
    # Standard output is for figures alone. What the run says goes to the log at once, so that a stop loses none of it.
    # The paths in examples are below the repository's root.
    code = subprocess.call([*command, *changes], stdout=sys.stderr, cwd=EXAMPLES.parent)
    if code != 0:
        sys.exit(f"`spurline train {config.name}` ended with exit code {code}")
    return time.perf_counter() - began


def learned(run_dir: Path, metric: str) -> dict[str, float]:
    """Return the means of a metric over the first and the last fifth of the steps, and the median seconds of a step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    values = [line[metric] for line in lines if metric in line]
    share = max(1, len(values) // 5)
    found = {"first": statistics.fmean(values[:share]), "last": statistics.fmean(values[-share:])}
    steps = [line["time/step"] for line in lines if "time/step" in line]
    return found | ({"step_s": statistics.median(steps)} if steps else {})


def commands(name: str, device: str, tiny: bool, folder: Path) -> list[Command]:
    """Return what `spurline train` runs: a warm-up if there is one, and the run."""
    smoke, size, model = SMOKES[name], int(tiny), folder / "tiny-qwen3"
    precision = smoke.precision if device == "cuda" else "fp32"
    plugins = ["collation_fast"] if find_spec("numba") else []
    shared = [f"backend.device={device}", f"backend.precision={precision}", "checkpoint.export_hf=true"]
    found: list[Command] = []
    if smoke.warm_up_steps[size]:
        settings = [f"model.path={model}", f"run_dir={folder / 'warm-up'}", f"steps={smoke.warm_up_steps[size]}"]
        settings += [*CONSTANT, f"plugins={plugins}", *quiet(smoke.warm_up_steps[size]), GENERATED]
        found.append((EXAMPLES / "sft_sort.yaml", [*settings, *shared]))
        model = folder / "warm-up" / "model"
    settings = [f"model.path={model}", f"run_dir={folder / name}", f"steps={smoke.steps[size]}", *smoke.settings]
    settings += quiet(smoke.steps[size])
    if smoke.example.startswith("rl"):
        settings.append("source.held_out.max_prompts=32")
    else:
        settings.append(GENERATED)
    if name == "vllm":
        plugins = [*plugins, "async_rl"]
        settings += ["source.engine.gpu_memory_utilization=0.3", "source.engine.dtype=auto"] if device == "cuda" else []
    return [*found, (EXAMPLES / f"{smoke.example}.yaml", [*settings, *shared, f"plugins={plugins}"])]


GENERATED = "evaluation.generate.max_samples=32"


def quiet(steps: int) -> list[str]:
    """Return settings with which a run evaluates and saves only at its end."""
    return [f"evaluation.every_steps={steps}", f"checkpoint.every_steps={steps}"]


def run(name: str, device: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Run the smoke run of this name in a folder, and return its figures."""
    # A finished run that is found again would train nothing, and its old figures would count.
    shutil.rmtree(folder, ignore_errors=True)
    make = [sys.executable, str(EXAMPLES / "make_tiny_model.py"), str(folder / "tiny-qwen3")]
    subprocess.run(make, check=True, stdout=sys.stderr)
    figures: dict[str, Any] = {"metric": SMOKES[name].metric, "device": device}
    for config, settings in commands(name, device, tiny, folder):
        figures[f"{config.stem}_s"] = train(config, settings)
        print(json.dumps(figures), flush=True)
    return figures | learned(folder / name, SMOKES[name].metric)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SMOKES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args(arguments)
    smoke = SMOKES[given.name]
    figures = run(given.name, given.device, given.tiny, given.folder)
    print(json.dumps(figures), flush=True)
    first, last = figures["first"], figures["last"]
    wanted = first * smoke.factor
    # A few steps of a tiny run show that it runs. Only the longer one must learn.
    if not given.tiny and (last > wanted if smoke.factor < 1 else last < wanted):
        sys.exit(f"{smoke.metric} went from {first:.4f} to {last:.4f}, and should have passed {wanted:.4f}")
