"""Measure the gain and the cost of FSDP on this machine: two ranks with one thread each against one rank.

    python benchmarks/fsdp.py [--json] [--updates 8] [--tokens 6000]

The benchmark fine-tunes a Qwen3 of 18 million weights in fp32, in a common setting: padded rows of one sample with
lognormal lengths (mean 250, at most 1,024 tokens), AdamW, and gradients clipped at 1.0. Candidates take turns with
updates on the same rows, so that a busy machine slows all of them. Ratios are medians over these turns.

- gain: the time of an update on one rank, divided by the time on two ranks. The gain by processor time counts the
  busier of the two ranks, without waiting. For comparison, two independent backends with one rank and half of the rows
  each run at the same time. They show the largest gain that the machine allows, since its cores share the memory.
- communication and waiting: their shares of an update on two ranks, from a profile of each rank. A collective is
  communication while its last rank is in it. The longer time of other ranks is waiting.
- overhead of the controller: the time of an update without the computation of its slowest rank, and the time to send
  the same rows to all ranks. Both are from small updates, since the overhead does not grow with the update.
- start: the time to a loaded model, for the first and for the second start in a process.

Gates: the gain is at least 1.7. The overhead without sending rows is at most 5 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dealing import time_over_ideal
from timing import Gate, gates_as_json, print_gates

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.protocols.ranks import RankRequest
from spurline.testing import make_store
from spurline.update.reduction import token_mean
from spurline_models.dealing import deal
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks
from spurline_ranks.messages import plain_objective, plain_run
from spurline_rl.testing.backend_runs import backend_run, opened

PLUGINS = ("fsdp_backend",)
VOCABULARY = 8192
WARMUP = 2
SMALL_UPDATE = 500
"""Tokens of an update for measuring the controller."""


def write_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=384,
            intermediate_size=1152,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return folder


def batch_of(num_tokens: int, seed: int) -> tuple[TrainingBatch, Objective]:
    """Return samples with about this number of tokens in total, and the objective of a step on them."""
    drawn = np.random.default_rng(seed).lognormal(math.log(250) - 0.32, 0.8, 4 * num_tokens // 250)
    lengths = np.clip(drawn, 16, 1024).astype(int)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    store = make_store(lengths.tolist(), seed, VOCABULARY)
    collator = PaddedCollator(PaddedCollatorConfig(), 0, ParallelLayout())
    batch, normalizer = token_mean(collator.collate(store.view(np.arange(len(store))), training=True))
    return batch, Objective(CrossEntropy(CrossEntropyConfig()), normalizer)


def on(ranks: int) -> dict[str, Any]:
    """Return the section `backend` of the config."""
    return {"name": "fsdp", "device": "cpu", "ranks": ranks, "num_threads": 1, "probe": False}


@contextmanager
def timed_ranks(model: Path, count: int) -> Iterator[RankGroup]:
    """Open this number of ranks that report their times."""
    run = backend_run(model, on(count), PLUGINS).config
    limits = TimeLimits(300, 600, 300)
    ranks = open_ranks(RankRequest(count, num_threads=1), "fsdp_timed_rank:TimedRank", (plain_run(run), 100), limits)
    try:
        ranks.call("build")
        yield ranks
    finally:
        ranks.close()


def wires_of(batch: TrainingBatch, count: int) -> list[dict[str, Any]]:
    return [share.to_wire() for share in deal(batch, count).shares]


def measure_updates(model: Path, updates: int, num_tokens: int) -> dict[str, float]:
    """Return the time of an update on one rank, on two ranks, and on two independent ranks."""
    seconds: dict[str, list[float]] = {"one": [], "two": [], "apart": []}
    cpu: dict[str, list[float]] = {"one": [], "two": []}
    with (
        timed_ranks(model, 1) as one,
        timed_ranks(model, 1) as other,
        timed_ranks(model, 2) as two,
        ThreadPoolExecutor(2) as both,
    ):
        for number in range(WARMUP + updates):
            batch, objective = batch_of(num_tokens, number)
            plain = plain_objective(objective)
            whole, halves = wires_of(batch, 1), wires_of(batch, 2)
            instants = [time.perf_counter()]
            alone = one.call("timed_update", plain, per_rank=whole)
            instants.append(time.perf_counter())
            list(both.map(_update, (one, other), halves, [plain] * 2))
            instants.append(time.perf_counter())
            together = two.call("timed_update", plain, per_rank=halves)
            instants.append(time.perf_counter())
            if number < WARMUP:
                continue
            for name, taken in zip(("one", "apart", "two"), np.diff(instants).tolist(), strict=True):
                seconds[name].append(taken)
            cpu["one"].append(max(alone))
            cpu["two"].append(max(together))
    return {
        "one_rank_s": statistics.median(seconds["one"]),
        "two_ranks_s": statistics.median(seconds["two"]),
        "gain": _ratio(seconds["one"], seconds["two"]),
        "gain_by_processor_time": _ratio(cpu["one"], cpu["two"]),
        "gain_apart": _ratio(seconds["one"], seconds["apart"]),
    }


def _update(ranks: RankGroup, wire: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    ranks.call("timed_update", plain, per_rank=[wire])


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median ratio over the turns."""
    return statistics.median(one / two for one, two in zip(slow, fast, strict=True))


def measure_parts(model: Path, updates: int, num_tokens: int) -> dict[str, float]:
    """Return the shares of communication and waiting in an update on two ranks, and the balance of the dealt rows."""
    totals = {"communication": 0.0, "waiting": 0.0}
    whole = 0.0
    balance: list[float] = []
    with timed_ranks(model, 2) as ranks:
        for number in range(1 + updates):
            batch, objective = batch_of(num_tokens, number)
            dealing = deal(batch, 2)
            wires = [share.to_wire() for share in dealing.shares]
            answers = ranks.call("profiled_update", plain_objective(objective), per_rank=wires)
            if number == 0:
                continue
            balance.append(time_over_ideal(dealing.costs))
            whole += sum(answer["seconds"] for answer in answers)
            for name, value in _shares([answer["collectives"] for answer in answers]).items():
                totals[name] += value
    return {**{name: value / whole for name, value in totals.items()}, "time_over_ideal": statistics.mean(balance)}


class Recorded:
    """A `RankGroup` that keeps the last answers."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.size = ranks.size
        self.answers: list[Any] = []

    def call(self, method: str, *common: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        self.answers = self._ranks.call(method, *common, per_rank=per_rank)
        return self.answers

    def close(self) -> None:
        self._ranks.close()


def measure_overhead(model: Path, updates: int) -> dict[str, float]:
    """Return the smallest milliseconds of an update outside of the ranks, and of sending its rows to the ranks."""
    outside: list[float] = []
    ways: list[float] = []
    batch, objective = batch_of(SMALL_UPDATE, 0)
    with opened(backend_run(model, on(2), PLUGINS)) as (backend, _), timed_ranks(model, 2) as ranks:
        recorded = vars(backend)["_ranks"] = Recorded(vars(backend)["_ranks"])
        for _ in range(WARMUP + updates):
            started = time.perf_counter()
            backend.update(batch, objective)
            taken = time.perf_counter() - started
            inside = [each["time/forward_backward"] + each["time/optimizer"] for each in recorded.answers]
            outside.append(taken - max(inside))
            started = time.perf_counter()
            ranks.call("take", per_rank=wires_of(batch, 2))
            ways.append(time.perf_counter() - started)
    return {"outside_of_ranks_ms": min(outside[WARMUP:]) * 1e3, "way_of_rows_ms": min(ways[WARMUP:]) * 1e3}


def _shares(by_rank: Sequence[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """Return the total seconds of all ranks in collectives: while all ranks are in it, and while some ranks wait."""
    names = [[name for name, _ in collectives] for collectives in by_rank]
    assert all(each == names[0] for each in names), "ranks made different collectives"
    together = [min(taken) for taken in zip(*([s for _, s in each] for each in by_rank), strict=True)]
    everything = sum(seconds for collectives in by_rank for _, seconds in collectives)
    communication = len(by_rank) * sum(together)
    return {"communication": communication, "waiting": everything - communication}


def measure_start(model: Path) -> list[float]:
    """Return the seconds to a loaded model, first with and then without starting the process that forks the ranks."""
    taken: list[float] = []
    for _ in range(2):
        started = time.perf_counter()
        with opened(backend_run(model, on(2), PLUGINS)):
            taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--updates", type=int, default=8, help="pairs of updates")
    parser.add_argument("--tokens", type=int, default=6_000, help="tokens of an update, padding not counted")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spurline-fsdp-") as folder:
        model = write_model(Path(folder))
        start = measure_start(model)
        figures = measure_updates(model, arguments.updates, arguments.tokens)
        figures |= measure_parts(model, max(2, arguments.updates // 3), arguments.tokens)
        figures |= measure_overhead(model, 4 * arguments.updates)
    overhead = figures["outside_of_ranks_ms"] - figures["way_of_rows_ms"]
    gates = [
        Gate("two ranks against one", figures["gain"], 1.7, True, figures["gain_by_processor_time"]),
        Gate("overhead of the controller without sending rows, ms", overhead, 5.0, at_least=False),
    ]
    if arguments.json:
        everything = {**figures, "start_s": start, "gates": gates_as_json(gates)}
        print(json.dumps(everything, indent=2))
        return
    print(f"start: {start[0]:.1f} s the first time, {start[1]:.1f} s the second")
    print(f"update: {figures['one_rank_s']:.2f} s on one rank, {figures['two_ranks_s']:.2f} s on two")
    print(f"two backends that share nothing but the machine would gain {figures['gain_apart']:.2f}")
    print(f"of the time on two: {figures['communication']:.1%} communication, {figures['waiting']:.1%} waiting")
    print(f"rows dealt at {figures['time_over_ideal']:.4f} of ideal; those of a small update take")
    print(
        f"{figures['way_of_rows_ms']:.1f} ms to the ranks, of {figures['outside_of_ranks_ms']:.1f} ms outside of them"
    )
    print_gates(gates)


if __name__ == "__main__":
    main()
