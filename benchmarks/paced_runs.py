"""Measure a source with an engine and a trainer that sleep, and predict the result with the simulator.

`async_throughput.py` uses this module. In: a Case. Out: a Result. `paced_plugin.py` has the parts that sleep.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import paced_plugin

from spurline import load_config
from spurline.plugins.host import installed_plugins
from spurline.protocols.backend import Backend
from spurline.run.build import build_data
from spurline_async_rl.scheduling.depth import Depth
from spurline_async_rl.timeline.records import TIMELINE_FILE, read_timeline
from spurline_simulation.prediction import predictor
from spurline_simulation.workload import Knobs, Times, Workload, measured_workload

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny-qwen3"
ROWS = ROOT / "examples" / "data" / "sort_train.jsonl"
B = 32
SAMPLES = 2
SIGMA = 1.0


@dataclass(frozen=True)
class Case:
    """A case to measure.

    Attributes:
        max_staleness: The bound. None means the synchronous source.
        generation: The speed of engines, relative to the trainer.
    """

    max_staleness: int | None
    max_running: int
    straggler_share: float = 0.0
    depth: Depth = "auto"
    generation: float = 1.0
    steps: int = 40
    step_s: float = 1.0

    @property
    def cold_steps(self) -> int:
        """The first steps, which do not count, because no groups are buffered yet."""
        return 2 * ((self.max_staleness or 0) + 1)

    @property
    def engine(self) -> paced_plugin.PacedEngineConfig:
        mean_s = self.step_s * self.max_running / B / self.generation
        return paced_plugin.PacedEngineConfig(mean_s=mean_s, sigma=SIGMA, straggler_share=self.straggler_share)


@dataclass(frozen=True)
class Predicted:
    """Predicted figures. For the fields, see `Result`."""

    efficiency: float
    mean_age: float


@dataclass(frozen=True)
class Result:
    """The figures of a case.

    Attributes:
        per_s: Trained groups per second.
        efficiency: `per_s` relative to the capacity of the slower of engines and trainer.
        mean_age: The mean age of the trained tokens in updates.
        waits: The share of time in which the trainer waits for groups.
        overhead_s: The seconds of a step that are neither waiting nor training.
        predicted: The simulator's figures, from the times that engines and trainer sleep.
        from_record: The simulator's figures, from the recorded times of engines and trainer, including Python. None for
            the synchronous source, which records no times.
    """

    case: Case
    per_s: float
    efficiency: float
    mean_age: float
    waits: float
    overhead_s: float
    predicted: Predicted
    from_record: Predicted | None

    @property
    def off(self) -> float:
        """The relative difference of the measured throughput from the prediction that uses recorded times."""
        return abs(self.efficiency / self.from_record.efficiency - 1) if self.from_record else 0.0


def measure(case: Case, folder: Path) -> Result:
    """Run the real source, then the simulator."""
    loaded = load_config(settings(case, folder), available={**installed_plugins(), "paced": paced_plugin.INSTALLED})
    trainer = cast("Backend", paced_plugin.PacedTrainer())
    ends: list[float] = []
    waits: list[float] = []
    tokens_by_age: list[Counter[int]] = []
    with ExitStack() as stack:
        source = build_data(loaded, stack).source
        source.start(1, trainer)
        for step in range(1, case.cold_steps + case.steps + 1):
            batch = source.build(step)
            waits.append(batch.info["time/generate"])
            tokens_by_age.append(_tokens_by_age(batch.info))
            batch.release()
            time.sleep(case.step_s)
            source.after_update(step, trainer)
            ends.append(time.perf_counter())
    cold = case.cold_steps
    seconds = ends[-1] - ends[cold - 1]
    overheads = [
        after - before - wait - case.step_s for (before, after), wait in zip(pairwise(ends), waits[1:], strict=True)
    ]
    by_age = sum(tokens_by_age[cold:], Counter[int]())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(loaded.resolved()))
    per_s = case.steps * B / seconds
    return Result(
        case,
        per_s,
        efficiency=per_s / capacity(case),
        mean_age=sum(age * count for age, count in by_age.items()) / max(1, by_age.total()),
        waits=sum(waits[cold:]) / seconds,
        overhead_s=statistics.median(overheads[cold - 1 :]),
        predicted=predicted(case),
        from_record=predicted_from_record(case, folder),
    )


def _tokens_by_age(info: Mapping[str, float]) -> Counter[int]:
    prefix = "staleness/tokens_"
    return Counter({int(name.removeprefix(prefix)): int(info[name]) for name in info if name.startswith(prefix)})


def settings(case: Case, folder: Path) -> dict[str, Any]:
    """Return the config of the run. It has more steps than are measured, so that the last batch does not count."""
    is_async = case.max_staleness is not None
    choices = {
        "max_staleness": case.max_staleness,
        "max_concurrent_groups": case.max_running,
        "depth": case.depth,
        "correction": "tis",
    }
    return {
        "plugins": ["collation_fast", "async_rl", "paced"],
        "run_dir": str(folder),
        "model": {"path": str(TINY)},
        "data": {"train": str(ROWS)},
        "steps": case.cold_steps + case.steps + (case.max_staleness or 0) + 2,
        "report": {"enabled": False},
        "source": {
            "name": "async_rollouts" if is_async else "rollouts",
            "prompts_per_step": B,
            "samples_per_prompt": SAMPLES,
            "max_concurrent": case.max_running * SAMPLES,
            "environment": {"name": "single_turn", "rewards": "exact_match"},
            "advantage": "grpo",
            "engine": case.engine.model_dump(mode="json"),
            "sampling": {"max_new_tokens": 4},
            # The logprobs of a paced engine prove nothing.
            **(choices | {"proof": {"every": 0}} if is_async else {}),
        },
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": B},
    }


def capacity(case: Case) -> float:
    """Return the groups per second that the slower of engines and trainer can finish.

    Engines are assumed to always have `max_running` of the drawn groups.
    """
    seconds = case.engine.seconds()
    draws = B * (case.cold_steps + case.steps)
    return min(B / case.step_s, case.max_running / (sum(seconds(draw) for draw in range(draws)) / draws))


def predicted(case: Case) -> Predicted:
    """Predict the figures from the times that engines and trainer sleep.

    Staleness 0 predicts the synchronous source, since no group is left out.
    """
    return _predicted(case, Workload(case.engine.seconds(), Times([case.step_s]), B))


def predicted_from_record(case: Case, folder: Path) -> Predicted | None:
    """Predict the figures from the recorded times of steps, and the engine's sleep plus the mean recorded delay."""
    if case.max_staleness is None:
        return None
    seconds = case.engine.seconds()
    groups = [group for record in read_timeline(folder / TIMELINE_FILE) for group in record.groups]
    late_s = statistics.fmean(group.ended - group.began - seconds(group.draw) for group in groups)

    def group_s(draw: int) -> float:
        return seconds(draw) + max(0.0, late_s)

    return _predicted(case, replace(measured_workload(folder), group_s=group_s, saturation=math.inf))


def _predicted(case: Case, workload: Workload) -> Predicted:
    knobs = Knobs(case.max_staleness or 0, B, case.max_running, depth=case.depth)
    figures = predictor(workload, case.steps)(knobs).figures
    return Predicted(figures.groups_per_second / capacity(case), figures.mean_staleness)
