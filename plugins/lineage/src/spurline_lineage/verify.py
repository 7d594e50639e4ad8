"""Recompute recorded steps of a run from the checkpoint before them, and compare all hashes.

The record itself is checked first: each value of `chain`, also in checkpoints, that each start of a process began with
the weights that the step before had made, and the digests of checkpoints and of kept files of rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from spurline.digests import verify_files
from spurline.errors import DamagedCheckpointError, OtherDataError, UserError
from spurline.run.checkpoints.checkpoint import BACKEND, Checkpoint, CheckpointStore, open_checkpoint
from spurline.run.checkpoints.hook_state import FOLDER
from spurline.run.checkpoints.state_files import read_state
from spurline.run.directory import RunDirectory, check_run_directory
from spurline_lineage.fingerprints import PARTS, chain_hash, content_hash
from spurline_lineage.fork import checkpoint_before, settings_at, step_of, trained_again
from spurline_lineage.recorder import LINEAGE_FILE, read_lineage

Lines = Mapping[int, Mapping[str, Any]]
"""The lines of lineage.jsonl by step."""


@dataclass(frozen=True)
class Departure:
    """A part of a step that is not what the record says."""

    step: int
    part: str
    """One of PARTS, or `record`, `checkpoint` or the path of a file."""
    words: str


@dataclass(frozen=True)
class Verdict:
    """The result of a recomputation.

    Attributes:
        departures: All parts that are not what the record says.
        steps: The recomputed steps.
        recorded: The steps of the record.
        num_weights: Number of the recomputed steps after which weights were recorded.
    """

    departures: list[Departure]
    steps: range
    recorded: range
    num_weights: int


def verify(run_dir: Path, step: int | None, start: str | None, overrides: Sequence[str]) -> Verdict:
    """Recompute steps of a run, and compare them with its record. If a checkpoint is damaged, nothing is recomputed.

    Args:
        run_dir: The run.
        step: The last step to recompute. If None, it is the last recorded step.
        start: The folder of the checkpoint to begin with, or `start` for the first step. If None, it is the last
            checkpoint before the step.
        overrides: Settings that differ from those of the run, such as a path on this machine.

    Raises:
        UserError: If the run has no record of the step, or the steps cannot be recomputed with these settings.
    """
    check_run_directory(run_dir)
    # Read the lines last: the run may be training, and a checkpoint is written after the line of its step.
    paths = CheckpointStore(RunDirectory(run_dir).checkpoints).paths()
    lines = read_lineage(run_dir)
    if not lines:
        raise UserError(f"{run_dir} has no {LINEAGE_FILE}. A run writes it with plugins: [lineage].")
    last, recorded = max(lines) if step is None else step, range(min(lines), max(lines) + 1)
    if last not in lines:
        raise UserError(f"{run_dir / LINEAGE_FILE} has no step {last}. It has steps {min(lines)} to {max(lines)}.")
    found = [*_departures_of_record(run_dir, lines), *_departures_of_checkpoints(paths, lines)]
    if any(departure.part == "checkpoint" for departure in found):
        return Verdict(found, range(0), recorded, 0)
    checkpoint = _checkpoint(run_dir, last, start)
    steps = range(1 if checkpoint is None else checkpoint.step + 1, last + 1)
    found += _recomputed(run_dir, lines, checkpoint, steps, overrides)
    num_weights = sum("weights_after" in lines.get(step, {}) for step in steps)
    return Verdict(found, steps, recorded, num_weights)


def _checkpoint(run_dir: Path, step: int, start: str | None) -> Checkpoint | None:
    if start is None:
        return checkpoint_before(run_dir, step)
    chosen = None if start == "start" else open_checkpoint(Path(start))
    if chosen is not None and chosen.step >= step:
        raise UserError(f"--from {start} is a checkpoint of step {chosen.step}, which is not before step {step}.")
    return chosen


def _departures_of_record(run_dir: Path, lines: Lines) -> Iterator[Departure]:
    """Yield what contradicts itself in the record, or in the files that the run has kept."""
    if 1 in lines and lines[1]["chain"] != chain_hash("", lines[1]):
        yield Departure(1, "record", f"the line in {LINEAGE_FILE} was changed")
    for before, line in pairwise(lines.values()):
        step = line["step"]
        if step != before["step"] + 1:
            yield Departure(step, "record", f"{LINEAGE_FILE} has no line of step {before['step'] + 1}")
        elif line["chain"] != chain_hash(before["chain"], line):
            yield Departure(step, "record", f"the line in {LINEAGE_FILE}, or the line before it, was changed")
        elif differ(before.get("weights_after"), line.get("weights_before")):
            yield Departure(step, "weights_before", f"they are not the weights after step {before['step']}")
    for step, line in lines.items():
        for name, digest in line["files"].items():
            path = run_dir / name
            # Old files of rollouts are removed to save space.
            if path.exists() and content_hash(path) != digest:
                yield Departure(step, name, "the content of the file has changed")


def _departures_of_checkpoints(paths: Sequence[Path], lines: Lines) -> Iterator[Departure]:
    """Yield damaged checkpoints, and those that have another chain than the record."""
    for path in paths:
        step = step_of(path)
        try:
            verify_files(path / BACKEND, open_checkpoint(path).unverified(BACKEND))
        except DamagedCheckpointError as error:
            yield Departure(step, "checkpoint", str(error))
            continue
        with suppress(FileNotFoundError):  # A checkpoint of a run without this plugin has no chain.
            state: Mapping[str, Any] = read_state(path / FOLDER / "lineage" / "chain")
            # If the step has an evaluation to repeat, its line is not yet in the chain.
            done, chain = step - 1 if state["line"] else step, str(state["chain"])
            following = lines.get(done + 1)
            if done in lines:
                fits = lines[done]["chain"] == chain
            else:
                fits = following is not None and following["chain"] == chain_hash(chain, following)
            if not fits:
                yield Departure(step, "record", f"{LINEAGE_FILE} has another chain up to step {done} than {path}")


def _recomputed(
    run_dir: Path, lines: Lines, checkpoint: Checkpoint | None, steps: range, overrides: Sequence[str]
) -> list[Departure]:
    """Return the departures of the first recomputed step that has any."""
    plugins = dict.fromkeys([*settings_at(run_dir, steps[-1])["plugins"], "lineage"])
    try:
        with trained_again(run_dir, checkpoint, steps[-1], [f"plugins={json.dumps([*plugins])}", *overrides]) as again:
            made = read_lineage(again)
    except OtherDataError as error:
        return [Departure(steps[0], "rows", str(error))]
    if not made:
        raise UserError("--set plugins: the list has no lineage, so nothing was recorded. Add lineage.")
    for step in steps:
        then, now = lines.get(step, {}), made[step]
        parts = [part for part in PARTS if differ(then.get(part), now.get(part))]
        if parts:
            return [Departure(step, part, f"{then[part]} was recorded, {now[part]} was computed") for part in parts]
    return []


def differ(one: str | None, other: str | None) -> bool:
    """Return whether two hashes differ. A hash that was not computed differs from none."""
    return None not in (one, other) and one != other
