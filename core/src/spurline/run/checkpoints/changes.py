"""Decide which settings may differ from those of the checkpoint that a run continues.

In: the checkpoint's settings, this config, and what a person permits. Out: notes for people, and the history of the
run, which every later checkpoint carries on; or one error that names every change that is not permitted, with the
command that would permit it where one can. The marks of the fields (`OnResume`) decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spurline.config.compare import Difference, differences, setting_names
from spurline.config.loading import LoadedConfig
from spurline.config.section import OnResume
from spurline.errors import CheckpointError, listing, suggestion
from spurline.run.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class ResumeRequest:
    """A person's wishes for a resume.

    choice: `auto`, `never` or the path of a checkpoint folder. allow_change: settings or sections that may differ from
    the checkpoint's although they change how the run trains.
    """

    choice: str = "auto"
    allow_change: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The same as words of a command line."""
        resume = [] if self.choice == "auto" else ["--resume", self.choice]
        return [*resume, *(word for name in self.allow_change for word in ("--allow-change", name))]


_REFUSAL = {
    OnResume.REFUSED: "These cannot change: a run keeps its data, aim, model, and the backend of its checkpoint",
    OnResume.BY_NAME: "These change how the run trains, and need permission",
}
_REMARK = {
    OnResume.FREE: "",
    OnResume.TO_ROUNDING: " (equal to rounding, not bit for bit; with dropout also other random numbers)",
    OnResume.BY_NAME: " (allowed by name)",
}


class PermittedChanges:
    """The settings that differ from those of a checkpoint, all of them allowed. Raises CheckpointError otherwise."""

    def __init__(self, checkpoint: Checkpoint, loaded: LoadedConfig, request: ResumeRequest) -> None:
        self._before: list[Mapping[str, Any]] = checkpoint.manifest.get("history", [])
        self._step = checkpoint.step
        self._changed = differences(checkpoint.config, loaded.config)
        for name in request.allow_change:
            self._check_name(name, loaded)
        refused = [change for change in self._changed if change.mark is OnResume.REFUSED]
        asked = [change for change in self._changed if change.mark is OnResume.BY_NAME]
        ungranted = [change for change in asked if not any(change.is_named(name) for name in request.allow_change)]
        if refused or ungranted:
            raise CheckpointError(_refusal(checkpoint, loaded, request, refused, ungranted))

    def notes(self) -> list[str]:
        earlier = [f"Changed at step {entry['step']:,}: {_recorded(entry)}." for entry in self._before]
        return [*earlier, *(f"Changed since the checkpoint: {item}{_REMARK[item.mark]}." for item in self._changed)]

    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Return those of earlier resumes and these, but for what cannot show in the numbers."""
        new = [
            {"step": self._step, "key": change.key, "before": change.before, "now": change.now}
            for change in self._changed
            if change.mark is not OnResume.FREE
        ]
        return (*self._before, *new)

    def _check_name(self, name: str, loaded: LoadedConfig) -> None:
        if any(change.is_named(name) for change in self._changed):
            return
        # The same command may run again, from a checkpoint that has the change.
        if any(_recorded(entry).is_named(name) for entry in self._before):
            return
        known, changed = setting_names(loaded.config), [change.key for change in self._changed]
        if name not in known:
            raise CheckpointError(
                f"--allow-change {name}: there is no setting of this name.{suggestion(name, [*known, *changed])} "
                f"Changed since the checkpoint: {listing(changed)}."
            )
        raise CheckpointError(
            f"--allow-change {name}: it is what it was in the checkpoint.{suggestion(name, changed)} Leave this out. "
            f"Changed since the checkpoint: {listing(changed)}."
        )


def _recorded(entry: Mapping[str, Any]) -> Difference:
    """Return an entry of the history; it was permitted then."""
    return Difference(entry["key"], entry["before"], entry["now"], OnResume.FREE)


def _refusal(
    checkpoint: Checkpoint,
    loaded: LoadedConfig,
    request: ResumeRequest,
    refused: Sequence[Difference],
    ungranted: Sequence[Difference],
) -> str:
    lines = [f"{loaded.origin}: the config differs from that of {checkpoint.path}."]
    if any(isinstance(change.before, Mapping) for change in refused):
        # Plugins come and go with the components that they bring.
        with_them = [change for change in ungranted if change.key == "plugins"]
        ungranted = [change for change in ungranted if change not in with_them]
        refused = [*refused, *with_them]
    for mark, changes in ((OnResume.REFUSED, refused), (OnResume.BY_NAME, ungranted)):
        if changes:
            lines += [f"{_REFUSAL[mark]}:", *(f"  {change}" for change in changes)]
    if refused:
        lines.append(
            "Set these back to continue this run; or choose another run_dir, and start a new run: from the model as it "
            "was, or from the weights of this one (`spurline export`, then model.path), with a new optimizer."
        )
    if ungranted:
        names = dict.fromkeys([*request.allow_change, *(change.key for change in ungranted)])
        options = ResumeRequest(request.choice, tuple(names)).options()
        # The whole command would give again what is refused.
        command = " ".join(options) if refused else loaded.train_command(*options)
        how = command if loaded.file is not None else f"Run(..., allow_change={[*names]})"
        lines.append(f"{'Then allow' if refused else 'Set them back, or allow'} the change{_s(ungranted)} with: {how}")
    return "\n".join(lines)


def _s(items: Sequence[object]) -> str:
    return "" if len(items) == 1 else "s"
