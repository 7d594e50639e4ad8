"""How much of its engines and its trainer the asynchronous source keeps busy, beside what `spurline simulate` predicts.

    python benchmarks/async_throughput.py [--json] [--steps 40] [--step-seconds 1.0] [--only-gates] [--plot FILE.html]

Real code with paced parts: the sources with all they do to rollouts, an engine that sleeps as long as a group takes
(lognormal, sigma 1, by its draw) and a trainer that sleeps for a step. Both can do the same: K groups at once take
K / B of a step each, so that engines finish a batch in the time of a step, however many groups share them. Reported is
the throughput relative to that capacity, over the steps after the first few, while nothing ends; the model on its
virtual clock gets the same groups. At K = B / 8 a group takes an eighth of a step: steps of less than 200 ms, or a busy
machine, would measure Python instead of waiting, which the last column shows (milliseconds of a step that are neither).

Gates: at S = 2, K = B / 8 at least 0.93; with 1% of the groups ten times as long at least 1.9 times the synchronous
source; every throughput of the asynchronous source within 10% of what the model predicts, told what steps and groups
took. Runs of less than 40 steps (20 in the curves) differ by more: one straggler more or less makes a step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paced_runs import SIGMA, TINY, B, Case, Result, measure
from throughput_plot import Point, write_curves
from timing import Gate, gates_as_json, print_gates

BOUNDS = (0, 1, 2, 4)
PARTS = (16, 8, 4, 2, 1)
"""K = B / part; beyond, up to B * (S + 1)."""


def gates(plain: Result, late: Result, synchronous: Result, every: Sequence[Result]) -> list[Gate]:
    worst = max(every, key=lambda result: result.off)
    return [
        Gate("S = 2, K = B / 8: share of the capacity", plain.efficiency, 0.93, True),
        Gate("1% ten times as long: times the synchronous source", late.efficiency / synchronous.efficiency, 1.9, True),
        Gate(f"furthest from what its record predicts ({describe(worst.case)})", worst.off, 0.10, False),
    ]


def describe(case: Case) -> str:
    source = "synchronous" if case.max_staleness is None else f"S = {case.max_staleness}"
    late = f", {case.straggler_share:.0%} ten times as long" if case.straggler_share else ""
    return f"{source}, K = {case.max_running}{late}"


def curve_cases(base: Case) -> dict[str, list[Case]]:
    """Over K at the base's bound, and over S at the base's K."""
    bound = base.max_staleness or 0
    groups = sorted({max(1, B // part) for part in PARTS} | {2 * B, B * (bound + 1)})
    # The largest K waits six of seven steps: fewer of them are as telling.
    shorter = replace(base, steps=max(20, base.steps // 2))
    return {
        "over K": [replace(shorter, max_running=number) for number in groups],
        "over S": [replace(shorter, max_staleness=other) for other in (None, *BOUNDS)],
    }


def run_all(cases: Iterable[Case], folder: Path, *, quiet: bool) -> list[Result]:
    results: list[Result] = []
    for case in cases:
        results.append(measure(case, run_folder(folder, case)))
        if not quiet:
            print(row(results[-1]), flush=True)
    return results


def run_folder(folder: Path, case: Case) -> Path:
    return folder / f"{case.max_staleness}-{case.max_running}-{case.straggler_share:g}"


def row(result: Result) -> str:
    return (
        f"  {describe(result.case):<42} {result.efficiency:9.3f} {result.predicted:9.3f} {result.from_record:12.3f} "
        f"{result.off:7.1%} {result.overhead_s * 1000:9.1f}"
    )


def points(results: Iterable[Result], *, over: str) -> list[Point]:
    """over: the field of the case that is the axis."""
    named = [(getattr(item.case, over), item) for item in results]
    return [Point("synchronous" if x is None else x, item.efficiency, item.predicted) for x, item in named]


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--only-gates", action="store_true", help="leave the curves out")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if not TINY.exists():
        parser.error(f"{TINY} is missing; make it with: python examples/make_tiny_model.py {TINY}")
    base = Case(2, B // 8, steps=arguments.steps, step_s=arguments.step_seconds)
    synchronous = replace(base, max_staleness=None)
    late, late_synchronous = (replace(case, straggler_share=0.01) for case in (base, synchronous))
    if not arguments.json:
        heads = f"{'measured':>9} {'predicted':>9} {'from record':>12} {'off':>7} {'other, ms':>9}"
        print(f"{'throughput, share of the capacity':<44} {heads}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        main_results = run_all([base, synchronous, late, late_synchronous], folder, quiet=arguments.json)
        wanted = {} if arguments.only_gates else curve_cases(base)
        curves = {title: run_all(cases, folder / title, quiet=arguments.json) for title, cases in wanted.items()}
        if arguments.plot is not None and curves:
            told = f"B = {B}, engines and trainer of the same capacity, lognormal times of sigma {SIGMA:g}"
            over_k = points(curves["over K"], over="max_running")
            over_s = points(curves["over S"], over="max_staleness")
            write_curves(arguments.plot, over_k, over_s, told, run_folder(folder, base))
    every = [*main_results, *(item for results in curves.values() for item in results)]
    found = gates(main_results[0], main_results[2], main_results[3], every)
    if arguments.json:
        results = [{**asdict(item), "off": item.off} for item in every]
        told = {"figures": results, "gates": gates_as_json(found), "batch_size": B, "sigma": SIGMA}
        print(json.dumps(told, indent=2))
        return
    print_gates(found)


if __name__ == "__main__":
    main()
