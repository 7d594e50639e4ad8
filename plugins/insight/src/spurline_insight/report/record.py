"""Read the files of a finished or running run, and classify its evaluation metrics.

Panels ask here which recorded metrics are held-out losses and which are scores. Rollouts of held-out prompts record
`eval/pass@1`, mean rewards and the number of prompts given up. Their rewards are no scores, and are drawn beside the
rewards of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spurline.run.directory import CONFIG_FILE, SUMMARY_FILE, check_run_directory, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_insight.report_panel import RunRecord


def read_record(run_dir: Path) -> RunRecord:
    """Read all that panels may draw from `run_dir`; a file that does not exist yet counts as empty.

    Raises RunDirectoryError when the folder is missing, is no run directory, or holds an unreadable file.
    """
    run_dir = Path(run_dir)
    check_run_directory(run_dir)
    return RunRecord(
        run_dir=run_dir,
        # Lines that no run has written must not keep a finished run from its report.
        metrics=read_metrics(run_dir / METRICS_FILE, skip_foreign=True),
        config=read_mapping(run_dir / CONFIG_FILE),
        summary=read_mapping(run_dir / SUMMARY_FILE),
    )


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run: its folder, with as many folders above it as tell the runs apart."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]

    def name_of(own: tuple[str, ...]) -> str:
        lengths = range(1, len(own))
        unique = (n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        return str(Path(*own[-next(unique, len(own)) :]))

    return [name_of(own) for own in parts]


GIVEN_UP = "failed"
"""Held-out prompts given up, within the names of an evaluation."""
_TERM = "rewards/"
_OF_ATTEMPTS = ("reward", GIVEN_UP)


def setting(config: Any, *keys: str) -> Any:
    """Return the value at nested `keys` of config.json, or None."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def recorded_names(record: RunRecord, prefix: str) -> list[str]:
    """Return the sorted names of metrics that begin with `prefix`."""
    return sorted({name for line in record.metrics for name in line if name.startswith(prefix)})


def evaluations_of(record: RunRecord) -> list[str]:
    """Return the prefixes of the run's evaluations: `eval/` of `data.eval`, and `eval/NAME/` of each named one."""
    named = setting(record.config, "evaluations")
    return ["eval/", *(f"eval/{name}/" for name in (named if isinstance(named, Mapping) else ()))]


def evaluation_losses(record: RunRecord) -> list[str]:
    """Return the names of held-out losses, such as `eval/loss`, `eval/loss/math` or `eval/NAME/loss`."""
    return [name for name, metric in _evaluation_metrics(record) if "loss" in metric.split("/")]


def evaluation_scores(record: RunRecord) -> tuple[list[str], list[str]]:
    """Return the names of all other evaluation metrics: first those that are shares, then the rest.

    More is better for a share. A score of answers is a share if it stays within 0..1. A metric that training has too is
    a share if its name says so: a margin of 0.4 is not 40 %.
    """
    shares, others = list[str](), list[str]()
    metrics = _evaluation_metrics(record)
    judged = {name.removesuffix(metric) for name, metric in metrics if metric == "pass@1"}
    trained = {name for line in record.metrics for name in line if not name.startswith("eval/")}
    for name, metric in metrics:
        is_reward = metric in _OF_ATTEMPTS or metric.startswith(_TERM)
        if "loss" in metric.split("/") or (is_reward and name.removesuffix(metric) in judged):
            continue
        _, values = record.series(name)
        is_share = _is_share(metric) if metric in trained else all(0 <= value <= 1 for value in values)
        (shares if is_share else others).append(name)
    return shares, others


def label_of(name: str, kind: str = "") -> str:
    """Return `exact match` for `eval/exact_match`; with a kind in front where the bare name says too little."""
    label = name.removeprefix("eval/").replace("_", " ")
    return f"{kind} {label}" if kind else label


def _is_share(metric: str) -> bool:
    return metric.rpartition("/")[2].endswith(("accuracy", "fraction", "share"))


def _evaluation_metrics(record: RunRecord) -> list[tuple[str, str]]:
    """Return (whole name, name within its evaluation) of the metrics of evaluations, without their times."""
    prefixes = evaluations_of(record)[::-1]
    found: list[tuple[str, str]] = []
    for name in recorded_names(record, "eval/"):
        metric = name.removeprefix(next(prefix for prefix in prefixes if name.startswith(prefix)))
        if metric != "time":
            found.append((name, metric))
    return found


REWARD = "reward/mean"
"""Steps of reinforcement learning have this metric, and no others do."""


OF_PAIRS = "dpo/"
"""Prefix of the metrics of preference pairs."""
