"""How fast the command line answers when it needs no model: `--help`, a config error, `import spurline`, the banner.

    python benchmarks/startup.py [--json] [--repeats 7]

Each case is a whole process, run round-robin; the figure is the median wall time. The floor is an empty interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNER = "import sys; sys.modules['spurline.run.run'] = None; from spurline.cli import main; main(sys.argv[1:])"
"""What follows the banner is the import of the run, and of torch with it; here it ends the process."""

CASES = {
    "python -c pass (floor)": ["-c", "pass"],
    "import spurline": ["-c", "import spurline"],
    "spurline --help": ["-m", "spurline.cli", "--help"],
    "spurline plan, config error": ["-m", "spurline.cli", "plan", "examples/sft_sort.yaml", "--set", "sead=1"],
    "spurline plugins": ["-m", "spurline.cli", "plugins"],
    "spurline train, to the end of its banner": ["-c", BANNER, "train", "examples/sft_sort.yaml"],
}
LIMIT_S = 1.0


def measure(repeats: int) -> dict[str, float]:
    """Median seconds of each case."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, arguments in CASES.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False, timeout=60)
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    figures = measure(arguments.repeats)
    passed = all(seconds < LIMIT_S for seconds in figures.values())
    if arguments.json:
        print(json.dumps({"median_s": figures, "limit_s": LIMIT_S, "passed": passed}, indent=2))
        return
    for name, seconds in figures.items():
        print(f"{name:32s} {seconds * 1000:7.0f} ms")
    print(f"limit {LIMIT_S * 1000:.0f} ms: {'met' if passed else 'NOT MET'}")


if __name__ == "__main__":
    main()
