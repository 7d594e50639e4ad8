"""Count false alarms of the proof of publish on honest engines, and measure what the proof costs.

    python benchmarks/proofs.py MODEL [--steps 75] [--only "child-fp32;vllm-bf16"] [--json]

MODEL: the folder of a model that answers some prompts right, such as runs/sort_warmup/model; see rl_sort_async.yaml.
Every run is an asynchronous run of this example with another engine, precision, or backend. It publishes after each
step. Setting `source.proof.on_undelivered` is `stop`, so a false alarm ends the run with an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
FSDP = ("plugins=[async_rl,fsdp_backend]", "backend.name=fsdp", "backend.ranks=2")
ADAPTERS = ("backend.lora={rank: 8}", "optimizer.learning_rate=2e-3")
CHILDREN = ("source.engine={name: child_process, engines: 2, num_threads: 1}",)
CHILDREN_IN_BF16 = ("source.engine={name: child_process, engines: 2, num_threads: 1, precision: bf16}",)
VLLM = "source.engine={name: vllm, dtype: %s, max_model_len: 512, kv_cache_gb: 0.5}"
SETUPS: dict[str, tuple[str, ...]] = {
    "child-fp32": CHILDREN,
    "child-bf16": (*CHILDREN_IN_BF16, "backend.precision=bf16"),
    "child-bf16, trainer fp32": CHILDREN_IN_BF16,
    "child-fp32, S = 0": (*CHILDREN, "source.max_staleness=0"),
    "child-fp32, fsdp x 2": (*CHILDREN, *FSDP),
    "child-fp32, adapters": (*CHILDREN, *ADAPTERS),
    "vllm-fp32": (VLLM % "float32",),
    "vllm-bf16": (VLLM % "bfloat16", "backend.precision=bf16"),
    "vllm-bf16, adapters": (VLLM % "bfloat16", "backend.precision=bf16", *ADAPTERS),
}
SMALL = (
    "source.prompts_per_step=8",
    "source.samples_per_prompt=4",
    "source.held_out.max_prompts=8",
    "evaluation.every_steps=100000",
    "checkpoint.every_steps=null",
    "report.enabled=false",
    "source.proof.on_undelivered=stop",
)


def measure(setup: str, model: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Train with this setup, and return figures of its proofs."""
    run = folder / setup.replace(" ", "").replace(",", "-")
    settings = [f"model.path={model}", f"run_dir={run}", f"steps={steps}", *SMALL, *SETUPS[setup]]
    command = [sys.executable, "-m", "spurline.cli", "train", "examples/rl_sort_async.yaml"]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    proven = [line for line in lines if "publish/probe_diff" in line]
    delivered = [line["publish/delivered"] for line in proven if "publish/delivered" in line]
    return {
        "setup": setup,
        "publishes": len(proven),
        "error": done.stderr.strip().splitlines()[-1] if done.returncode else "",
        "first_diff": proven[0]["publish/probe_diff"] if proven else None,
        "largest_diff": max((line["publish/probe_diff"] for line in proven), default=None),
        "judged_by_update": len(delivered),
        "least_delivered": min(delivered, default=None),
        "median_proof_s": statistics.median(line["time/proof"] for line in proven) if proven else None,
        "median_step_s": statistics.median(line["time/step"] for line in proven) if proven else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--only", help="names of setups, with semicolons between them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setups = options.only.split(";") if options.only else list(SETUPS)
    failed = False
    with TemporaryDirectory() as folder:
        for setup in setups:
            found = measure(setup, options.model.absolute(), options.steps, Path(folder))
            failed = failed or bool(found["error"])
            print(json.dumps(found) if options.json else "  ".join(f"{k}: {v}" for k, v in found.items()), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
