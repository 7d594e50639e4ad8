"""Save the state of a run in a checkpoint, and decide whether and from where a run continues."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline.config.compare import differences
from spurline.config.loading import LoadedConfig
from spurline.errors import CheckpointError, RunDirectoryError
from spurline.protocols.stateful import Stateful
from spurline.run.build import Components
from spurline.run.checkpoint import Checkpoint, CheckpointStore, open_checkpoint, read_state, write_state
from spurline.run.directory import RunDirectory


@dataclass(frozen=True)
class Resume:
    """Where a run continues.

    checkpoint: None for a new run. notes: what a person should know about it. foreign: it is another run's checkpoint.
    """

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()
    foreign: bool = False

    @property
    def pending(self) -> Mapping[str, float] | None:
        """Metrics of the checkpoint's step when its evaluation failed and is still to come, else None."""
        return None if self.checkpoint is None else self.checkpoint.manifest.get("pending_evaluation")


def find_resume(directory: RunDirectory, loaded: LoadedConfig, choice: str) -> Resume:
    """Resolve `--resume`.

    choice: `auto`, `never` or the path of a checkpoint folder.
    Raises CheckpointError for a damaged or foreign checkpoint and for a config that would change the run, naming every
    changed field; RunDirectoryError when `never` meets a directory that has checkpoints.
    """
    store = CheckpointStore(directory.checkpoints)
    store.clean()
    if choice == "never":
        if store.paths():
            raise RunDirectoryError(
                f"run_dir {directory.path} already has checkpoints up to {store.paths()[-1].name}, and --resume never "
                "starts anew. Choose another run_dir, or move this one away."
            )
        return Resume(None)
    checkpoint = store.latest() if choice == "auto" else _chosen(Path(choice))
    if checkpoint is None:
        return Resume(None)
    foreign = _is_foreign(checkpoint, directory)
    notes = [f"Resuming from {checkpoint.path} (step {checkpoint.step})."]
    notes += _check_config(checkpoint, loaded)
    notes += _check_versions(checkpoint, loaded)
    return Resume(checkpoint, tuple(notes), foreign)


def _chosen(path: Path) -> Checkpoint:
    """The checkpoint at this path; for a run directory its latest."""
    inside = CheckpointStore(path / "checkpoints").latest() if (path / "checkpoints").is_dir() else None
    return inside if inside is not None else open_checkpoint(path)


def _is_foreign(checkpoint: Checkpoint, directory: RunDirectory) -> bool:
    """Whether it is another run's checkpoint, or one that was set aside.

    Raises RunDirectoryError when it is and the directory has a history of its own.
    """
    here = checkpoint.path.parent.resolve() == directory.checkpoints.resolve()
    own = here and checkpoint.path.name.startswith("step-")
    if not own and (directory.metrics.exists() or CheckpointStore(directory.checkpoints).paths()):
        raise RunDirectoryError(
            f"{checkpoint.path} belongs to another run or was set aside, and run_dir {directory.path} has metrics "
            "or checkpoints of its own, which would be mixed with it. Choose a new run_dir."
        )
    return not own


def _check_config(checkpoint: Checkpoint, loaded: LoadedConfig) -> list[str]:
    changed = differences(checkpoint.config, loaded.config)
    refused = [change for change in changed if not change.allowed]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        raise CheckpointError(
            f"{loaded.origin}: the config differs from the one of {checkpoint.path} in settings that change the run:\n"
            f"{lines}\nSet them back to continue this run, or choose another run_dir to start a new one. "
            "`run_dir`, dataset paths, trackers, the report, checkpoint rhythm, and larger `steps` or `epochs` may "
            "change."
        )
    return [f"Changed since the checkpoint: {change}." for change in changed]


def _check_versions(checkpoint: Checkpoint, loaded: LoadedConfig) -> Iterator[str]:
    saved = checkpoint.manifest.get("versions", {})
    for name, version in loaded.host.versions().items():
        if saved.get(name) != version:
            yield f"Version differs: {name} {saved.get(name, '(absent)')} saved the checkpoint, {version} resumes it."


def save_state(
    step: int,
    components: Components,
    loaded: LoadedConfig,
    directory: RunDirectory,
    pending: Mapping[str, float] | None = None,
) -> Path:
    """Write the checkpoint of this step and remove those beyond `checkpoint.keep_last`.

    pending: the step's metrics, when its evaluation is still to come.
    """

    def write(folder: Path) -> None:
        (folder / "backend").mkdir()
        components.backend.save(folder / "backend")
        for name, component in _stateful(components, loaded):
            write_state(folder / "components" / name, component.state_dict())
        components.hook_states.write(folder)

    store = CheckpointStore(directory.checkpoints)
    facts: dict[str, Any] = {"config": loaded.resolved(), "versions": loaded.host.versions()}
    if pending is not None:
        facts["pending_evaluation"] = dict(pending)
    path = store.save(step, write, facts)
    store.prune(loaded.config.checkpoint.keep_last)
    return path


def restore(checkpoint: Checkpoint, components: Components, loaded: LoadedConfig) -> list[str]:
    """Put every component back into the state of the checkpoint. Raises CheckpointError when one does not fit.

    Only then are later checkpoints of the same run set aside, whose steps will be trained again; returns notes on them.
    """
    notes: list[str] = []
    for name, component in _stateful(components, loaded):
        try:
            state = read_state(checkpoint.path / "components" / name)
        except FileNotFoundError:
            if name.startswith("tracker/"):
                notes.append(f"{name} is new in this run and starts without state.")
                continue
            raise CheckpointError(
                f"Checkpoint {checkpoint.path} has no state of {name}: it was made by another setup."
            ) from None
        component.load_state_dict(state)
    components.backend.load(checkpoint.path / "backend")
    components.hook_states.restore(checkpoint)
    moved = CheckpointStore(loaded.config.run_dir / "checkpoints").set_aside_after(checkpoint.step)
    return notes + [f"Set aside, since its steps are trained again: {path}." for path in moved]


def _stateful(components: Components, loaded: LoadedConfig) -> Iterator[tuple[str, Stateful]]:
    """(kind/name, component) for each component that keeps state."""
    config, data = loaded.config, components.data
    named = [
        ("source", config.source.name, data.source),
        ("minibatches", config.minibatches.name, data.minibatches),
        ("loss", config.loss.name, data.loss),
        ("evaluation", "data", data.evaluation),
        *(("tracker", name, tracker) for name, tracker in components.trackers.items()),
    ]
    for kind, name, component in named:
        if isinstance(component, Stateful):
            yield f"{kind}/{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}", component
