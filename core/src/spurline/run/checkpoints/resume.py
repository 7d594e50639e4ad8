"""Save the state of a run in a checkpoint, and decide whether and from where a run continues.

Which settings may differ from those of the checkpoint is decided in `spurline.run.checkpoints.changes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from spurline.config.loading import LoadedConfig
from spurline.digests import FileDigest
from spurline.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    Problem,
    RunDirectoryError,
    listing,
)
from spurline.protocols.backend import Role, TakesSnapshots
from spurline.protocols.stateful import Stateful
from spurline.run.build import Components, Done
from spurline.run.checkpoints.best import BestSoFar, is_same_data
from spurline.run.checkpoints.changes import PermittedChanges, ResumeRequest
from spurline.run.checkpoints.checkpoint import (
    BACKEND,
    Checkpoint,
    CheckpointStore,
    Prepared,
    Verify,
    Write,
    Written,
    open_checkpoint,
)
from spurline.run.checkpoints.state_files import copied_state, read_state, write_state
from spurline.run.directory import RunDirectory
from spurline.run.evaluations.early_stop import EarlyStop
from spurline.run.evaluations.evaluation import fingerprints


@dataclass(frozen=True)
class Resume:
    """The point at which a run continues.

    checkpoint: None for a new run. notes: what a person should know about it. foreign: it is another run's checkpoint.
    history: changes of settings since the run began, as `{step, key, before, now}`: from the step after `step` on.
    """

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()
    foreign: bool = False
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def pending(self) -> Mapping[str, float] | None:
        """Metrics of the checkpoint's step when its evaluation failed and is still to come, else None."""
        return None if self.checkpoint is None else self.checkpoint.manifest.get("pending_evaluation")

    @property
    def done(self) -> Done:
        """Steps and optimizer steps behind it."""
        if self.checkpoint is None:
            return Done()
        # Checkpoints from before a step could change its share of them have no such part.
        return Done(self.checkpoint.step, self.checkpoint.manifest.get("updates"))


def find_resume(directory: RunDirectory, loaded: LoadedConfig, request: ResumeRequest) -> Resume:
    """Decide where a run continues.

    Raises CheckpointError for a damaged or foreign checkpoint and for a config that would change the run in a way that
    nobody asked for, naming every such setting and how to go on; RunDirectoryError when `never` meets a directory that
    has checkpoints.
    """
    verify = loaded.config.checkpoint.verify
    store = CheckpointStore(directory.checkpoints, verify)
    store.clean()
    if request.choice == "never" and store.paths():
        raise RunDirectoryError(
            f"run_dir {directory.path} already has checkpoints up to {store.paths()[-1].name}, and `--resume never` "
            "begins a new run. Choose another run_dir, or move this one away."
        )
    checkpoint = None
    if request.choice != "never":
        checkpoint = store.latest() if request.choice == "auto" else _chosen(request.choice, store, verify)
    if checkpoint is None:
        if request.allow_change:
            raise CheckpointError(
                f"--allow-change {request.allow_change[0]}: this run begins, so there is no checkpoint whose settings "
                "could differ. Leave it out, or give the checkpoint with --resume."
            )
        return Resume(None)
    foreign = _is_foreign(checkpoint, directory)
    changes = PermittedChanges(checkpoint, loaded, request)
    notes = [f"Resuming from {checkpoint.path} (step {checkpoint.step}).", *changes.notes()]
    notes += _check_versions(checkpoint, loaded)
    return Resume(checkpoint, tuple(notes), foreign, changes.history())


def _chosen(choice: str, store: CheckpointStore, verify: Verify) -> Checkpoint:
    """Return the checkpoint at this path; for a run directory its latest."""
    path = Path(choice)
    if not path.is_dir():
        raise CheckpointError(
            f"--resume {choice}: there is no folder of this name. Leave it out to go on from the latest checkpoint of "
            "run_dir, or give never, or the path of a checkpoint. Checkpoints of this run: "
            f"{listing(map(str, store.paths()))}."
        )
    inside = CheckpointStore(path / "checkpoints", verify).latest() if (path / "checkpoints").is_dir() else None
    return inside if inside is not None else open_checkpoint(path, verify)


def _is_foreign(checkpoint: Checkpoint, directory: RunDirectory) -> bool:
    """Return whether it is another run's checkpoint, or one that was set aside.

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


def _check_versions(checkpoint: Checkpoint, loaded: LoadedConfig) -> Iterator[str]:
    saved = checkpoint.manifest.get("versions", {})
    for name, version in loaded.host.versions().items():
        if saved.get(name) != version:
            yield f"Version differs: {name} {saved.get(name, '(absent)')} saved the checkpoint, {version} resumes it."


@dataclass(frozen=True)
class Course:
    """The part of a manifest that tells how a run has gone.

    updates: optimizer steps by role. history: as of `Resume`. best: the best evaluation so far. early_stop: what it
    has counted. pending: the step's metrics, when its evaluation is still to come.
    """

    updates: Mapping[Role, int]
    history: Sequence[Mapping[str, Any]] = ()
    best: BestSoFar = field(default_factory=lambda: BestSoFar(None))
    early_stop: EarlyStop = field(default_factory=lambda: EarlyStop(None))
    pending: Mapping[str, float] | None = None

    def facts(self) -> dict[str, Any]:
        known = {
            "updates": dict(self.updates),
            "history": list(self.history),
            "best": self.best.facts(),
            "early_stop": self.early_stop.facts(),
            "pending_evaluation": self.pending,
        }
        return {name: value for name, value in known.items() if value}


@dataclass(frozen=True)
class CheckpointContents:
    """The content of one step's checkpoint, and the others that are kept beside it.

    write: fills its folder. facts: for its manifest. best: step of the best evaluation so far. keep_last: checkpoints
    to keep besides that one's.
    """

    step: int
    write: Write
    facts: Mapping[str, Any]
    best: int | None
    keep_last: int

    @classmethod
    def of(cls, step: int, components: Components, loaded: LoadedConfig, course: Course, *, copied: bool) -> Self:
        """copied: take everything as it is now, so that it can be written on another thread while training goes on;
        otherwise it is asked for while it is written."""
        save, states = components.backend.save, _states(components, loaded)
        if copied:
            # The config has refused a backend that cannot.
            assert isinstance(components.backend, TakesSnapshots), type(components.backend)
            save = components.backend.snapshot()
            states = [(name, copied_state(state), owner) for name, state, owner in states]
        verifies = loaded.config.backend.facts.verifies_files

        def write(folder: Path) -> Written:
            (folder / BACKEND).mkdir()
            own = {f"{BACKEND}/{name}": digest for name, digest in save(folder / BACKEND).items()}
            others: dict[str, FileDigest] = {}
            for name, state, owner in states:
                path = folder / name
                written = write_state(path, state, owner)
                others |= {str(path.parent.relative_to(folder) / file): digest for file, digest in written.items()}
            return Written(own | others, own.keys() if verifies else ())

        facts: dict[str, Any] = {"config": loaded.resolved(), "versions": loaded.host.versions(), **course.facts()}
        facts["held_out"] = fingerprints(components.data.evaluations)
        return cls(step, write, facts, course.best.step, loaded.config.checkpoint.keep_last)

    def publish(self, store: CheckpointStore, prepared: Prepared) -> Path:
        """Make what was written the latest checkpoint, and remove those that are not to be kept; returns its folder."""
        path = store.publish(prepared, self.best)
        store.prune(self.keep_last, self.best)
        return path


def _states(components: Components, loaded: LoadedConfig) -> Iterable[tuple[str, Mapping[str, object], str | None]]:
    """(path in a checkpoint, state, whose it is) of components and hooks, each asked for when it is its turn."""
    for name, component in _stateful(components, loaded):
        yield f"components/{name}", component.state_dict(), None
    yield from components.hook_states.states()


def save_state(
    step: int, components: Components, loaded: LoadedConfig, directory: RunDirectory, course: Course
) -> Path:
    """Write the checkpoint of this step; remove those beyond `checkpoint.keep_last` but for the best."""
    contents = CheckpointContents.of(step, components, loaded, course, copied=False)
    store = CheckpointStore(directory.checkpoints)
    return contents.publish(store, store.prepare(step, contents.write, contents.facts))


def _refuse_shorter(checkpoint: Checkpoint, components: Components, loaded: LoadedConfig) -> None:
    """A run that would end before its checkpoint trains nothing, and its records would say it did."""
    steps = components.data.source.total_steps
    if checkpoint.step > steps:
        key = "steps" if loaded.config.steps is not None else "epochs"
        text = (
            f"makes {steps:,} steps, but the checkpoint is at step {checkpoint.step:,}. Give at least that many, or "
            "choose an earlier checkpoint with --resume PATH; the steps after it are then trained again."
        )
        raise ConfigError([Problem(key, text)], loaded.origin)


def restore(
    checkpoint: Checkpoint, components: Components, loaded: LoadedConfig, best: BestSoFar, early_stop: EarlyStop
) -> list[str]:
    """Put every component back into the state of the checkpoint. Raises CheckpointError when one does not fit.

    Only then are later checkpoints of the same run set aside, whose steps will be trained again; returns notes on them.
    """
    _refuse_shorter(checkpoint, components, loaded)
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
        try:
            component.load_state_dict(state)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise CheckpointError(
                f"Checkpoint {checkpoint.path}: the state of {name} cannot be restored ({type(error).__name__}: "
                f"{error}). Resume with the version that saved it, or start again with another run_dir."
            ) from error
    _load_backend(checkpoint, components, loaded)
    components.hook_states.restore(checkpoint)
    store = CheckpointStore(loaded.config.run_dir / "checkpoints")
    moved = store.set_aside_after(checkpoint.step)
    notes += [f"Set aside, since its steps are trained again: {path}." for path in moved]
    before, now = checkpoint.manifest.get("held_out") or {}, fingerprints(components.data.evaluations)
    notes += _compare_held_out(before, now)
    kept = {int(path.name.removeprefix("step-")) for path in store.paths()}
    same_data = is_same_data(loaded.config.checkpoint.keep_best, before, now)
    notes += best.restore(checkpoint.manifest.get("best"), kept, same_data=same_data)
    same_data = is_same_data(loaded.config.stop_when, before, now)
    notes += early_stop.restore(checkpoint.manifest.get("early_stop"), same_data=same_data)
    store.point_to_best(best.step)
    return notes


def _load_backend(checkpoint: Checkpoint, components: Components, loaded: LoadedConfig) -> None:
    try:
        components.backend.load(checkpoint.path / BACKEND, checkpoint.unverified(BACKEND))
    except DamagedCheckpointError as error:
        store = CheckpointStore(checkpoint.path.parent, loaded.config.checkpoint.verify)
        raise CheckpointError(f"{error} {store.offer_before(checkpoint.path)}") from error


def _compare_held_out(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Held-out data may change, as nothing is trained on it; scores before and after do not compare then."""
    return [
        f"The held-out data of {label} is not that of the checkpoint: scores before and after do not compare."
        for label in now
        if label in before and before[label] != now[label]
    ]


def _stateful(components: Components, loaded: LoadedConfig) -> Iterator[tuple[str, Stateful]]:
    """(kind/name, component) for each component that keeps state."""
    config, data = loaded.config, components.data
    named = [
        ("source", config.source.name, data.source),
        ("minibatches", config.minibatches.name, data.minibatches),
        ("loss", config.loss.name, data.loss),
        *(("tracker", name, tracker) for name, tracker in components.trackers.items()),
    ]
    for kind, name, component in named:
        if isinstance(component, Stateful):
            yield f"{kind}/{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}", component
