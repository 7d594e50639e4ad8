"""Check that two checkouts have the same metrics, bit for bit, in a few steps of the examples.

    python benchmarks/same_metrics.py OLD NEW [--steps 4] [--only sft,rl]

OLD and NEW are folders of checkouts. Each checkout runs with its own packages and the interpreter of its `.venv`, or
with the current interpreter if it has no `.venv`. Metrics that depend on the clock or the machine, such as `time/...`
and memory, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ON_RANKS = ("backend.ranks=2", "backend.device=cpu")
CASES: dict[str, tuple[str, ...]] = {
    "sft": ("sft_sort",),
    "dpo": ("dpo_sort",),
    "rl": ("rl_sort",),
    # Groups run one at a time. Otherwise the clock would decide which attempts share a decode step, which changes the
    # rounding.
    "async": ("rl_sort_async", "source.max_staleness=0", "source.max_concurrent_groups=1"),
    "fsdp": ("sft_sort", "plugins=[fsdp_backend]", "backend.name=fsdp", *ON_RANKS),
    "megatron": (
        "sft_sort",
        "plugins=[megatron_backend]",
        "backend.name=megatron",
        "backend.tensor=2",
        "evaluation.generate=null",
        *ON_RANKS,
    ),
}
BY_THE_CLOCK = ("time", "memory", "throughput", "tokens_per_s", "controller", "engine", "depth", "wait", "hidden")


def train(checkout: Path, case: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """Train an example with the code of a checkout and return the metrics of its steps."""
    example, *settings = CASES[case]
    own = checkout / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    model = folder / "model"
    sources = os.pathsep.join(str(path) for path in sorted(checkout.glob("*/src")) + sorted(checkout.glob("*/*/src")))
    environment = os.environ | {"PYTHONPATH": sources, "SPURLINE_CACHE": str(folder / "cache")}
    if not model.exists():
        command = [python, "examples/make_tiny_model.py", str(model)]
        subprocess.run(command, check=True, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)
    run = folder / case
    given = [f"run_dir={run}", f"model.path={model}", f"steps={steps}", "report.enabled=false", *settings]
    command = [python, "-m", "spurline.cli", "train", f"examples/{example}.yaml"]
    command += [word for setting in given for word in ("--set", setting)]
    done = subprocess.run(command, check=False, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{checkout}, {case}: {done.stderr[-2000:]}")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not any(word in k for word in BY_THE_CLOCK)} for line in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", help="cases, with commas between them")
    options = parser.parse_args()
    cases = options.only.split(",") if options.only else list(CASES)
    differing = 0
    with TemporaryDirectory() as folder:
        for case in cases:
            both: list[list[dict[str, float]]] = []
            for number, checkout in enumerate((options.old, options.new)):
                own = Path(folder, str(number))
                own.mkdir(exist_ok=True)
                both.append(train(checkout.absolute(), case, options.steps, own))
            old, new = ({name for line in lines for name in line} for lines in both)
            names = old & new
            steps = zip(*both, strict=True)
            wrong = sorted({name for one, two in steps for name in names if one.get(name) != two.get(name)})
            differing += bool(wrong)
            said = f"differ: {', '.join(wrong)}" if wrong else "equal"
            only = f"; only one has {', '.join(sorted(old ^ new))}" if old != new else ""
            print(f"{case}: {len(names)} metrics of {len(both[0])} steps {said}{only}", flush=True)
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
