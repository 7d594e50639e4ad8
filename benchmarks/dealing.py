"""Measure how much time balanced dealing of rows to ranks saves, and how long the dealing takes.

    python benchmarks/dealing.py [--json] [--repeats 20]

Each row is one segment. Its length is lognormal with mean 500, clipped to 16..4096, and each batch has new lengths.
"Time over ideal" is the time of a step relative to a step in which all ranks are always busy. Ranks wait for each other
in every micro-batch, and a row of length l costs 12 h l + l^2. For comparison, the benchmark also deals rows in their
original order and fills micro-batches in that order. Gate: the time over ideal is at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from timing import Gate, gates_as_json, print_gates, print_timings, round_robin, timings_as_json

from spurline.data.batch import Ragged, TrainingBatch
from spurline_models.dealing import deal

CASES = ((256, 8, 8192), (1024, 8, 16384), (1024, 64, 16384))
"""Rows, ranks, and tokens of a micro-batch."""
HIDDEN = 4096


def lengths_of(rows: int, seed: int) -> NDArray[np.int64]:
    drawn = np.random.default_rng(seed).lognormal(math.log(500) - 0.405, 0.9, rows)
    return np.clip(drawn, 16, 4096).astype(np.int64)


def batch_of(lengths: NDArray[np.int64]) -> TrainingBatch:
    """Return a batch of rows with these lengths. Its tokens do not matter."""
    rows, width = len(lengths), int(lengths.max())
    inside = torch.arange(width) < torch.from_numpy(lengths).unsqueeze(1)
    positions = torch.where(inside, torch.arange(width), 0)
    return TrainingBatch(
        tokens={
            "input_ids": positions,
            "segment_ids": inside.int(),
            "position_ids": positions,
            "loss_weights": inside.float(),
        },
        segments={"length": Ragged(lengths.astype(np.int32), np.arange(rows + 1))},
        unit_ids=torch.arange(rows),
        is_padding_row=torch.zeros(rows, dtype=torch.bool),
    )


def time_over_ideal(costs: NDArray[np.float64]) -> float:
    """Return the time of a step relative to one without waiting, given the costs [ranks, micro-batches]."""
    return float(costs.max(axis=0).sum() / costs.sum(axis=1).mean())


def consecutive(lengths: NDArray[np.int64], ranks: int, max_tokens: int) -> float:
    """Return the time over ideal if rows are dealt in their original order."""
    costs = 12 * HIDDEN * lengths + lengths.astype(float) ** 2
    borders = np.linspace(0, len(lengths), ranks + 1).astype(int).tolist()
    of_ranks: list[list[float]] = []
    for start, stop in pairwise(borders):
        microbatches, used = [], max_tokens
        for row in range(start, stop):
            if used + lengths[row] > max_tokens:
                microbatches.append(0.0)
                used = 0
            microbatches[-1] += float(costs[row])
            used += int(lengths[row])
        of_ranks.append(microbatches)
    longest = max(len(microbatches) for microbatches in of_ranks)
    filled = np.array([microbatches + [0.0] * (longest - len(microbatches)) for microbatches in of_ranks])
    return time_over_ideal(filled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--repeats", type=int, default=20, help="batches of each case")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    gates: list[Gate] = []
    for rows, ranks, max_tokens in CASES:
        name = f"{rows} rows on {ranks} ranks"
        plain: list[float] = []
        dealt: list[float] = []
        for seed in range(arguments.repeats):
            lengths = lengths_of(rows, seed)
            plain.append(consecutive(lengths, ranks, max_tokens))
            dealing = deal(batch_of(lengths), ranks, max_tokens=max_tokens, hidden=HIDDEN)
            dealt.append(time_over_ideal(dealing.costs))
        batch = batch_of(lengths_of(rows, 0))
        # Cutting the columns takes time too. Without columns, only the plan is timed.
        bare = TrainingBatch({n: c[:, :1] for n, c in batch.tokens.items()}, **_rest_of(batch))
        timings = round_robin(
            {
                "plan": lambda b=bare, r=ranks, m=max_tokens: deal(b, r, max_tokens=m),
                "plan and cut columns": lambda b=batch, r=ranks, m=max_tokens: deal(b, r, max_tokens=m),
            },
            arguments.repeats,
        )
        gates.append(Gate(f"{name}: time over ideal, worst of {arguments.repeats}", max(dealt), 1.03, at_least=False))
        figures[name] = {
            "consecutive_rows": float(np.mean(plain)),
            "dealt": float(np.mean(dealt)),
            "timings": timings_as_json(timings),
        }
        if not arguments.json:
            print(f"{name}: time over ideal {np.mean(plain):.3f} as they come, {np.mean(dealt):.4f} dealt")
            print_timings(f"{name}", timings)
    if arguments.json:
        print(json.dumps({"figures": figures, "gates": gates_as_json(gates)}, indent=2))
    else:
        print_gates(gates)


def _rest_of(batch: TrainingBatch) -> dict[str, Any]:
    return {"segments": batch.segments, "unit_ids": batch.unit_ids, "is_padding_row": batch.is_padding_row}


if __name__ == "__main__":
    main()
