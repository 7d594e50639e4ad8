"""Measure a source with paced parts, and predict what the model says it should reach.

Used by `async_throughput.py`. In: a Case. Out: a Result. The parts that sleep are in `paced_plugin.py`.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import paced_plugin

from spurline import load_config
from spurline.plugins.host import installed_plugins
from spurline.protocols.backend import Backend
from spurline.run.build import build_data
from spurline_async_rl.simulation.measured import measured_workload
from spurline_async_rl.simulation.prediction import Predictor
from spurline_async_rl.simulation.workload import WORK_IN_SECONDS, Knobs, Times, Workload
from spurline_async_rl.timeline.records import TIMELINE_FILE, read_timeline

ROOT = Path(__file__).parents[1]
TINY = ROOT / "models" / "tiny-qwen3"
ROWS = ROOT / "examples" / "data" / "sort_train.jsonl"
B = 32
SAMPLES = 2
SIGMA = 1.0


@dataclass(frozen=True)
class Case:
    """What is measured. max_staleness: None is core's synchronous source."""

    max_staleness: int | None
    max_running: int
    straggler_share: float = 0.0
    steps: int = 40
    step_s: float = 1.0

    @property
    def cold_steps(self) -> int:
        """Left out at the beginning, as nothing is buffered then."""
        return 2 * ((self.max_staleness or 0) + 1)

    @property
    def engine(self) -> paced_plugin.PacedEngineConfig:
        mean_s = self.step_s * self.max_running / B
        return paced_plugin.PacedEngineConfig(mean_s=mean_s, sigma=SIGMA, straggler_share=self.straggler_share)


@dataclass(frozen=True)
class Result:
    """efficiency: measured throughput relative to what engines and trainer could do. predicted: by the model, told how
    long they sleep. from_record: by the model, told what the run recorded that both took, Python included; 0 for the
    synchronous source, which records nothing. overhead_s: of a step, what is neither waiting for
    groups nor training."""

    case: Case
    efficiency: float
    predicted: float
    from_record: float
    overhead_s: float

    @property
    def off(self) -> float:
        """How far the measured throughput is from the one predicted from the record."""
        return abs(self.efficiency / self.from_record - 1) if self.from_record else 0.0


def measure(case: Case, folder: Path) -> Result:
    """Run the real source, then the model of it."""
    loaded = load_config(settings(case, folder), available={**installed_plugins(), "paced": paced_plugin.INSTALLED})
    trainer = cast("Backend", paced_plugin.PacedTrainer())
    ends: list[float] = []
    overheads: list[float] = []
    with ExitStack() as stack:
        source = build_data(loaded, stack).source
        source.start(1, trainer)
        for step in range(1, case.cold_steps + case.steps + 1):
            begin = time.perf_counter()
            batch = source.build(step)
            waited = batch.info["time/generate"]
            batch.release()
            time.sleep(case.step_s)
            source.after_update(step, trainer)
            ends.append(time.perf_counter())
            overheads.append(ends[-1] - begin - waited - case.step_s)
    seconds = ends[-1] - ends[case.cold_steps - 1]
    capacity = min(B / case.step_s, generation_per_s(case))
    found = case.steps * B / seconds / capacity
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(loaded.resolved()))
    recorded = recorded_per_s(case, folder)
    return Result(case, found, predicted_per_s(case) / capacity, recorded / capacity, statistics.median(overheads))


def settings(case: Case, folder: Path) -> dict[str, Any]:
    """Config of the run. Its steps go on beyond those measured, so that no batch is the last one."""
    is_async = case.max_staleness is not None
    choices = {"max_staleness": case.max_staleness, "max_concurrent_groups": case.max_running, "correction": "tis"}
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
            **(choices if is_async else {}),
        },
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": B},
    }


def generation_per_s(case: Case) -> float:
    """Groups that engines finish in a second when they always have as many as they may: of the very groups drawn."""
    seconds = case.engine.seconds()
    draws = B * (case.cold_steps + case.steps)
    return case.max_running / (sum(seconds(draw) for draw in range(draws)) / draws)


def predicted_per_s(case: Case) -> float:
    """Trained groups in a second, by the model; at staleness 0 that is the synchronous source, as none is left out."""
    workload = Workload(case.engine.seconds(), Times([case.step_s]), B)
    return Predictor(workload, case.steps)(_knobs(case)).figures.groups_per_second


def recorded_per_s(case: Case, folder: Path) -> float:
    """Trained groups in a second, by the model, with steps as the run recorded them and groups as much longer than the
    engine's sleep as they were on average; 0 where there is no record."""
    if case.max_staleness is None:
        return 0.0
    seconds = case.engine.seconds()
    groups = [group for record in read_timeline(folder / TIMELINE_FILE) for group in record.groups]
    late_s = statistics.fmean(group.ended - group.began - seconds(group.draw) for group in groups)

    def group_s(draw: int) -> float:
        return seconds(draw) + max(0.0, late_s)

    workload = replace(measured_workload(folder), group_s=group_s, speed=WORK_IN_SECONDS)
    return Predictor(workload, case.steps)(_knobs(case)).figures.groups_per_second


def _knobs(case: Case) -> Knobs:
    return Knobs(case.max_staleness or 0, B, case.max_running)
