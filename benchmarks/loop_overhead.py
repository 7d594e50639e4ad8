"""What the loop costs: a Spurline step against a hand-written PyTorch step on the same batches.

    python benchmarks/loop_overhead.py [--json] [--steps 60] [--collator packed|padded] [--threads 1]

Both train the same tiny model from the same weights with the same segment attention. After each Spurline step the
hand-written step runs on the same batch (round-robin, so that a busy machine slows both), and the figures are medians
over the steps. Also compared: a packed with a padded run on equal samples.

Gates: time outside forward, backward and optimizer <= 3% of the step or 2 ms, whichever is larger; whole step <= 1.03 x
the hand-written one; packed <= padded.
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
from spurline.builtin.local.segment_attention import ATTENTION_NAME
from spurline.builtin.local.segment_plan import plan_segments
from spurline.data.batch import TrainingBatch
from spurline.hookspecs import hookimpl

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-qwen3"
WARMUP = 8


class HandWrittenStep:
    """The step that someone would write for this model alone: no accumulation, no metrics, no checks."""

    def __init__(self, learning_rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), foreach=True)

    def __call__(self, batch: TrainingBatch) -> float:
        """Train on the batch; returns the loss."""
        real = batch.tokens["segment_ids"] != 0
        # The shipped samples are equally long, so the order of a plan (short to long) is the order of the batch.
        plan = plan_segments(batch.segments["length"].values.astype(np.int64), 0, lambda tensor: tensor)
        tokens, positions = batch.tokens["input_ids"][real], batch.tokens["position_ids"][real]
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
    """The quickstart's run, shortened, without evaluation and checkpoints in between."""
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
    """Medians in milliseconds over the steps after the warm-up."""
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
    gates = {
        "outside <= 3% or 2 ms": all(f["outside_ms"] <= max(0.03 * f["step_ms"], 2.0) for f in figures.values()),
        "step <= 1.03 x hand-written": all(f["ratio"] <= 1.03 for f in figures.values()),
        "packed <= padded": figures["packed"]["step_ms"] <= figures["padded"]["step_ms"] * 1.02,
    }
    if arguments.json:
        print(json.dumps({"figures": figures, "gates": gates, "steps": arguments.steps}, indent=2))
        return
    for name, figure in figures.items():
        print(
            f"{name}: step {figure['step_ms']:.1f} ms, outside {figure['outside_ms']:.2f} ms "
            f"({figure['outside_share']:.1%}), hand-written {figure['hand_written_ms']:.1f} ms, "
            f"ratio {figure['ratio']:.3f}"
        )
    for gate, met in gates.items():
        print(f"{gate}: {'met' if met else 'NOT MET'}")


if __name__ == "__main__":
    main()
