"""Measure how fast commands without a model respond, and how long a run of one step takes.

    make models/tiny-qwen3
    python benchmarks/startup.py [--json] [--repeats 7] [--first-steps 3] [--beside CHECKOUT]

Without a model: `--help`, a config error, `import spurline`, and the banner. Each case is a whole process. Cases take
turns, and figures are medians of wall time. The floor is an empty interpreter.

First step: `spurline train` runs `examples/sft_sort.yaml` for one step, as a new run whose tokens are in the cache.
Figures are medians of wall time, and of the CPU time of the process and its children, which is more reliable on a busy
machine. The cases are without the plugin `collation_fast`, with it, and with it but without compiled code in the cache,
as on a new machine. The floor is a hand-written loop with the same model and one step of AdamW, which evaluates and
saves nothing. With `--beside`, runs of another checkout of this repository take turns with them, and the ratios are
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
BANNER = "import sys; sys.modules['spurline.run.run'] = None; from spurline.cli import main; main(sys.argv[1:])"
"""After the banner, a command imports the run and torch. Here this import fails and ends the process."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The environment of all processes. They may write byte code, since compiling a checkout each time takes 0.3 s."""

CASES = {
    "python -c pass (floor)": ["-c", "pass"],
    "import spurline": ["-c", "import spurline"],
    "spurline --help": ["-m", "spurline.cli", "--help"],
    "spurline plan, config error": ["-m", "spurline.cli", "plan", "examples/sft_sort.yaml", "--set", "sead=1"],
    "spurline plugins": ["-m", "spurline.cli", "plugins"],
    "spurline train, to the end of its banner": ["-c", BANNER, "train", "examples/sft_sort.yaml"],
}
LIMIT_S = 1.0

TRAIN = [
    "-m",
    "spurline.cli",
    "train",
    "examples/sft_sort.yaml",
    "--set",
    "steps=1",
    "--set",
    "checkpoint.export_hf=false",
]
FIRST_STEPS = {
    "first step, without collation_fast": ["--set", "plugins=[]"],
    "first step, collation_fast": [],
    "first step, collation_fast, nothing compiled yet": [],
}
COLD = "first step, collation_fast, nothing compiled yet"
FLOOR = "first step, a loop by hand (floor)"
BY_HAND = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained("models/tiny-qwen3")
model = AutoModelForCausalLM.from_pretrained("models/tiny-qwen3")
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.zeros(5, 512, dtype=torch.long)
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
"""
BESIDE = " (beside)"
"""The suffix of the names of the other checkout's figures."""


def measure(repeats: int) -> dict[str, float]:
    """Return the median seconds of each case."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, arguments in CASES.items():
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, check=False, timeout=60
            )
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_first_steps(repeats: int, beside: Path | None) -> dict[str, dict[str, float]]:
    """Return the median wall and CPU seconds of each case. One more round before them fills the caches."""
    roots = {"": ROOT} | ({BESIDE: beside} if beside else {})
    cases = [(FLOOR, "", [])] + [(name, root, options) for name, options in FIRST_STEPS.items() for root in roots]
    times: dict[str, list[tuple[float, float]]] = {name + root: [] for name, root, _ in cases}
    with TemporaryDirectory() as folder:
        for turn in range(repeats + 1):
            for place, (name, root, options) in enumerate(cases):
                of = Path(folder, "beside" if root else "here")
                arguments = [*TRAIN, *options, "--set", f"run_dir={of}/{turn}-{place}"]
                environment = {
                    "NUMBA_CACHE_DIR": f"{of}/compiled-{turn if name == COLD else ''}",
                    "SPURLINE_CACHE": f"{of}/cache",
                    "PYTHONPATH": os.pathsep.join(str(source) for source in sources(roots[root])),
                }
                begin, used = time.perf_counter(), cpu_of_children()
                subprocess.run(
                    [sys.executable, *(["-c", BY_HAND] if name == FLOOR else arguments)],
                    cwd=ROOT,
                    env=ENVIRONMENT | environment,
                    capture_output=True,
                    check=True,
                    timeout=300,
                )
                times[name + root].append((time.perf_counter() - begin, cpu_of_children() - used))
    return {
        name: {
            "wall_s": statistics.median(wall for wall, _ in measured[1:]),
            "cpu_s": statistics.median(cpu for _, cpu in measured[1:]),
        }
        for name, measured in times.items()
    }


def sources(root: Path) -> list[Path]:
    """Return the source folders of a checkout, which come before installed packages."""
    return [root / "core" / "src", *sorted((root / "plugins").glob("*/src"))]


def cpu_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def ratios(first: dict[str, dict[str, float]], name: str) -> str:
    """Return the ratios of a case to the other checkout in words, or an empty text if it was not measured."""
    other = first.get(name + BESIDE)
    if other is None:
        return ""
    return ", {:.2f} and {:.2f} of those beside".format(
        *(first[name][unit] / other[unit] for unit in ("wall_s", "cpu_s"))
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--first-steps", type=int, default=3, help="repeats of runs of one step; 0 for none")
    parser.add_argument("--beside", type=Path, help="another checkout of the repository, to compare first steps with")
    arguments = parser.parse_args()
    figures = measure(arguments.repeats)
    first = measure_first_steps(arguments.first_steps, arguments.beside) if arguments.first_steps else {}
    passed = all(seconds < LIMIT_S for seconds in figures.values())
    if arguments.json:
        print(json.dumps({"median_s": figures, "limit_s": LIMIT_S, "passed": passed, "first_step": first}, indent=2))
        return
    for name, seconds in figures.items():
        print(f"{name:32s} {seconds * 1000:7.0f} ms")
    for name, seconds in first.items():
        print(f"{name:60s} {seconds['wall_s']:6.1f} s, {seconds['cpu_s']:6.1f} s of CPU{ratios(first, name)}")
    print(f"limit {LIMIT_S * 1000:.0f} ms: {'met' if passed else 'NOT MET'}")


if __name__ == "__main__":
    main()
