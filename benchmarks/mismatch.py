"""Measure how long it takes to compare logprobs of trainer and engine: each correction, and metrics.

    python benchmarks/mismatch.py [--json] [--rows 8192] [--response 2048] [--packed 4]

Each sequence has a prompt and a response. For 40 % of the tokens, trainer and engine have exactly the same logprobs.
The benchmark uses one thread.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import numpy as np
import torch
from timing import Gate, gates_as_json, print_gates, print_timings, round_robin, timings_as_json

from spurline.data.batch import TrainingBatch
from spurline.plugins.host import PluginHost
from spurline_rl.losses.corrections import compare
from spurline_rl.metrics import advantage_metrics

CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"name": "tis"},
    "tis of sequences": {"name": "tis", "level": "sequence"},
    "mis": {"name": "mis"},
    "mis of sequences": {"name": "mis", "level": "sequence"},
    "geometric_rejection": {"name": "geometric_rejection"},
    "sequence_rejection": {"name": "sequence_rejection"},
}
LIMIT_S = 0.5
"""The limit for the default batch, which has 16.8 million tokens with loss."""


def make_batch(num_rows: int, response: int, packed: int) -> TrainingBatch:
    """Make a batch. `packed` is the number of sequences in a row, which share its `response` tokens."""
    random = np.random.default_rng(0)
    length = response // packed + response // packed // 8
    segment_ids = np.tile(np.repeat(np.arange(1, packed + 1, dtype=np.int32), length), (num_rows, 1))
    weights = np.tile(np.arange(length) >= length - response // packed, (num_rows, packed)).astype(np.float32)
    shape = segment_ids.shape
    old = -3 * random.random(shape, dtype=np.float32)
    differs = random.random(shape, dtype=np.float32) > 0.4
    columns = {
        "input_ids": np.zeros(shape, np.int64),
        "segment_ids": segment_ids,
        "position_ids": np.tile(np.arange(length), (num_rows, packed)),
        "loss_weights": weights,
        "old_logprobs": old,
        "rollout_logprobs": old + np.where(differs, 0.03 * random.standard_normal(shape, dtype=np.float32), 0),
        "advantages": np.repeat(random.standard_normal((num_rows, 1), dtype=np.float32), shape[1], axis=1),
    }
    tokens = {name: torch.from_numpy(column) for name, column in columns.items()}
    return TrainingBatch(tokens, {}, torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--packed", type=int, default=1, help="sequences of a row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(arguments.rows, arguments.response, arguments.packed)
    registry = PluginHost.load([]).registry
    parts = {"metrics of mismatch": partial(compare, batch), "metrics of advantages": partial(advantage_metrics, batch)}
    corrections = {
        name: partial(
            compare,
            batch,
            registry.create("correction", registry.get("correction", given["name"]).config.model_validate(given)),
        )
        for name, given in CORRECTIONS.items()
    }
    timings = round_robin({**parts, **corrections}, repeats=5)
    shared = timings["metrics of advantages"].min_cpu_s
    gates = [
        Gate(f"with {name}, CPU s", shared + timings[name].min_cpu_s, LIMIT_S, at_least=False) for name in corrections
    ]
    if arguments.json:
        print(json.dumps({"timings": timings_as_json(timings), "gates": gates_as_json(gates)}, indent=2))
        return
    print_timings(f"{batch.num_loss_tokens:,} tokens with loss", timings)
    print_gates(gates)


if __name__ == "__main__":
    main()
