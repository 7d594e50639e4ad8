"""Measure how well the asynchronous source uses engines and trainer, and how old its tokens are.

    python benchmarks/async_throughput.py [--json] [--steps 60] [--step-seconds 1.0] [--at-once 6] [--only-gates]
                                          [--plot FILE.html]

The benchmark runs the real sources with simulated work: an engine sleeps for the time of each group (lognormal, sigma
1), and a trainer sleeps for the time of each step. B is the number of groups in a batch, K the number of groups that
run at once, and S is `max_staleness`. A group takes K / B of a step on average, so for any K engines finish a batch in
the time of a step. Some cases make the engines faster or slower than the trainer.

The table has the throughput relative to the slower of engines and trainer, and the mean age, in updates, of the trained
tokens. The first few steps do not count. The simulator (`spurline simulate`, on its virtual clock) gets the same groups
and predicts the same numbers.

Runs only sleep, so several runs go on at the same time, each in its own process. At K = B / 8 a group takes an eighth
of a step. So with steps of less than 200 ms, or on a busy machine, the benchmark would measure Python instead of
waiting. The last column shows the milliseconds of a step that are neither waiting nor training.

Gates:
- S = 2, K = B / 8: the throughput is at least 0.93. With 1% of the groups ten times as long, it is at least 1.9 times
  the throughput of the synchronous source.
- Each throughput of the asynchronous source is within 10% of the simulator's, given the recorded times of steps and
  groups.
- S = 4, K = B / 4, engines 1.25 or 2 times as fast as the trainer: with `depth: auto`, tokens are at most 1.7 updates
  old on average, and the throughput is at least 99% of the throughput with `depth: full`. With engines at 0.8 of the
  trainer's speed it is also at least 99%.
Runs of less than 40 steps vary more, since a single straggler can cost a whole step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from paced_runs import SIGMA, TINY, B, Case, Result, measure
from throughput_plot import Curve, write_curves
from timing import Gate, gates_as_json, print_gates

BOUNDS = (0, 1, 2, 4)
PARTS = (16, 8, 4, 2, 1)
"""The values of B / K. The benchmark also uses larger K, up to B * (S + 1)."""
GENERATION = (0.8, 1.0, 1.25, 2.0)
DEPTHS = ("auto", "full")

Results = Mapping[Case, Result]


class Cases:
    """The cases to measure. All are variations of `base`."""

    def __init__(self, steps: int, step_s: float) -> None:
        self.base = Case(2, B // 8, steps=steps, step_s=step_s)
        self.synchronous = replace(self.base, max_staleness=None)
        self.late, self.late_synchronous = (
            replace(case, straggler_share=0.01) for case in (self.base, self.synchronous)
        )
        self.half = replace(self.base, max_running=B // 2)

    @property
    def throughput(self) -> Sequence[Case]:
        return [self.base, self.synchronous, self.late, self.late_synchronous, self.half]

    def of_depth(self, generation: float, depth: str) -> Case:
        return replace(self.base, max_staleness=4, max_running=B // 4, generation=generation, depth=depth)

    @property
    def depth(self) -> Sequence[Case]:
        """Return cases with `auto` and `full` next to each other, so that other load on the machine disturbs both."""
        return [self.of_depth(generation, depth) for generation in GENERATION for depth in DEPTHS]

    @property
    def over_k(self) -> Sequence[Case]:
        groups = sorted({max(1, B // part) for part in PARTS} | {2 * B, 3 * B})
        # Runs with the largest K mostly wait, so fewer of their steps are enough.
        steps = {number: self.base.steps if number < B else max(20, self.base.steps // 2) for number in groups}
        return [
            replace(self.base, max_running=number, steps=steps[number], depth=depth)
            for number in groups
            for depth in DEPTHS
        ]

    @property
    def over_s(self) -> Sequence[Case]:
        return [
            self.synchronous,
            *(replace(self.base, max_staleness=bound, depth=depth) for bound in BOUNDS for depth in DEPTHS),
        ]

    def gates(self, results: Results) -> list[Gate]:
        late, late_synchronous = results[self.late], results[self.late_synchronous]
        worst = max(results.values(), key=lambda result: result.off)
        gates = [
            Gate("S = 2, K = B / 8: share of the capacity", results[self.base].efficiency, 0.93, True),
            Gate(
                "1% ten times as long: times the synchronous source",
                late.efficiency / late_synchronous.efficiency,
                1.9,
                True,
            ),
            Gate(f"furthest from what its record predicts ({describe(worst.case)})", worst.off, 0.10, False),
        ]
        for generation in GENERATION:
            auto, full = (results[self.of_depth(generation, depth)] for depth in DEPTHS)
            of_engines = f"engines {generation:g} times the trainer"
            if generation != 1:
                gates.append(Gate(f"{of_engines}: throughput of auto over full", auto.per_s / full.per_s, 0.99, True))
            if generation > 1:
                gates.append(
                    Gate(f"{of_engines}: mean age with auto (full {full.mean_age:.2f})", auto.mean_age, 1.7, False)
                )
        return gates

    def curves(self, results: Results) -> Sequence[Curve]:
        """Return the curves of the page, one for each row."""
        at_k, engines = f"K = {self.base.max_running}", "engines and trainer can do the same"
        return [
            Curve(
                "Groups at once, K",
                f"S = 2, {engines}",
                [(case.max_running, results[case]) for case in self.over_k],
                is_log=True,
            ),
            Curve(
                "Bound, S",
                f"{at_k}, {engines}",
                [
                    ("sync" if case.max_staleness is None else str(case.max_staleness), results[case])
                    for case in self.over_s
                ],
            ),
            Curve(
                "What engines can do, relative to the trainer",
                f"S = 4, K = {B // 4}",
                [(str(case.generation), results[case]) for case in self.depth],
            ),
        ]


def describe(case: Case) -> str:
    source = "synchronous" if case.max_staleness is None else f"S = {case.max_staleness}, {case.depth}"
    late = ", 1% late" if case.straggler_share else ""
    engines = "" if case.generation == 1 else f", engines x {case.generation:g}"
    return f"{source}, K = {case.max_running}{engines}{late}"


def run_all(cases: Iterable[Case], folder: Path, at_once: int) -> Iterator[Result]:
    """Yield the result of each different case, with `at_once` cases at a time.

    Cases with the largest K take longest, so they run first. `auto` and `full` of the same case run together.
    """
    different = sorted(dict.fromkeys(cases), key=lambda case: -case.max_running)
    folders = [folder / str(number) for number in range(len(different))]
    # With a process for each run, no run waits for the interpreter lock of another.
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(measure, different, folders)


def row(result: Result) -> str:
    told, record = result.predicted, result.from_record
    recorded = f"{record.efficiency:11.3f} {record.mean_age:5.2f} {result.off:6.1%}" if record else " " * 24
    return (
        f"  {describe(result.case):<36} {result.efficiency:9.3f} {result.mean_age:5.2f} {told.efficiency:10.3f} "
        f"{told.mean_age:5.2f} {recorded} {result.waits:6.1%} {result.overhead_s * 1000:9.1f}"
    )


HEAD = (
    f"{'shares of the capacity, ages in updates':<38} {'measured':>9} {'age':>5} {'predicted':>10} {'age':>5} "
    f"{'from record':>11} {'age':>5} {'off':>6} {'waits':>6} {'other, ms':>9}"
)


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=6, help="runs at a time")
    parser.add_argument("--only-gates", action="store_true", help="leave the curves out")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if not TINY.exists():
        parser.error(f"{TINY} is missing; make it with: python examples/make_tiny_model.py {TINY}")
    cases = Cases(arguments.steps, arguments.step_seconds)
    wanted = [*cases.throughput, *cases.depth]
    if not arguments.only_gates:
        wanted += [*cases.over_k, *cases.over_s]
    if not arguments.json:
        print(HEAD)
    results: dict[Case, Result] = {}
    with tempfile.TemporaryDirectory() as name:
        for result in run_all(wanted, Path(name), arguments.at_once):
            results[result.case] = result
            if not arguments.json:
                print(row(result), flush=True)
    found = cases.gates(results)
    if arguments.plot is not None and not arguments.only_gates:
        told = f"B = {B}, lognormal times of sigma {SIGMA:g}, steps of {arguments.step_seconds:g} s"
        write_curves(arguments.plot, cases.curves(results), told)
    if arguments.json:
        figures = [{**asdict(item), "off": item.off} for item in results.values()]
        print(
            json.dumps({"figures": figures, "gates": gates_as_json(found), "batch_size": B, "sigma": SIGMA}, indent=2)
        )
        return
    print_gates(found)


if __name__ == "__main__":
    main()
