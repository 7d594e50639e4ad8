"""Try everything on one GPU, measure it, and write down all that was learned: one command for a person with a GPU.

    python benchmarks/gpu_all.py --out DIR [--budget 540] [--only PHASE ...] [--skip-done] [--list]
                                 [--device cuda|cpu] [--tiny] [--jobs N]

The work is a list of phases, the most important first. Each phase runs in its own process with its own time limit, and
its result is on the disk before the next phase begins. So nothing is lost if a phase hangs or crashes, if the command
is killed, or if the seconds of `--budget` are over: what runs by then is `cut`, which is no failure, and phases that no
longer fit are skipped, and said to be. So is one whose library is missing. `--skip-done` goes on where the last command
with this DIR ended, and leaves out what was ok. `--only` runs phases by name, or by pattern: `--only 'sft-0.6b-*'`.

Kinds of phases (`--list` prints their names in their order, in which those that say most of each kind come first):

- device: versions, GPU, driver, memory, which fast paths are on, and ceilings of the device (copies, bf16 products).
- smoke-*: SFT, DPO, RL in process, and RL with vLLM by `spurline train` on a tiny model; loss or reward must improve.
- tests-*: `tests/gpu`, in parts that run side by side with each other and with the smoke runs.
- sft-*: tokens per second, MFU and memory of supervised steps by `gpu_sft.py`, in Spurline and in other code.
- profile-*: the kernels of a step, and the share of time for which the GPU waits, as a picture.
- weights-*: GB/s of each transport of weights that works on one GPU.
- generation-*: tokens per second of the engine in process, and of vLLM with CUDA graphs; publishing to vLLM, and the
  mismatch of an on-policy step.

DIR gets `results.jsonl` (a line for each phase), `table.md`, `gpu-results.md` (lines for docs/gpu-results.md),
`log.txt` (the end of each phase's output), pictures, and `work/`, which can be deleted. `--device cpu --tiny` tries all
of it on a CPU in some minutes. The exit code is 1 if a phase failed or hung.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_phases.runner import Phase, Record, run_phases
from gpu_phases.table import write_tables

BEGAN = time.monotonic()
"""When the budget begins: what is imported later, such as torch, counts too."""
BENCHMARKS = Path(__file__).resolve().parent
TESTS = BENCHMARKS.parent / "tests" / "gpu"
EARLY = ("tests-runs", "tests-local-backend-*", "tests-fsdp-1", "tests-collation")
"""Parts of the tests that come before the measurements. The others come after the most important of these."""
EARLY_S = 60
"""Seconds that each phase before the first measurements may take."""
PARTS = {"test_fsdp_gpu": 3, "test_megatron_gpu": 3, "test_local_backend_gpu": 2}
"""Files of tests that run in several parts."""
ALONE = "device_is_free or sleeping_engine or memory_of_a_gpu"
"""Tests that read the memory of the whole GPU, and must have it for themselves."""

ORDER = (
    "device",
    *("smoke-sft", "smoke-rl", "smoke-dpo", *EARLY),
    *("sft-tiny-*", "sft-0.6b-all-spurline", "sft-0.6b-all-strong-loop", "sft-0.6b-all-loop"),
    *("profile-spurline", "weights-*", "generation-in-process", "tests-memory", "tests-alone"),
    *("sft-8b-lora-spurline", "sft-8b-lora-strong-loop", "sft-4b-all-spurline-bf16-weights", "sft-4b-all-strong-loop"),
    *("sft-0.6b-all-spurline-bf16-weights", "sft-0.6b-all-spurline-bf16-weights-compile"),
    *("sft-0.6b-all-fsdp", "sft-0.6b-all-megatron", "generation-vllm", "smoke-vllm", "tests-*", "profile-*"),
    *("sft-*-spurline", "sft-*-strong-loop", "sft-*-spurline-bf16-weights"),
)
"""Patterns of the names of phases, the most important first. What none fits comes after them."""
LAST = ("sft-[48]b-*-fsdp*", "sft-[48]b-*-megatron")
"""Phases after all others: large models in processes of their own, which take long to start."""


def own(module: str, *arguments: object) -> tuple[str, ...]:
    """Return the command of a module of `gpu_phases`."""
    return (str(BENCHMARKS / "gpu_all.py"), "--child", module, *map(str, arguments))


def all_phases(device: str, tiny: bool, out: Path) -> list[Phase]:
    """Return every phase, the most important first."""
    where = ["--device", device, *(["--tiny"] if tiny else [])]
    phases = [
        Phase("device", own("device", *where), 120, about={"kind": "device"}),
        *smoke_runs(where, out),
        *tests(),
        *supervised(device, tiny),
        *profiles(where, tiny, out),
        *weights(where),
        *generation(where),
    ]
    return sorted(phases, key=place)


def place(phase: Phase) -> int:
    """Return where a phase comes among all: the smaller, the earlier."""
    if any(fnmatchcase(phase.name, pattern) for pattern in LAST):
        return len(ORDER) + 1
    return next((number for number, pattern in enumerate(ORDER) if fnmatchcase(phase.name, pattern)), len(ORDER))


def missing(*modules: str) -> str:
    """Return which of these modules cannot be imported here, as a sentence, or an empty string."""
    absent = [name for name in modules if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def smoke_runs(where: Sequence[str], out: Path) -> Iterator[Phase]:
    needs = {"dpo": ["spurline_preference"], "rl": ["spurline_rl"], "vllm": ["spurline_async_rl", "vllm"]}
    for name in ("sft", "rl", "dpo", "vllm"):
        command = own("smoke", name, *where, "--folder", out / "work" / f"smoke-{name}")
        limit = 300 if name == "vllm" else EARLY_S
        lacks = missing(*needs.get(name, []))
        yield Phase(f"smoke-{name}", command, limit, 30, shares=True, missing=lacks, about={"kind": "smoke"})


def tests() -> Iterator[Phase]:
    needed = ("pytest", "hypothesis", "psutil")
    for path in sorted(TESTS.glob("test_*.py")):
        parts = PARTS.get(path.stem, 1)
        lacks = missing(*needed, *(["numba"] if "collation" in path.stem else []))
        name = path.stem.removeprefix("test_").removesuffix("_gpu").replace("_", "-")
        for part in range(1, parts + 1):
            command = own("pytest_part", path, "--part", f"{part}/{parts}", "-k", f"not ({ALONE})")
            about = {"kind": "tests"}
            called = f"tests-{name}" + (f"-{part}" if parts > 1 else "")
            limit = EARLY_S if any(fnmatchcase(called, pattern) for pattern in EARLY) else 120
            yield Phase(called, command, limit, 30, shares=True, missing=lacks, about=about)
    command = own("pytest_part", TESTS, "-k", ALONE)
    yield Phase("tests-alone", command, 90, 20, missing=missing(*needed), about={"kind": "tests"})


def supervised(device: str, tiny: bool) -> Iterator[Phase]:
    """Yield a phase for each candidate of each model of `gpu_sft.py`."""
    from gpu_sft import candidates, child_arguments, job_of

    # Larger models need fewer steps for a figure, since each step takes longer.
    jobs = [("0.6b", "all", 8), ("8b", "lora", 4), ("4b", "all", 4), ("1.7b", "all", 6), ("4b", "lora", 4)]
    jobs += [("8b", "qlora", 4), ("4b", "qlora", 4), ("0.6b", "lora", 8)]
    for model, train, steps in [("tiny", "all", 2), ("tiny", "lora", 2)] if tiny else jobs:
        job = job_of(model, device, steps, train)
        lacks = missing(*{"all": [], "lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}[train])
        for candidate in candidates(job):
            name = f"sft-{model}-{train}-" + re.sub(r"[^a-z0-9]+", "-", candidate)
            arguments = child_arguments(job, candidate)
            only = f"--only '{candidate}'" if " " in candidate else f"--only {candidate}"
            command = f"`benchmarks/gpu_sft.py --model {model} --train {train} --steps {steps} {only}`"
            about = {"kind": "sft", "model": model, "train": train, "candidate": candidate, "command": command}
            limit = 150 if "compile" in candidate else 90
            yield Phase(name, (str(BENCHMARKS / "gpu_sft.py"), *arguments), limit, 25, missing=lacks, about=about)


def profiles(where: Sequence[str], tiny: bool, out: Path) -> Iterator[Phase]:
    for candidate in ("spurline",) if tiny else ("spurline", "spurline + bf16 weights"):
        name = "profile-" + re.sub(r"[^a-z0-9]+", "-", candidate)
        command = own("profiling", candidate, *where, "--picture", out / f"{name}.svg")
        yield Phase(name, command, 75, 25, about={"kind": "profile"})


def weights(where: Sequence[str]) -> Iterator[Phase]:
    lacks = missing("spurline_async_rl")
    for transport in ("cuda_ipc", "shared_memory", "disk"):
        why = lacks or ("needs a GPU" if transport == "cuda_ipc" and "cpu" in where else "")
        command = own("rollouts", "publish", transport, *where)
        yield Phase(f"weights-{transport}", command, 75, 25, missing=why, about={"kind": "weights"})


def generation(where: Sequence[str]) -> Iterator[Phase]:
    about = {"kind": "generation"}
    yield Phase("generation-in-process", own("rollouts", "in_process", *where), 75, 25, about=about)
    lacks = missing("spurline_async_rl", "vllm")
    yield Phase("generation-vllm", own("rollouts", "vllm", *where), 240, 60, missing=lacks, about=about)


def chosen(phases: Sequence[Phase], patterns: Sequence[str] | None, done: set[str]) -> list[Phase]:
    """Return the phases that these patterns name, without those that are done. Exits if a pattern names none."""
    for pattern in patterns or ():
        if not any(fnmatchcase(phase.name, pattern) for phase in phases):
            sys.exit(f"--only {pattern} is no phase. Phases: {', '.join(phase.name for phase in phases)}")
    return [
        phase
        for phase in phases
        if phase.name not in done
        and (patterns is None or any(fnmatchcase(phase.name, pattern) for pattern in patterns))
    ]


def end(*_: Any) -> None:
    # An exception, so that the processes of running phases are stopped on the way out.
    raise KeyboardInterrupt


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        importlib.import_module(f"gpu_phases.{sys.argv[2]}").main(sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all")
    parser.add_argument("--only", nargs="+", help="names or patterns of phases")
    parser.add_argument("--skip-done", action="store_true", help="leave out phases that were ok before")
    parser.add_argument("--list", action="store_true", help="print the names of the phases, and run none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all time limits, on a busy machine")
    parser.add_argument("--jobs", type=int, default=min(8, max(1, (os.cpu_count() or 2) // 2)), help="at one time")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    phases = all_phases(given.device, given.tiny, out)
    record = Record(out, write_tables)
    before = record.results()
    done = {name for name, result in before.items() if result["status"] == "ok"} if given.skip_done else set[str]()
    phases = [replace(phase, limit_s=phase.limit_s * given.patience) for phase in chosen(phases, given.only, done)]
    if given.list:
        print("\n".join(f"{phase.name:45} {phase.limit_s:4.0f} s {phase.missing}" for phase in phases))
        return 0
    # Models and tokenizers are made here. Asking a hub that cannot be reached would only cost time.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, end)
    bad = 0
    budget_s = given.budget - (time.monotonic() - BEGAN)
    try:
        for number, result in enumerate(run_phases(phases, record, budget_s, given.jobs), 1):
            bad += result.status in ("failed", "timeout")
            why = f": {result.error.splitlines()[0]}" if result.error else ""
            print(f"{number}/{len(phases)} {result.phase} {result.status} {result.seconds:.0f} s{why}", flush=True)
    except KeyboardInterrupt:
        print("stopped: --skip-done goes on from here", flush=True)
        return 1
    finally:
        print(f"\n{out / 'table.md'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
