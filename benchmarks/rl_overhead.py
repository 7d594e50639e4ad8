"""Measure the time of an RL step outside of the models, by parts of a step of `examples/rl_sort.yaml`.

    python benchmarks/rl_overhead.py [--json] [--steps 24] [--model FOLDER]

The benchmark runs the example (32 prompts x 8 attempts, engine `in_process`, plugin collation_fast, four mini-batches,
one thread) without evaluation, and measures its parts by wall clock and by process time. Figures are medians over the
steps. Every second step has clocks in every attempt, which take about 7 ms of the step. The gates use the other steps.
The decode steps of the engine, the look-back forward, forward/backward and optimizer are inside the models. All other
parts are outside: rewards, environment, scheduling of attempts, preparation, collation, metrics and recording. The
model is the quickstart's warm-up model. If `runs/sort_warmup/model` is missing, it is trained first.

The benchmark also measures the preparation of a batch of 1,024 attempts of up to 4,096 tokens without its forward
passes (`rl_preparation.py`), with a gate in milliseconds. Rollouts are kept (`source.keep_rollouts`) by a separate
thread. Its processor time and the hand-over to it must take less than 1% of the step.

Two other gates limit the time outside to 5% of the step. In the first, all of `time/generate` counts as generation. The
second is stricter: only the decode steps count, so rewards, environment and scheduling are outside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_preparation import time_preparation
from step_parts import Seconds, StepParts, patched
from timing import Gate, gates_as_json, print_gates, print_timings, timings_as_json

from spurline import Run, load_config
from spurline.plugins.hookspecs import hookimpl
from spurline.update.update import Update
from spurline_collation_fast.collators import FastRolloutsCollator
from spurline_models.local.backend import LocalBackend
from spurline_rl import source
from spurline_rl.draws import PromptDraws
from spurline_rl.engines.in_process.decoder import Decoder
from spurline_rl.environments.single_turn import SingleTurn
from spurline_rl.kept_rollouts.keeper import RolloutKeeper
from spurline_rl.preparation import Preparation
from spurline_rl.prompt_source import PromptSource
from spurline_rl.rewards.matching import ExactMatch

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny-qwen3"
WARM = ROOT / "runs" / "sort_warmup" / "model"
DISCARDED = 4
"""Number of first steps, which have cold caches."""
WHOLE, TAKEN_APART = slice(DISCARDED, -1, 2), slice(DISCARDED + 1, -1, 2)
"""Steps without and with clocks in every attempt. The last step, which evaluates and saves, is left out."""
LIMIT = 0.05
LIMIT_OF_KEEPING = 0.01
INSIDE = ("decode", "look-back forward", "forward/backward and optimizer")
GENERATING = ("reward", "environment and policy handles", "drawing prompts", "scheduling of attempts")
"""The parts of `time/generate` other than the decode steps."""
PRODUCT = ("generate", "look_back", "forward_backward", "optimizer", "step")


class Steps:
    """Hooks that record the times of every step. Each list gets one entry per step."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.parts: list[dict[str, Seconds]] = []
        self.product: list[dict[str, float]] = []
        self.tokens: list[float] = []
        self.kept: list[Seconds] = []

    @hookimpl(tryfirst=True)
    def on_step_start(self, step: int) -> None:
        self._parts.clear()
        self._parts.is_fine = (step - 1 - DISCARDED) % 2 == 1
        self._begin = Seconds.now()

    @hookimpl
    def on_step_end(self, metrics: Mapping[str, float]) -> None:
        whole = Seconds.now() - self._begin
        self.parts.append(exclusive(whole, self._parts.taken))
        self.product.append({name: metrics[f"time/{name}"] for name in PRODUCT})
        self.tokens.append(metrics["rollout/tokens"])
        # The thread has almost always finished its work for a step before the step ends.
        self.kept.append(self._parts.taken["keep"] + self._parts.taken["keep, thread"])


def exclusive(step: Seconds, taken: Mapping[str, Seconds]) -> dict[str, Seconds]:
    """Return parts that add up to the step, given spans of which some contain others."""
    of = {**taken, "step": step}
    return {
        "decode": of["advance"],
        "look-back forward": of["logprobs"],
        "forward/backward and optimizer": of["update"],
        "reward": of["reward"],
        "environment and policy handles": of["environment"] - of["reward"],
        "drawing prompts": of["draw"],
        # The event loop works while the engine's thread decodes, so by wall clock this part may be too small.
        "scheduling of attempts": of["collect"] - of["advance"] - of["environment"] - of["draw"],
        "collation": of["collate"],
        "advantages, columns, health metrics": of["prepare"] - of["collate"] - of["logprobs"],
        "reward and length metrics": of["build"] - of["collect"] - of["prepare"] - of["keep"],
        "keeping rollouts, handed over": of["keep"],
        "mini-batches, reduction": of["train_step"] - of["update"],
        "loop, recording": of["step"] - of["build"] - of["train_step"],
    }


def measure(model: Path, steps: int, folder: Path) -> Steps:
    """Run the example with a clock in every part."""
    loaded = load_config(
        ROOT / "examples" / "rl_sort.yaml",
        [
            f"run_dir={folder}/rl",
            f"model.path={model}",
            f"data.train={ROOT / 'examples/data/sort_train.jsonl'}",
            f"data.eval={ROOT / 'examples/data/sort_eval.jsonl'}",
            "evaluation.every_steps=null",
            "checkpoint.every_steps=null",
            "checkpoint.export_hf=false",
            "report.enabled=false",
            f"steps={DISCARDED + steps + 1}",
        ],
    )
    parts = StepParts()
    measured = Steps(parts)
    loaded.host.attach(measured, "rl_overhead")
    with patched() as patch:
        # Parts that run beside another thread are measured by the time of their thread, others by process time.
        patch(Decoder, "advance", parts.call("advance", of_thread=True))
        patch(SingleTurn, "run", parts.busy("environment"))
        patch(ExactMatch, "score", parts.busy("reward"))
        patch(PromptDraws, "take", parts.call("draw", of_thread=True))
        patch(source, "collect_groups", parts.until_done("collect"))
        patch(source.RolloutSource, "build", parts.call("build"))
        patch(Preparation, "prepare", parts.call("prepare"))
        patch(PromptSource, "_keep", parts.call("keep"))
        patch(RolloutKeeper, "_write", parts.call("keep, thread", of_thread=True))
        patch(FastRolloutsCollator, "collate_rollouts", parts.call("collate"))
        patch(LocalBackend, "logprobs", parts.call("logprobs"))
        patch(LocalBackend, "update", parts.call("update"))
        patch(Update, "train_step", parts.call("train_step"))
        Run(loaded).train()
    return measured


def warm_up(folder: Path) -> Path:
    """Train the quickstart's warm-up model, which gives some right answers."""
    settings = [
        f"run_dir={folder}/warm_up",
        f"model.path={TINY}",
        f"data.train={ROOT / 'examples/data/sort_train.jsonl'}",
        "data.eval=null",
        "evaluation.every_steps=null",
        "evaluation.generate=null",
        "report.enabled=false",
        "steps=180",
        "schedule=constant",
    ]
    Run(load_config(ROOT / "examples" / "sft_sort.yaml", settings)).train()
    return folder / "warm_up" / "model"


def outside_gate(name: str, measured: Steps, inside: tuple[str, ...]) -> Gate:
    """Return the gate for the share of the step that is not `inside`."""
    return Gate(name, share(measured, inside, "wall"), LIMIT, False, share(measured, inside, "cpu"))


def share_of_keeping(measured: Steps, kind: str) -> float:
    """Return the median share of the step that keeping rollouts takes on both threads."""
    steps = list(zip(measured.parts, measured.kept, strict=True))[WHOLE]
    return statistics.median(
        getattr(kept, kind) / sum(getattr(spent, kind) for spent in parts.values()) for parts, kept in steps
    )


def share(measured: Steps, inside: tuple[str, ...], kind: str) -> float:
    """Return the median share of the step that is outside."""
    shares: list[float] = []
    for step in measured.parts[WHOLE]:
        seconds = {name: getattr(spent, kind) for name, spent in step.items()}
        shares.append(1 - sum(seconds[name] for name in inside) / sum(seconds.values()))
    return statistics.median(shares)


def figures(measured: Steps) -> dict[str, Any]:
    """Return medians in milliseconds over the steps with clocks, and Spurline's own metrics of the other steps."""

    def median(name: str, kind: str) -> float:
        return statistics.median(getattr(step[name], kind) for step in measured.parts[TAKEN_APART]) * 1000

    def of_step(kind: str) -> float:
        whole = (sum(getattr(part, kind) for part in step.values()) for step in measured.parts[TAKEN_APART])
        return statistics.median(whole) * 1000

    return {
        "step_ms": of_step("wall"),
        "step_cpu_ms": of_step("cpu"),
        "response_tokens": statistics.median(measured.tokens[DISCARDED:-1]),
        "parts_ms": {name: {kind: median(name, kind) for kind in ("wall", "cpu")} for name in measured.parts[0]},
        "product_metrics_ms": {
            f"time/{name}": statistics.median(step[name] for step in measured.product[WHOLE]) * 1000 for name in PRODUCT
        },
        # As in Spurline's own metrics, all of time/generate counts as generation.
        "outside_product_metrics": statistics.median(
            1 - sum(step[name] for name in PRODUCT if name != "step") / step["step"] for step in measured.product[WHOLE]
        ),
    }


def print_figures(found: Mapping[str, Any]) -> None:
    """One line a part."""
    step, step_cpu = found["step_ms"], found["step_cpu_ms"]
    print(f"RL step, {found['response_tokens']:.0f} response tokens: ms and share by wall clock | by process time")
    print(f"  {'step':<40} {step:9.1f}         | {step_cpu:9.1f}")
    for name, spent in found["parts_ms"].items():
        mark = " " if name in INSIDE else "*"
        wall, cpu = spent["wall"], spent["cpu"]
        print(f"{mark} {name:<40} {wall:9.2f} {wall / step:7.2%} | {cpu:9.2f} {cpu / step_cpu:7.2%}")
    print("* outside")
    metrics = ", ".join(f"{name} {value:.1f}" for name, value in found["product_metrics_ms"].items())
    print(f"Spurline's own metrics, ms: {metrics}; outside by them {found['outside_product_metrics']:.2%}")


def main() -> None:
    """Print the figures and whether the gate is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--model", type=Path, default=WARM)
    arguments = parser.parse_args()
    if not TINY.exists() and not arguments.model.exists():
        parser.error(f"{TINY} is missing; make it with: python examples/make_tiny_model.py {TINY}")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model if arguments.model.exists() else warm_up(Path(folder))
        measured = measure(model.resolve(), arguments.steps, Path(folder))
    found = figures(measured)
    preparing, preparation_gates = time_preparation(arguments.steps)
    gates = [
        *preparation_gates,
        outside_gate("share of the step outside generate and models", measured, INSIDE + GENERATING),
        outside_gate("share of the step outside decode and models (strict)", measured, INSIDE),
        Gate(
            "share of the step that keeping the rollouts takes",
            share_of_keeping(measured, "cpu"),
            LIMIT_OF_KEEPING,
            False,
            share_of_keeping(measured, "cpu"),
        ),
    ]
    if arguments.json:
        print(
            json.dumps(
                {
                    "figures": found,
                    "preparation": timings_as_json(preparing),
                    "gates": gates_as_json(gates),
                    "steps": arguments.steps,
                },
                indent=2,
            )
        )
        return
    print_figures(found)
    print_timings("preparing a large batch", preparing)
    print_gates(gates)


if __name__ == "__main__":
    main()
