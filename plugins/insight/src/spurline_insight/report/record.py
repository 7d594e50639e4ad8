"""Read the files of a finished or running run, and sort its evaluation metrics into held-out losses and scores.

Rollouts of held-out prompts record `eval/pass@1`, mean rewards and the number of prompts given up. These rewards do
not count as scores. Plots show them beside the training rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spurline.run.directory import CONFIG_FILE, SUMMARY_FILE, RunDirectory, check_run_directory, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_insight.report_panel import RunRecord


def read_record(run_dir: Path | str) -> RunRecord:
    """Read the files of a run directory. A file that does not exist yet counts as empty.

    Raises:
        RunDirectoryError: If the folder is missing or is not a run directory, or if a file is unreadable.
    """
    run_dir = Path(run_dir)
    check_run_directory(run_dir)
    return RunRecord(
        run_dir=run_dir,
        metrics=read_metrics(run_dir / METRICS_FILE, skip_foreign=True),
        config=read_mapping(run_dir / CONFIG_FILE),
        summary=read_summary(run_dir),
    )


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """Read the summary of a run. The status is `interrupted` if the process of the run was killed."""
    summary = read_mapping(run_dir / SUMMARY_FILE)
    if summary.get("status") == "running" and not RunDirectory(run_dir).is_in_use():
        return {**summary, "status": "interrupted"}
    return summary


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a unique name for each run: the name of its folder, with parent folders where necessary."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]

    def name_of(own: tuple[str, ...]) -> str:
        lengths = range(1, len(own))
        unique = (n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        return str(Path(*own[-next(unique, len(own)) :]))

    return [name_of(own) for own in parts]


GIVEN_UP = "failed"
"""Name of the evaluation metric that counts the prompts given up."""
STDERR = "_stderr"
"""Ending of the name of an evaluation metric that is the standard error of another one."""
REWARD = "reward/mean"
"""Name of a metric that every step of reinforcement learning records, and no step of other training."""
OF_PAIRS = "preference/"
"""Prefix of the metrics of better and worse answers."""


def setting(config: Any, *keys: str) -> Any:
    """Return the value at the nested `keys` of a config, or None."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def recorded_names(record: RunRecord, prefix: str) -> list[str]:
    """Return the sorted names of metrics that begin with `prefix`."""
    return sorted({name for line in record.metrics for name in line if name.startswith(prefix)})


def evaluations_of(record: RunRecord) -> list[str]:
    """Return the prefixes of the run's evaluations: `eval/` for `data.eval`, and `eval/NAME/` for a named one."""
    named = setting(record.config, "evaluations")
    return ["eval/", *(f"eval/{name}/" for name in (named if isinstance(named, Mapping) else ()))]


def evaluation_losses(record: RunRecord) -> list[str]:
    """Return the names of held-out losses, such as `eval/loss`, `eval/loss/math` or `eval/NAME/loss`."""
    return [name for name, metric in evaluation_metrics(record) if "loss" in metric.split("/")]


def evaluation_scores(record: RunRecord) -> tuple[list[str], list[str]]:
    """Return the names of evaluation metrics: first shares, then others.

    Losses, rewards of rollouts and standard errors are left out. Of a share, more is better. A metric is a share if all
    its values are within 0..1. If training records it too, its name decides instead of its values: a margin of 0.4, for
    example, is not a share of 40 %.
    """
    shares, others = list[str](), list[str]()
    metrics = evaluation_metrics(record)
    with_rewards = {name.removesuffix(metric) for name, metric in metrics if metric == "pass@1"}
    trained = {name for line in record.metrics for name in line if not name.startswith("eval/")}
    for name, metric in metrics:
        is_reward = metric in ("reward", GIVEN_UP) or metric.startswith("rewards/")
        is_error = metric.endswith(STDERR)
        if is_error or "loss" in metric.split("/") or (is_reward and name.removesuffix(metric) in with_rewards):
            continue
        if metric in trained:
            is_share = metric.rpartition("/")[2].endswith(("accuracy", "fraction", "share"))
        else:
            is_share = all(0 <= value <= 1 for value in record.series(name)[1])
        (shares if is_share else others).append(name)
    return shares, others


def label_of(name: str, kind: str = "") -> str:
    """Return a label such as `exact match` for `eval/exact_match`. If `kind` is given, the label begins with it."""
    label = name.removeprefix("eval/").replace("_", " ")
    return f"{kind} {label}" if kind else label


def evaluation_metrics(record: RunRecord) -> list[tuple[str, str]]:
    """Return (full name, name within its evaluation) of all evaluation metrics except times."""
    prefixes = sorted(evaluations_of(record), key=len, reverse=True)
    found: list[tuple[str, str]] = []
    for name in recorded_names(record, "eval/"):
        metric = name.removeprefix(next(prefix for prefix in prefixes if name.startswith(prefix)))
        if metric != "time":
            found.append((name, metric))
    return found
