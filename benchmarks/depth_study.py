"""Compare `source.depth: auto` with `full` on the virtual clock: throughput and mean age of tokens.

    python benchmarks/depth_study.py [--json] [--steps 400] [--draws 3]

The real scheduler runs with simulated engines and a simulated trainer, as in `spurline simulate`. A step has B = 32
groups and takes a second, and the times of groups are lognormal. `capacity` is the speed of engines relative to the
trainer. `late` is the share of groups that take ten times as long. With `slow`, groups of the 80th to the 160th batch
take four times as long. Each figure is the mean over several draws of the times. Both depths get the same times. S is
`max_staleness`, and K is the number of groups at once.

Gates: if training is slower than generation (capacity 1.25 and 2, sigma 1, S = 4, K = B / 4), tokens with `auto` are at
most 1.7 updates old, and the throughput is at least 99% of the throughput with `full`. If generation is slower, the
throughput is also at least 99%.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean

from timing import Gate, gates_as_json, print_gates

from spurline_async_rl.scheduling.depth import Depth
from spurline_simulation.prediction import figures_of, steady_run
from spurline_simulation.workload import Knobs, Times, Workload

B = 32
_SLOW = range(80 * B, 160 * B)
_SLOWER = 4.0


@dataclass(frozen=True)
class Case:
    """A workload, and the limits of the scheduler."""

    capacity: float
    sigma: float = 1.0
    max_staleness: int = 4
    max_running: int = B // 4
    late: float = 0.0
    slow: bool = False

    def __str__(self) -> str:
        more = f", {self.late:.0%} late" if self.late else ""
        told = f"{self.capacity:g}x, sigma {self.sigma:g}, S = {self.max_staleness}, K = {self.max_running}{more}"
        return f"{told}, slow for a while" if self.slow else told

    def group_s(self, seed: int) -> Callable[[int], float]:
        mean_s = self.max_running / B / self.capacity / (1 + 9 * self.late)
        # Both depths get the same times, so they are drawn only once.
        times = cache(Times([mean_s], self.sigma, self.late, 10.0, seed))
        return lambda draw: times(draw) * (_SLOWER if self.slow and draw in _SLOW else 1.0)


TRAINER_BOUND = (Case(1.25), Case(2.0))
GENERATION_BOUND = (Case(0.5), Case(0.8))
CASES = (
    *GENERATION_BOUND,
    Case(1.0),
    *TRAINER_BOUND,
    Case(1.25, 0.5),
    Case(1.25, 1.5),
    Case(2.0, 1.5),
    Case(1.25, max_staleness=1),
    Case(2.0, max_staleness=2, max_running=B // 8),
    Case(1.25, max_staleness=8, max_running=B),
    Case(1.25, max_staleness=2, max_running=B // 2, late=0.01),
    Case(2.0, late=0.01),
    Case(2.0, slow=True),
)


@dataclass(frozen=True)
class Result:
    """Steps per second and mean age of tokens in updates, for both depths. `depth` is the mean of `auto`, in groups."""

    case: Case
    full_steps_per_s: float
    auto_steps_per_s: float
    full_age: float
    auto_age: float
    depth: float

    @property
    def kept(self) -> float:
        """The throughput with `auto`, relative to the throughput with `full`."""
        return self.auto_steps_per_s / self.full_steps_per_s


def measure(case: Case, num_steps: int, num_draws: int) -> Result:
    found: dict[Depth, list[tuple[float, float, float]]] = {"full": [], "auto": []}
    for seed in range(num_draws):
        workload = Workload(case.group_s(seed), Times([1.0]), B)
        for depth, figures in found.items():
            knobs = Knobs(case.max_staleness, B, case.max_running, depth=depth)
            run = figures_of(*steady_run(workload, knobs, num_steps))
            figures.append((run.steps_per_second, run.mean_staleness, run.depth))
    full, auto = ([fmean(values) for values in zip(*figures, strict=True)] for figures in found.values())
    return Result(case, full[0], auto[0], full[1], auto[1], auto[2])


def gates(results: Sequence[Result]) -> list[Gate]:
    by_case = {result.case: result for result in results}
    trainer_bound = [by_case[case] for case in TRAINER_BOUND]
    generation_bound = [by_case[case] for case in GENERATION_BOUND]
    return [
        Gate("trainer-bound: mean age, updates", max(item.auto_age for item in trainer_bound), 1.7, False),
        Gate("trainer-bound: throughput kept", min(item.kept for item in trainer_bound), 0.99, True),
        Gate("generation-bound: throughput kept", min(item.kept for item in generation_bound), 0.99, True),
    ]


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--draws", type=int, default=3)
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{'':50}{'steps/s':>9}{'auto/full':>11}{'age: full':>11}{'auto':>7}{'depth':>7}")
    results: list[Result] = []
    for case in CASES:
        result = measure(case, arguments.steps, arguments.draws)
        results.append(result)
        if not arguments.json:
            ages = f"{result.full_age:>11.2f}{result.auto_age:>7.2f}{result.depth:>7.0f}"
            print(f"{case!s:50}{result.full_steps_per_s:>9.3f}{result.kept:>11.3f}{ages}", flush=True)
    found = gates(results)
    if arguments.json:
        figures = [asdict(result) | {"kept": result.kept} for result in results]
        print(json.dumps({"figures": figures, "gates": gates_as_json(found)}, indent=2))
        return
    kept, fresher = fmean(item.kept for item in results), fmean(1 - item.auto_age / item.full_age for item in results)
    print(f"mean: {kept:.3f} of the throughput, tokens {fresher:.0%} fresher")
    print_gates(found)


if __name__ == "__main__":
    main()
