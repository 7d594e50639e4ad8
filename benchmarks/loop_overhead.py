"""Measure the cost of Spurline's loop: compare its steps with hand-written PyTorch steps on the same batches.

    python benchmarks/loop_overhead.py [--json] [--steps 60] [--collator packed|padded] [--threads 1]

Both train the same tiny model from the same weights with the same segment attention. After each Spurline step, the
hand-written step runs on the same batch, so that a busy machine slows both. The figures are medians over the steps. The
benchmark also compares packed and padded steps on the same samples, in turns.

Gates: the time outside forward, backward and optimizer is <= 3% of the step or <= 2 ms, whichever is larger. The whole
step takes <= 1.03 x the time of the hand-written step. A packed step takes <= the time of a padded step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from spurline import Run, load_config
from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.data.token_store import TokenView
from spurline.plugins.hookspecs import hookimpl
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.testing import make_store
from spurline.update.reduction import token_mean
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.streams.segment_attention import ATTENTION_NAME
from spurline_models.streams.token_stream import plan_segments

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-qwen3"
WARMUP = 8


class HandWrittenStep:
    """A training step for only this model, without accumulation, metrics or checks."""

    def __init__(self, learning_rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), foreach=True)

    def __call__(self, batch: TrainingBatch) -> float:
        """Train on the batch, and return the loss."""
        real = batch.tokens["segment_ids"] != 0
        # The shipped samples have equal lengths, so a plan that sorts by length keeps the order of the batch.
        plan = plan_segments(batch.segments["length"].values.astype(np.int64), 0, lambda tensor: tensor)
        tokens, positions = (batch.tokens[name][real].long() for name in ("input_ids", "position_ids"))
        (targets,) = torch.nonzero(batch.tokens["loss_weights"][real], as_tuple=True)
        hidden = self.model.model(
            input_ids=tokens[None], position_ids=positions[None], segment_plan=plan, use_cache=False
        ).last_hidden_state
        loss = F.cross_entropy(self.model.lm_head(hidden[0, targets - 1]), tokens[targets])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


class Comparison:
    """Hooks that time each Spurline step and run the hand-written step after it."""

    def __init__(self, hand_written: HandWrittenStep) -> None:
        self._hand_written = hand_written
        self.spurline_s: list[float] = []
        self.outside_s: list[float] = []
        self.hand_written_s: list[float] = []
        self.losses: list[tuple[float, float]] = []

    @hookimpl
    def on_step_start(self) -> None:
        self._begin = time.perf_counter()

    @hookimpl(wrapper=True)
    def train_step(self, batch: TrainingBatch) -> Any:
        self._batch = batch
        return (yield)

    @hookimpl
    def on_step_end(self, metrics: Any) -> None:
        whole = time.perf_counter() - self._begin
        inside = metrics["time/forward_backward"] + metrics["time/optimizer"]
        begin = time.perf_counter()
        loss = self._hand_written(self._batch)
        self.hand_written_s.append(time.perf_counter() - begin)
        self.spurline_s.append(whole)
        self.outside_s.append(whole - inside)
        self.losses.append((metrics["loss"], loss))


def config(collator: str, steps: int, threads: int, run_dir: str) -> dict[str, Any]:
    """Return the config of a shorter quickstart run, without evaluations and checkpoints before its end."""
    layouts = {"packed": {"name": "packed", "max_tokens": 2048}, "padded": {"name": "padded"}}
    return {
        "run_dir": f"{run_dir}/{collator}",
        "model": {"path": str(MODEL)},
        "data": {"train": str(ROOT / "examples/data/sort_train.jsonl"), "max_length": 256},
        "batch_size": 64,
        "steps": steps,
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"name": "constant"},
        "collator": layouts[collator],
        "backend": {"name": "local", "device": "cpu", "num_threads": threads},
        "report": {"enabled": False},
        "trackers": [{"name": "console", "every_steps": 1_000_000}],
    }


def measure(collator: str, steps: int, threads: int) -> dict[str, float]:
    """Return medians in milliseconds over the steps after the warm-up."""
    with tempfile.TemporaryDirectory() as run_dir:
        loaded = load_config(config(collator, steps + WARMUP, threads, run_dir))
        comparison = Comparison(HandWrittenStep(1e-3))
        loaded.host.attach(comparison, "comparison")
        Run(loaded).train()
    worst = max(abs(ours - theirs) / theirs for ours, theirs in comparison.losses[:WARMUP])
    assert worst < 1e-4, f"the two steps do not compute the same: losses differ by {worst:.1e}"
    # The last step also writes the final checkpoint.
    cut = slice(WARMUP, -1)
    step, outside, by_hand = (
        statistics.median(values[cut]) * 1000
        for values in (comparison.spurline_s, comparison.outside_s, comparison.hand_written_s)
    )
    ratios = [a / b for a, b in zip(comparison.spurline_s[cut], comparison.hand_written_s[cut], strict=True)]
    return {
        "step_ms": step,
        "outside_ms": outside,
        "outside_share": outside / step,
        "hand_written_ms": by_hand,
        "ratio": statistics.median(ratios),
    }


def packed_to_padded(steps: int, threads: int) -> float:
    """Return the median ratio of packed to padded steps (collation and update) on the same samples, in turns.

    A step has 48 samples of 16 to 120 random tokens. The shipped samples have equal lengths, so they need no padding.
    """
    loaded = load_config(config("packed", steps, threads, "unused"))
    config_, registry = loaded.config, loaded.host.registry
    backend = registry.create("backend", config_.backend, run=config_, registry=registry, total_updates=steps)
    layout = ParallelLayout()
    packed = PackedCollator(PackedCollatorConfig(max_tokens=1024), 0, layout)
    padded = PaddedCollator(PaddedCollatorConfig(), 0, layout)
    loss = CrossEntropy(CrossEntropyConfig())
    random = np.random.default_rng(0)

    def timed(collator: PackedCollator | PaddedCollator, samples: TokenView) -> float:
        begin = time.perf_counter()
        batch, normalizer = token_mean(collator.collate(samples, training=True))
        backend.update(batch, Objective(loss, normalizer))
        return time.perf_counter() - begin

    ratios: list[float] = []
    for step in range(steps):
        store = make_store(random.integers(16, 121, 48).tolist(), seed=step)
        samples = store.view(np.arange(48, dtype=np.int64))
        # The second of the two steps has warm caches, so the order also alternates.
        order = (packed, padded) if step % 2 else (padded, packed)
        seconds = {collator: timed(collator, samples) for collator in order}
        ratios.append(seconds[packed] / seconds[padded])
    return statistics.median(ratios[WARMUP:])


def main() -> None:
    """Print the figures and whether the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if not MODEL.exists():
        parser.error(f"{MODEL} is missing; make it with: python examples/make_tiny_model.py {MODEL}")
    figures = {name: measure(name, arguments.steps, arguments.threads) for name in ("packed", "padded")}
    layouts = packed_to_padded(arguments.steps + WARMUP, arguments.threads)
    gates = {
        "outside <= 3% or 2 ms": all(f["outside_ms"] <= max(0.03 * f["step_ms"], 2.0) for f in figures.values()),
        "step <= 1.03 x hand-written": all(f["ratio"] <= 1.03 for f in figures.values()),
        "packed <= padded (within 1% noise)": layouts <= 1.01,
    }
    if arguments.json:
        print(
            json.dumps(
                {"figures": figures, "packed_to_padded": layouts, "gates": gates, "steps": arguments.steps}, indent=2
            )
        )
        return
    for name, figure in figures.items():
        print(
            f"{name}: step {figure['step_ms']:.1f} ms, outside {figure['outside_ms']:.2f} ms "
            f"({figure['outside_share']:.1%}), hand-written {figure['hand_written_ms']:.1f} ms, "
            f"ratio {figure['ratio']:.3f}"
        )
    print(f"packed to padded step on equal tokens: ratio {layouts:.3f}")
    for gate, met in gates.items():
        print(f"{gate}: {'met' if met else 'NOT MET'}")


if __name__ == "__main__":
    main()
