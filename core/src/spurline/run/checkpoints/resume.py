"""Decide whether a run continues from a checkpoint, and restore its components from it.

Each setting's `OnResume` mark decides whether its value may differ from the value in the checkpoint. One error lists
all changes that are not permitted. If the user can permit them, the error also shows the command for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spurline.config.compare import Difference, differences
from spurline.config.loading import LoadedConfig
from spurline.config.section import OnResume
from spurline.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    Problem,
    RunDirectoryError,
    listing,
    suggestion,
)
from spurline.protocols.stateful import Stateful
from spurline.run.build import Components, Done
from spurline.run.checkpoints.checkpoint import BACKEND, Checkpoint, CheckpointStore
from spurline.run.checkpoints.state_files import read_state
from spurline.run.directory import RunDirectory
from spurline.run.evaluations.evaluation import fingerprints
from spurline.run.evaluations.watched import BestSoFar, EarlyStop, is_same_data

_REMARK = {
    OnResume.FREE: "",
    OnResume.TO_ROUNDING: " (results differ by rounding errors; with dropout, random numbers differ too)",
    OnResume.BY_NAME: " (permitted by --allow-change)",
}


@dataclass(frozen=True)
class ResumeRequest:
    """The options of a resume.

    Attributes:
        choice: `auto` (the latest checkpoint if there is one), `never`, or a choice of `CheckpointStore.chosen`.
        allow_change: Settings or sections that may differ from the checkpoint although they affect training.
    """

    choice: str = "auto"
    allow_change: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Return these options as words of a command line."""
        resume = [] if self.choice == "auto" else ["--resume", self.choice]
        return [*resume, *(word for name in self.allow_change for word in ("--allow-change", name))]


@dataclass(frozen=True)
class Resume:
    """The point at which a run continues.

    Attributes:
        loaded: The config of the run, with a value for each setting that is `auto` and depends on the machine.
        checkpoint: The checkpoint to restore, or None for a new run.
        notes: Sentences about the resume for the user.
        foreign: Whether the checkpoint belongs to another run or was moved aside.
        history: Changes of settings since the run began, as `{step, key, before, now}`. `step` is the last step before
            the change.
    """

    loaded: LoadedConfig
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    foreign: bool = False
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def pending(self) -> Mapping[str, float] | None:
        """Return the metrics of the checkpoint's step if its evaluation failed and must be repeated, else None."""
        return None if self.checkpoint is None else self.checkpoint.manifest.get("pending_evaluation")

    @property
    def done(self) -> Done:
        """Return the numbers of steps and of optimizer steps that are trained before this point."""
        return Done() if self.checkpoint is None else Done(self.checkpoint.step, self.checkpoint.manifest["updates"])


def find_resume(directory: RunDirectory, loaded: LoadedConfig, request: ResumeRequest) -> Resume:
    """Decide where a run continues.

    Raises:
        CheckpointError: For a damaged or foreign checkpoint, and for changes of settings that are not permitted.
        RunDirectoryError: If the choice is `never` and the directory has checkpoints.
    """
    store = CheckpointStore(directory.checkpoints)
    store.clean()
    if request.choice == "never" and store.paths():
        raise RunDirectoryError(
            f"run_dir {directory.path} already has checkpoints up to {store.paths()[-1].name}, but `--resume never` "
            "begins a new run. Choose another run_dir, or move this one away."
        )
    checkpoint = None
    if request.choice != "never":
        checkpoint = store.latest() if request.choice == "auto" else store.chosen(request.choice, "--resume")
    if checkpoint is None:
        if request.allow_change:
            raise CheckpointError(
                f"--allow-change {request.allow_change[0]}: this is a new run, so there is no checkpoint to compare "
                "with. Leave the option out, or give a checkpoint with --resume."
            )
        return Resume(loaded.settled({}))
    foreign = _is_foreign(checkpoint, directory)
    earlier = checkpoint.manifest.get("history", [])
    kept = loaded.settled(checkpoint.config)
    changes = permitted_changes(checkpoint, kept, request)
    saved = checkpoint.manifest.get("versions", {})
    notes = [
        f"Resuming from {checkpoint.path} (step {checkpoint.step}).",
        *(f"Changed at step {entry['step']:,}: {_recorded(entry)}." for entry in earlier),
        *(f"Changed since the checkpoint: {change}{_REMARK[change.mark]}." for change in changes),
        *(
            f"{choice.key} stays {choice.now}, as in the checkpoint. On this machine, auto would be {choice.before}."
            for choice in differences(loaded.settled({}).resolved(), kept.config)
        ),
        *(
            f"Version differs: the checkpoint has {name} {saved.get(name, '(absent)')}, this run has {version}."
            for name, version in loaded.host.versions().items()
            if saved.get(name) != version
        ),
    ]
    # The history lists only changes that can affect the metrics.
    new = [
        {"step": checkpoint.step, "key": change.key, "before": change.before, "now": change.now}
        for change in changes
        if change.mark is not OnResume.FREE
    ]
    return Resume(kept, checkpoint, tuple(notes), foreign, (*earlier, *new))


def permitted_changes(checkpoint: Checkpoint, loaded: LoadedConfig, request: ResumeRequest) -> list[Difference]:
    """Return the settings that differ from the checkpoint. Raises CheckpointError if a difference is not permitted."""
    changed = differences(checkpoint.config, loaded.config)
    # If the same command runs a second time, the checkpoint's history may already list the change.
    known = [*changed, *map(_recorded, checkpoint.manifest.get("history", []))]
    for name in request.allow_change:
        if not any(change.is_named(name) for change in known):
            keys = [change.key for change in changed]
            raise CheckpointError(
                f"--allow-change {name}: no setting of this name has changed.{suggestion(name, keys)} Changed since "
                f"the checkpoint: {listing(keys)}."
            )
    refused = [change for change in changed if change.mark is OnResume.REFUSED]
    asked = [change for change in changed if change.mark is OnResume.BY_NAME]
    ungranted = [change for change in asked if not any(change.is_named(name) for name in request.allow_change)]
    if refused or ungranted:
        lines = [f"{loaded.origin}: the config differs from the config of {checkpoint.path}."]
        if refused:
            lines += [
                "A run keeps its data, its objective, its model and its backend, so these cannot change:",
                *(f"  {change}" for change in refused),
                "Set these back to continue this run. Or choose another run_dir to start a new run. If the new run "
                "must begin with the weights of this run, run `spurline export` and set model.path to the export.",
            ]
        if ungranted:
            names = list(dict.fromkeys([*request.allow_change, *(change.key for change in ungranted)]))
            command = loaded.train_command(*ResumeRequest(request.choice, tuple(names)).options())
            lines += [
                "These changes affect how the run trains, and need permission:",
                *(f"  {change}" for change in ungranted),
                f"Set them back, or allow them with: {command or f'Run(..., allow_change={names})'}",
            ]
        raise CheckpointError("\n".join(lines))
    return changed


def _recorded(entry: Mapping[str, Any]) -> Difference:
    return Difference(entry["key"], entry["before"], entry["now"], OnResume.FREE)


def _is_foreign(checkpoint: Checkpoint, directory: RunDirectory) -> bool:
    """Return whether a checkpoint belongs to another run or was moved aside when an earlier run resumed.

    Raises RunDirectoryError if this is so and the run directory already has metrics or checkpoints.
    """
    here = checkpoint.path.parent.resolve() == directory.checkpoints.resolve()
    own = here and checkpoint.path.name.startswith("step-")
    if not own and (directory.metrics.exists() or CheckpointStore(directory.checkpoints).paths()):
        raise RunDirectoryError(
            f"{checkpoint.path} belongs to another run or was set aside, but run_dir {directory.path} already has "
            "metrics or checkpoints. Choose a new run_dir, so that the two runs are not mixed."
        )
    return not own


def restore(
    checkpoint: Checkpoint, components: Components, loaded: LoadedConfig, best: BestSoFar, early_stop: EarlyStop
) -> list[str]:
    """Restore every component from the checkpoint, and return notes for the user.

    Then move later checkpoints of the same run aside, since their steps will be trained again.

    Raises:
        CheckpointError: If the state of a component is missing or cannot be restored.
        ConfigError: If the run would end before the checkpoint.
    """
    _refuse_shorter(checkpoint, components, loaded)
    notes: list[str] = []
    for name, component in stateful_components(components, loaded):
        try:
            state = read_state(checkpoint.path / "components" / name)
        except FileNotFoundError:
            if name.startswith("tracker/"):
                notes.append(f"{name} is new in this run and starts without state.")
                continue
            raise CheckpointError(
                f"Checkpoint {checkpoint.path} has no state of {name}. It was saved with another configuration."
            ) from None
        try:
            component.load_state_dict(state)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise CheckpointError(
                f"Checkpoint {checkpoint.path}: the state of {name} cannot be restored ({type(error).__name__}: "
                f"{error}). Resume with the version that saved it, or start again with another run_dir."
            ) from error
    store = CheckpointStore(loaded.config.run_dir / "checkpoints")
    try:
        components.backend.load(checkpoint.path / BACKEND, checkpoint.unverified(BACKEND))
    except DamagedCheckpointError as error:
        raise CheckpointError(
            f"{error} {CheckpointStore(checkpoint.path.parent).offer_before(checkpoint.path)}"
        ) from error
    components.hook_states.restore(checkpoint)
    moved = store.set_aside_after(checkpoint.step)
    notes += [f"A later checkpoint was set aside, since its steps are trained again: {path}." for path in moved]
    before, now = checkpoint.manifest.get("held_out") or {}, fingerprints(components.data.evaluations)
    notes += [
        f"The held-out data of {label} has changed since the checkpoint, so its earlier scores are not comparable."
        for label in now
        if label in before and before[label] != now[label]
    ]
    kept = {int(path.name.removeprefix("step-")) for path in store.paths()}
    same_data = is_same_data(loaded.config.checkpoint.keep_best, before, now)
    notes += best.restore(checkpoint.manifest.get("best"), kept, same_data=same_data)
    same_data = is_same_data(loaded.config.stop_when, before, now)
    notes += early_stop.restore(checkpoint.manifest.get("early_stop"), same_data=same_data)
    store.point_to_best(best.step)
    return notes


def _refuse_shorter(checkpoint: Checkpoint, components: Components, loaded: LoadedConfig) -> None:
    """Raise ConfigError if the checkpoint is beyond the last step of the run."""
    steps = components.data.source.total_steps
    if checkpoint.step > steps:
        key = "steps" if loaded.config.steps is not None else "epochs"
        text = (
            f"gives {steps:,} steps, but the checkpoint is at step {checkpoint.step:,}. Raise {key}, or choose an "
            "earlier checkpoint with --resume PATH."
        )
        raise ConfigError([Problem(key, text)], loaded.origin)


def stateful_components(components: Components, loaded: LoadedConfig) -> Iterator[tuple[str, Stateful]]:
    """Yield (kind/name, component) for each component that keeps state."""
    config, data = loaded.config, components.data
    named: Sequence[tuple[str, str, object]] = [
        ("source", config.source.name, data.source),
        ("minibatches", config.minibatches.name, data.minibatches),
        ("loss", config.loss.name, data.loss),
        *(("tracker", name, tracker) for name, tracker in components.trackers.items()),
    ]
    for kind, name, component in named:
        if isinstance(component, Stateful):
            yield f"{kind}/{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}", component
