"""Begin a run with the checkpoint of another run and with other settings, or train steps of a run once more.

A fork gets the checkpoint's files as hard links, with a manifest of its own: its settings, and a history that names
the parent and each changed setting. From then on it is an ordinary run with a checkpoint. Its state includes the
position in the data and the states of random numbers, so it differs from its parent only by what was changed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spurline.config.compare import differences
from spurline.config.loading import LoadedConfig, load_config
from spurline.config.section import OnResume, sections_within
from spurline.digests import FileDigest
from spurline.errors import CheckpointError, ConfigError, Problem, RunDirectoryError, SpurlineError, UserError, listing
from spurline.files import remove, scratch_inside, write_errors
from spurline.plugins import hookimpl
from spurline.plugins.run_view import RunView
from spurline.run.checkpoints.checkpoint import BACKEND, MANIFEST, Checkpoint, CheckpointStore, Written, open_checkpoint
from spurline.run.directory import RunDirectory, read_mapping
from spurline.run.run import Run
from spurline.terminal import tell
from spurline_lineage.fingerprints import content_hash, policy_hash
from spurline_lineage.recorder import read_lineage

_REWRITTEN = ("format", "version", "step", "files", "best")
"""Entries of a manifest that are not copied. The best checkpoint of the parent is not in the fork."""
_QUIET = {
    "trackers": [],
    "evaluations": {},
    "evaluation": {},
    "stop_when": None,
    "checkpoint": {"every_minutes": None},
    "report": {"enabled": False},
}
"""Settings of a run that trains steps once more. They do not change what the steps do."""
_AFTER_ROLLOUTS = re.compile(
    r"(loss|optimizer|schedule|minibatches|critic|steps|epochs|source\.(advantage|advantage_scope|correction|turns))(\.|$)"
)
"""Settings that shape what a step makes of its rollouts, and not the rollouts themselves."""


def checkpoint_at(run_dir: Path, step: str) -> Checkpoint:
    """Return the checkpoint of a step, or the `latest` or `best` one. Raises CheckpointError listing all steps."""
    store = CheckpointStore(RunDirectory(run_dir).checkpoints)
    if not step.isdecimal():
        return store.chosen(step, "RUN@STEP")
    found = {step_of(path): path for path in store.paths()}
    if int(step) not in found:
        what = "A run from step 0 on is no fork: train the config with another run_dir. " if int(step) == 0 else ""
        raise CheckpointError(
            f"{run_dir} has no checkpoint of step {step}. {what}Steps with a checkpoint: {listing(map(str, found))}. "
            "checkpoint.every_steps and checkpoint.keep_last decide which ones a run keeps."
        )
    return open_checkpoint(found[int(step)])


def checkpoint_before(run_dir: Path, step: int) -> Checkpoint | None:
    """Return the last checkpoint before a step, or None if the step must be reached from the beginning."""
    paths = [path for path in CheckpointStore(RunDirectory(run_dir).checkpoints).paths() if step_of(path) < step]
    return open_checkpoint(paths[-1]) if paths else None


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def make_fork(
    run_dir: Path, checkpoint: Checkpoint, overrides: Sequence[str], new_dir: Path, *, recalls: bool = True
) -> LoadedConfig:
    """Write a new run directory that goes on from a checkpoint with other settings, and return its config.

    If the folder is this fork already, nothing is written: training its config goes on where it was interrupted.

    Args:
        run_dir: The parent.
        checkpoint: A checkpoint of the parent.
        overrides: `key.path=value` strings that change any settings of the parent's next step. What the state in the
            checkpoint does not fit is refused when the fork is trained, with the words of a resume.
        new_dir: The folder of the fork, new or empty.
        recalls: Whether to use the rollouts that the parent has kept, while weights, settings and plugins are equal.

    Raises:
        CheckpointError: If the settings of the parent's next step are not known any more.
        ConfigError: If a setting is invalid, or two settings contradict each other.
        RunDirectoryError: If the new folder has other content.
    """
    check_settings_known(run_dir, checkpoint.step + 1)
    settings = settings_at(run_dir, checkpoint.step + 1)
    loaded, parent = _load(settings, overrides, new_dir), _load(settings, (), new_dir)
    # The record of a run has all defaults, some of which would be refused if a user had written them.
    known = _problems(parent)
    problems = [problem for problem in _problems(loaded) if problem not in known]
    if problems:
        raise ConfigError(problems, f"the fork of {checkpoint.path}")
    if recalls:
        versions = loaded.host.versions()
        is_equal = all(versions.get(name) == version for name, version in checkpoint.manifest["versions"].items())
        loaded.host.attach(_ParentsRollouts(run_dir, checkpoint.step + 1, is_equal), "lineage/rollouts")
    if not new_dir.exists() or (new_dir.is_dir() and not any(new_dir.iterdir())):
        _copy_checkpoint(run_dir, checkpoint, loaded)
    elif not _is_fork(new_dir, run_dir, checkpoint):
        raise RunDirectoryError(
            f"{new_dir} is not empty, and is no fork of {run_dir} at step {checkpoint.step}. Choose a new --run-dir."
        )
    return loaded


@runtime_checkable
class _Recalls(Protocol):
    """A source that can use kept rollouts: `spurline_rl.prompt_source.PromptSource`."""

    def recall(self, run_dir: Path | None, step: int) -> int: ...


@dataclass
class _ParentsRollouts:
    """Hooks that let a run train on the rollouts of its parent, while the same weights and settings make them.

    Attributes:
        first_step: The step for which the checkpoint proves that the weights are equal. In later steps, the hashes of
            the weights in the record of the parent prove it.
        is_equal: Whether the parent has made the rollouts of the next step as this run would make them. It begins with
            whether both have the same plugins.
    """

    parent: Path
    first_step: int
    is_equal: bool = True
    _run: RunView | None = field(default=None, init=False)
    _to_tell: str = field(default="", init=False)
    _told: str = field(default="", init=False)

    @hookimpl
    def on_run_start(self, run: RunView) -> None:
        self._run = run
        self._begin(run.state.step + 1)

    @hookimpl(wrapper=True)
    def train_step(self, step: int) -> Generator[None, Mapping[str, float], Mapping[str, float]]:
        metrics = yield
        self._begin(step + 1)
        return metrics

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if self._to_tell != self._told:
            self._told = self._to_tell
            tell(f"From step {step} on, {self._told}.")

    def _begin(self, step: int) -> None:
        """Compare the weights and the settings of a step, and let it use the parent's rollouts if they are equal."""
        assert self._run is not None, "hooks are called before on_run_start"
        if not isinstance(source := self._run.source, _Recalls):
            return
        line = read_lineage(self.parent).get(step, {}) if self.is_equal else {}
        self.is_equal = self.is_equal and self._has_equal_settings(step) and self._has_equal_weights(step, line)
        count, why = 0, f"{self.parent} has none from equal weights, settings and plugins"
        if self.is_equal:
            why = f"{self.parent} has kept none of them whole"
            try:
                self._check_files(line)
                count = source.recall(self.parent, step)
            # A damaged file may hold anything.
            except (RunDirectoryError, TypeError, ValueError) as error:
                why = f"those of {self.parent} cannot be used: {error}".rstrip(".")
        if count:
            self._to_tell = (
                f"rollouts and their rewards are those that {self.parent} has kept. If the code that makes them has "
                "changed since, `spurline fork --generate` makes them again"
            )
        else:
            source.recall(None, step)
            self._to_tell = f"rollouts are generated: {why}"

    def _check_files(self, line: Mapping[str, Any]) -> None:
        """Raise RunDirectoryError if a file of rollouts is not what the line of the parent's record says."""
        for name, digest in line.get("files", {}).items():
            path = self.parent / name
            if path.exists() and content_hash(path) != digest:
                raise RunDirectoryError(f"{path} has changed since it was written. See `spurline verify`.")

    def _has_equal_settings(self, step: int) -> bool:
        assert self._run is not None
        try:
            check_settings_known(self.parent, step)
        except CheckpointError:
            return False
        changed = differences(settings_at(self.parent, step), self._run.config)
        return all(change.mark is OnResume.FREE or _AFTER_ROLLOUTS.match(change.key) for change in changed)

    def _has_equal_weights(self, step: int, line: Mapping[str, Any]) -> bool:
        assert self._run is not None
        recorded = line.get("weights_before")
        return step == self.first_step or (recorded is not None and recorded == policy_hash(self._run.backend))


def _problems(loaded: LoadedConfig) -> list[Problem]:
    return [
        Problem(f"{path}.{problem.key}".strip("."), problem.message)
        for path, section in sections_within(loaded.config)
        for problem in section.problems(loaded.config)
    ]


def _is_fork(folder: Path, run_dir: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a folder is the run directory of a fork that was made from this checkpoint."""
    paths = CheckpointStore(RunDirectory(folder).checkpoints).paths()
    history = open_checkpoint(paths[-1]).manifest.get("history", []) if paths else []
    made = {"step": checkpoint.step, "key": "run_dir", "before": str(run_dir.resolve())}
    return any(made.items() <= entry.items() for entry in history)


def _load(settings: Mapping[str, Any], overrides: Sequence[str], run_dir: Path) -> LoadedConfig:
    loaded = load_config({**settings, "run_dir": str(run_dir)}, overrides, recorded=True)
    return loaded.settled(settings)


def _copy_checkpoint(run_dir: Path, checkpoint: Checkpoint, loaded: LoadedConfig) -> None:
    files: dict[str, Any] = checkpoint.manifest["files"]

    def fill(folder: Path) -> Written:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(checkpoint.path / name, folder / name)
            except OSError:
                # The fork is on another disk.
                shutil.copyfile(checkpoint.path / name, folder / name)
        digests = {name: FileDigest(entry["bytes"], entry["xxh3"]) for name, entry in files.items()}
        return Written(digests, {f"{BACKEND}/{name}" for name in checkpoint.unverified(BACKEND)})

    changes = [
        {"step": checkpoint.step, "key": change.key, "before": change.before, "now": change.now}
        for change in differences({**checkpoint.config, "run_dir": str(run_dir.resolve())}, loaded.config)
        if change.mark is not OnResume.FREE or change.key == "run_dir"
    ]
    facts = {name: value for name, value in checkpoint.manifest.items() if name not in _REWRITTEN}
    facts |= {"config": loaded.resolved(), "history": [*facts.get("history", []), *changes]}
    folder = loaded.config.run_dir
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    CheckpointStore(RunDirectory(folder).checkpoints).save(checkpoint.step, fill, facts)


class _ReachedError(SpurlineError):
    """Ends a run after the last step that is wanted. A run that an error ends writes no checkpoint."""


@dataclass(frozen=True)
class _StopAfter:
    step: int

    @hookimpl(trylast=True)
    def on_step_end(self, step: int) -> None:
        if step >= self.step:
            raise _ReachedError(f"step {step} is done")


@contextmanager
def trained_again(
    run_dir: Path,
    checkpoint: Checkpoint | None,
    last_step: int,
    overrides: Sequence[str],
    *hooks: object,
    recalls: bool = False,
) -> Iterator[Path]:
    """Train the steps after a checkpoint once more, up to `last_step`, and return a context with their run directory.

    Args:
        run_dir: The run. The other directory is inside it, and is removed at the end of the context.
        checkpoint: The checkpoint before the steps. If None, training begins at step 1.
        last_step: The last step to train. The settings are those that were in force at this step.
        overrides: `key.path=value` strings that change these settings.
        hooks: Further hook implementations for the run.
        recalls: Whether to use the rollouts that the run has kept, as forks do, instead of generating them again.

    Raises:
        CheckpointError: If a setting was changed between the checkpoint and `last_step`, or does not fit the state.
        UserError: If the run ends before `last_step`.
        KeyboardInterrupt: If a signal stops the training.
    """
    after = 0 if checkpoint is None else checkpoint.step
    for change in read_mapping(RunDirectory(run_dir).summary).get("history", []):
        if after < change["step"] < last_step:
            raise CheckpointError(
                f"{run_dir}: {change['key']} was changed after step {change['step']}, so no single config trains steps "
                f"{after + 1} to {last_step}. Choose a step up to {change['step']}, or a later checkpoint."
            )
    settings = {**settings_at(run_dir, last_step), **_QUIET}
    settings["data"] = {**settings["data"], "eval": []}
    for lock in (run_dir / "again").glob("scratch-*/run/run.lock"):
        # The links of a killed process would keep the files of pruned checkpoints on the disk.
        if not RunDirectory(lock.parent).is_in_use():
            remove(lock.parents[1])
    with scratch_inside(run_dir / "again") as scratch:
        folder = scratch / "run"
        loaded = _load(settings, overrides, folder)
        if checkpoint is not None:
            _copy_checkpoint(run_dir, checkpoint, loaded)
        if recalls:
            first_step = 0 if checkpoint is None else checkpoint.step + 1
            loaded.host.attach(_ParentsRollouts(run_dir, first_step), "lineage/rollouts")
        for number, hook in enumerate((_StopAfter(last_step), *hooks)):
            loaded.host.attach(hook, f"lineage/again-{number}")
        # The terminal shows the steps as progress. Only the answer of a command is its output.
        with suppress(_ReachedError), redirect_stdout(sys.stderr):
            if Run(loaded).train().signal is None:
                raise UserError(f"{run_dir} ends before step {last_step}. Choose an earlier one.")
            raise KeyboardInterrupt(f"Stopped before step {last_step} was trained again.")
        yield folder


def settings_at(run_dir: Path, step: int) -> Mapping[str, Any]:
    """Return the settings with which a step was trained. A resume can change settings only at a checkpoint."""
    manifest = _first_manifest(run_dir, step)
    return read_mapping(RunDirectory(run_dir).config) if manifest is None else manifest["config"]


def check_settings_known(run_dir: Path, step: int) -> None:
    """Raise CheckpointError if the checkpoint at the change of settings after a step was removed."""
    for change in (_first_manifest(run_dir, step) or {}).get("history", []):
        if change["step"] >= step:
            raise CheckpointError(
                f"{run_dir}: {change['key']} was changed after step {change['step']}, and no checkpoint has the "
                f"settings of step {step} any more. Choose a checkpoint of step {change['step']} or later."
            )


def _first_manifest(run_dir: Path, step: int) -> Mapping[str, Any] | None:
    paths = CheckpointStore(RunDirectory(run_dir).checkpoints).paths()
    return next((read_mapping(path / MANIFEST) for path in paths if step_of(path) >= step), None)
