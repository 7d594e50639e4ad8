"""Measure the cost of a batch: the fast collators against core's reference loops, per-row numpy slices and a bare fill.

    python benchmarks/collation.py [--json] [--repeats 15] [--reference-repeats 2]

There are two data sets of 1,024 samples for 8 data-parallel ranks, drawn from a store 20 times as large:
D1: lognormal lengths, mean 500, sigma 0.9, clipped to 16..4096; capacity 8192. D2: uniform 16..200; capacity 1024.

These candidates take turns on one thread, for each layout:
- reference: the readable collator of core, which appends token by token to Python lists and makes an array of each row;
- per-token loops: one Python statement for each token and column, which writes an element of an array;
- row slices: numpy, one slice assignment for each sample and column, from Python lists into new arrays;
- fast: compiled kernels that write into reused buffers;
- warm fill: columns of the same dtypes and bytes, in a buffer of the same pool, are filled with a constant. Nothing is
  read.
The limits for reference loops apply to core's reference. They were chosen for loops that took 4 us per token. The
per-token loops are similar (1 us), so their ratios are printed with the same limits, but are no gates.
Rollouts are trajectory records, and joining the records counts. Only "fast, flat groups" gets the data that sources
have when they make a batch: groups of 8 attempts that are in flat arrays already.

Before timing, all candidates are compared with the reference, including dtypes. Compilation is not timed. The exit code
is 0 even if gates are not met. The output names the gates that are not met.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from collation_inputs import DATA_SETS, Inputs, row_slices, row_slices_rollouts, token_loops, token_loops_rollouts
from timing import (
    Gate,
    Timing,
    cost_gate,
    gates_as_json,
    print_gates,
    print_timings,
    round_robin,
    speedup_gate,
    timings_as_json,
)

from spurline.data.batch import TrainingBatch
from spurline.data.collators.packing import PackingAlgorithm, pack
from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.testing.collator_contract import assert_batches_equal, clone
from spurline_collation_fast.collators import FastPackedCollator, FastPaddedCollator, FastRolloutsCollator, pack_rows
from spurline_collation_fast.row_writer import BufferPool
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.trajectory import Group

RANKS = 8
GROUP = 8
"""Attempts at a prompt. A group has them in flat arrays before a batch takes it."""
PAD = 151643
LAYOUT = ParallelLayout(data=RANKS)
ALGORITHMS: tuple[PackingAlgorithm, ...] = ("ffd", "multifit")

# Limits by layout, for D1 and D2: minimum speedup over the reference, minimum speedup over row slices, and maximum
# time relative to the warm fill.
LIMITS: dict[str, dict[str, tuple[float, float, float]]] = {
    "packed": {"D1": (300, 8.5, 2.0), "D2": (240, 9.5, 4.0)},
    "padded": {"D1": (75, 3.4, 1.0), "D2": (60, 9.5, 1.0)},
    "rollouts": {"D1": (80, 3.7, 1.0), "D2": (90, 10.0, 1.0)},
}


@dataclass(frozen=True)
class Measured:
    """The results for one layout on one data set. `bytes` is the size of token columns. `plain_loops` is no gate."""

    timings: Mapping[str, Timing]
    bytes: int
    gates: list[Gate]
    plain_loops: Gate


def candidates(layout: str, inputs: Inputs) -> dict[str, Callable[[], TrainingBatch]]:
    """Return the functions to time, by name. All return equal batches."""
    if layout == "packed":
        # Planning is timed separately. Otherwise the time of row slices would contain the search of `multifit`.
        packed = PackedCollatorConfig(max_tokens=inputs.capacity, algorithm="ffd")
        rows = pack(inputs.lengths.tolist(), inputs.capacity, RANKS)
        length = max(sum(int(inputs.lengths[position]) for position in row) for row in rows)
        collators: list[Any] = [PackedCollator(packed, PAD, LAYOUT), FastPackedCollator(packed, PAD, LAYOUT)]

        def plan() -> list[list[int]]:
            return pack(inputs.lengths.tolist(), inputs.capacity, RANKS)

    elif layout == "padded":
        padded = PaddedCollatorConfig()
        rows = [[position] for rank in range(RANKS) for position in range(rank, len(inputs.lengths), RANKS)]
        collators = [PaddedCollator(padded, PAD, LAYOUT), FastPaddedCollator(padded, PAD, LAYOUT)]

        length, plan = int(inputs.lengths.max()), lambda: rows

    else:
        return _rollout_candidates(inputs)
    reference, fast = (lambda c=c: c.collate(inputs.view, training=True) for c in collators)
    return {
        "reference": reference,
        "per-token loops": lambda: token_loops(inputs, plan(), length, PAD),
        "row slices": lambda: row_slices(inputs, plan(), length, PAD),
        "fast": fast,
    }


def _rollout_candidates(inputs: Inputs) -> dict[str, Callable[[], TrainingBatch]]:
    config = RolloutsCollatorConfig()
    reference = RolloutsCollator(config, PAD, LAYOUT)
    fast = FastRolloutsCollator(config, PAD, LAYOUT)
    attempts = tuple(inputs.trajectories)
    groups = [Group("p", 0, attempts[start : start + GROUP]) for start in range(0, len(attempts), GROUP)]
    return {
        "reference": lambda: reference.collate_rollouts(groups),
        "per-token loops": lambda: token_loops_rollouts(inputs, PAD),
        "row slices": lambda: row_slices_rollouts(inputs, PAD),
        "fast": lambda: fast.collate_rollouts([Group("p", 0, attempts)]),
        "fast, flat groups": lambda: fast.collate_rollouts(groups),
    }


def measure(layout: str, name: str, inputs: Inputs, repeats: int, reference_repeats: int) -> Measured:
    """Compare the batches of all candidates for one layout, then time the candidates."""
    makers = candidates(layout, inputs)
    expected = makers["reference"]()
    for maker in makers.values():
        batch = maker()
        assert_batches_equal(clone(batch), expected)
        batch.release()
    columns = {name: (column.shape, column.numpy().dtype) for name, column in expected.tokens.items()}
    warm = list(BufferPool().acquire(columns).arrays.values())

    def fill() -> None:
        for column in warm:
            column.fill(7)

    functions: dict[str, Callable[[], object]] = {
        key: lambda maker=maker: maker().release() for key, maker in makers.items()
    }
    functions["warm fill"] = fill
    counts = dict.fromkeys(functions, repeats) | dict.fromkeys(("reference", "per-token loops"), reference_repeats)
    timings = round_robin(functions, counts)
    against_loops, against_slices, against_fill = LIMITS[layout][name]
    fast, slices = timings["fast"], timings["row slices"]
    title = f"{layout} {name}: times faster than "
    gates = [
        speedup_gate(f"{title}core's reference", timings["reference"], fast, against_loops),
        speedup_gate(f"{title}row slices", slices, fast, against_slices),
        cost_gate(f"{layout} {name}: times a warm fill of the same bytes", fast, timings["warm fill"], against_fill),
    ]
    if layout == "rollouts":
        flat, warm_fill = timings["fast, flat groups"], timings["warm fill"]
        gates.append(cost_gate(f"rollouts {name}, flat groups: times a warm fill", flat, warm_fill, 1.5))
    loops = speedup_gate(f"{title}per-token loops", timings["per-token loops"], fast, against_loops)
    return Measured(timings, sum(column.nbytes for column in warm), gates, loops)


def measure_planning(name: str, inputs: Inputs, repeats: int) -> tuple[dict[str, Timing], dict[str, Any], list[Gate]]:
    """Time the planning of rows, and compare the rows of first-fit and multifit."""
    lengths, capacity = inputs.lengths, inputs.capacity
    plain = lengths.tolist()

    def plan(algorithm: PackingAlgorithm) -> Any:
        return pack_rows(lengths, 1, capacity, RANKS, algorithm)

    for algorithm in ALGORITHMS:
        positions, offsets, *_ = plan(algorithm)
        rows = [positions[start:stop].tolist() for start, stop in itertools.pairwise(offsets.tolist())]
        assert rows == pack(plain, capacity, RANKS, algorithm), f"{algorithm}: rows differ from the reference"
    timings = round_robin(
        {
            "plain Python ffd": lambda: pack(plain, capacity, RANKS),
            "ffd": lambda: plan("ffd"),
            "multifit": lambda: plan("multifit"),
        },
        repeats,
    )
    evenness: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        config = PackedCollatorConfig.model_validate({"max_tokens": capacity, "algorithm": algorithm})
        batch = FastPackedCollator(config, PAD, LAYOUT).collate(inputs.view, training=True)
        evenness[algorithm] = {key.removeprefix("packing/"): value for key, value in batch.info.items()}
    gates = [
        speedup_gate(f"plan {name}: times faster than plain Python", timings["plain Python ffd"], timings["ffd"], 20)
    ]
    if name == "D1":
        gates.append(Gate("multifit D1: fill", evenness["multifit"]["fill"], 0.999, True))
        gates.append(Gate("multifit D1: straggler factor", evenness["multifit"]["straggler"], 1.001, False))
    return timings, evenness, gates


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--reference-repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    gates: list[Gate] = []
    plain_loops: list[Gate] = []
    for name, shape in DATA_SETS.items():
        inputs = shape.make()
        for layout in LIMITS:
            measured = measure(layout, name, inputs, arguments.repeats, arguments.reference_repeats)
            gates += measured.gates
            plain_loops.append(measured.plain_loops)
            report[f"{layout} {name}"] = {"bytes": measured.bytes, "timings": timings_as_json(measured.timings)}
            if not arguments.json:
                print_timings(f"\n{layout} {name}, {measured.bytes / 1e6:.1f} MB of columns", measured.timings)
        timings, evenness, planning_gates = measure_planning(name, inputs, 5 * arguments.repeats)
        gates += planning_gates
        report[f"planning {name}"] = {"timings": timings_as_json(timings), "rows": evenness}
        if not arguments.json:
            print_timings(f"\nplanning {name}", timings)
            for algorithm, values in evenness.items():
                print(f"  {algorithm:<10} " + ", ".join(f"{key} {value:.4f}" for key, value in values.items()))
    if arguments.json:
        loops = {"per_token_loops": gates_as_json(plain_loops)}
        print(json.dumps({**report, "gates": gates_as_json(gates), **loops}, indent=2))
        return
    print()
    print_gates(gates)
    print("\nthe same limits against per-token loops, which are no gates:")
    print_gates(plain_loops)


if __name__ == "__main__":
    main()
