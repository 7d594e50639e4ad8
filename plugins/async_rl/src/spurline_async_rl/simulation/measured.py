"""Read how long things took in an earlier run: its timeline and metrics -> Workload."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from spurline.errors import UserError
from spurline.run.directory import CONFIG_FILE, check_run_directory, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_async_rl.simulation.workload import Times, Workload
from spurline_async_rl.timeline.records import TIMELINE_FILE, GroupSpan, read_timeline

_FEWEST_GROUPS = 8


def measured_workload(run_dir: Path) -> Workload:
    """Return the workload of a run, from its timeline and metrics.

    The most groups that were on one engine count as those that saturate it: a prediction promises no gain that the run
    has not shown.

    Raises:
        UserError: If the run left too little to go by.
        RunDirectoryError: If this is no run directory, or one of its files is unreadable.
    """
    check_run_directory(run_dir)
    metrics = read_metrics(run_dir / METRICS_FILE, skip_foreign=True)
    source: dict[str, Any] = read_mapping(run_dir / CONFIG_FILE).get("source") or {}
    records = read_timeline(run_dir / TIMELINE_FILE)
    groups = [group for record in records for group in record.groups if group.ended > group.began]
    # The first step, with its cold start, is left out.
    train_s: list[float] = []
    for before, record in pairwise(records):
        beside_s = sum(span.seconds for span in record.spans if span.kind in ("wait", "publish", "evaluate"))
        train_s.append(max(1e-3, record.until - before.until - beside_s))
    if len(groups) < _FEWEST_GROUPS or not train_s:
        raise UserError(
            f"{run_dir}: {TIMELINE_FILE} has {len(groups)} groups and {len(records)} steps, too few to go by: at least "
            f"{_FEWEST_GROUPS} groups and 2 steps are needed. Give the run_dir of a longer run of source "
            "async_rollouts, or --group-seconds and --step-seconds."
        )
    publishes = [span for record in records for span in record.spans if span.kind == "publish"]
    publish_s = fmean(span.seconds for span in publishes) if publishes else 0.0
    pauses = [line["time/sync_pause"] for line in metrics if "time/sync_pause" in line]
    pause_s = min(publish_s, fmean(pauses)) if pauses else publish_s
    paused_share = pause_s / publish_s if publish_s else 0.0

    def generating_s(group: GroupSpan) -> float:
        """Return the seconds of a group without those in which engines stood still."""
        overlaps = (min(span.ended, group.ended) - max(span.began, group.began) for span in publishes)
        return max(1e-3, group.seconds - paused_share * sum(overlap for overlap in overlaps if overlap > 0))

    group_s = [generating_s(group) for group in groups]
    states = [group.state for group in groups]
    filtered, quarantined = (states.count(state) / len(groups) for state in ("filtered", "quarantined"))
    engines: int = source.get("engine", {}).get("engines", 1)
    # At equal times ends come first.
    changes = sorted([(group.began, 1) for group in groups] + [(group.ended, -1) for group in groups])
    most = max(1, round(max(accumulate(change for _, change in changes)) / engines))
    batch_size = max((len(taken.draws) for record in records for taken in record.taken), default=1)
    return Workload(
        Times(group_s),
        Times(train_s),
        batch_size,
        most,
        filtered,
        quarantined,
        publish_s - pause_s,
        pause_s,
        [
            f"{len(groups):,} groups of {run_dir}, {fmean(group_s):.3g} s each on average, the longest "
            f"{max(group_s):.3g} s; {filtered:.1%} were left out, {quarantined:.1%} given up",
            f"{len(train_s):,} steps of {fmean(train_s):.3g} s beside waiting and publishing; publishing took "
            f"{publish_s:.3g} s, and engines stood still for {pause_s:.3g} s of that",
            f"a group is as fast as measured with up to {most} groups on its engine, the most there were; more of them "
            "share what these get done (--saturation says otherwise)",
        ],
    )
