"""State that plugins keep from their hooks, in the checkpoint under `hooks/PLUGIN/NAME`.

A hook registers an object with `Run.keep_state` before the first step; what a resumed checkpoint holds for it is put
into it right there. Components with state are not here: the run knows them (see `spurline.run.checkpoints.resume`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from spurline.errors import CheckpointError, HookFailedError, PluginError, SpurlineError
from spurline.protocols.stateful import Stateful
from spurline.run.checkpoints.checkpoint import Checkpoint
from spurline.run.checkpoints.state_files import read_state

FOLDER = "hooks"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class HookStates:
    """The states of one run's hooks."""

    def __init__(self) -> None:
        self._kept: dict[str, Stateful] = {}
        self._checkpoint: Checkpoint | None = None
        self._saved: set[str] = set()
        self._new: list[str] = []
        self._is_closed = False

    def keep(self, plugin: str | None, name: str, state: Stateful) -> None:
        """Save this state from now on, and restore it if the run was resumed.

        plugin: who asks; None for a program that owns the run.
        Raises PluginError for what cannot be kept, CheckpointError when what was saved does not fit.
        """
        asked = f"keep_state({name!r})"
        if self._is_closed:
            raise PluginError(
                f"{asked} came after training began, so that a resume could not restore it in time. Call it in "
                "on_run_start, which runs before the first step of new and of resumed runs."
            )
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"{asked}: a name is letters, digits, dots, dashes and underscores, such as 'average'.")
        if isinstance(state, type) or not isinstance(state, Stateful):
            raise PluginError(
                f"{asked} was given {state!r:.60}, which cannot be saved. Give it an object with the methods "
                "state_dict() and load_state_dict(state), as spurline.protocols.stateful.Stateful describes them."
            )
        # A plugin's name as a folder can be called.
        key = name if plugin is None else f"{re.sub(r'[^A-Za-z0-9_.-]', '-', plugin)}/{name}"
        if key in self._kept:
            raise PluginError(f"{asked}: this name is taken already. Give each state a name of its own.")
        self._kept[key] = state
        if self._checkpoint is not None:
            self._restore(key)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put into the states kept so far, and into those still to come, what the checkpoint has for them."""
        self._checkpoint = checkpoint
        folder = checkpoint.path / FOLDER
        # Deeper ones are parts of states.
        files = [*folder.glob("*.json"), *folder.glob("*/*.json")]
        self._saved = {str(path.relative_to(folder))[: -len(".json")] for path in files}
        for key in self._kept:
            self._restore(key)

    def _restore(self, key: str) -> None:
        assert self._checkpoint is not None
        if key not in self._saved:
            self._new.append(key)
            return
        try:
            self._kept[key].load_state_dict(read_state(self._checkpoint.path / FOLDER / key))
        except SpurlineError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._checkpoint.path}: the state {_described(key)} cannot be restored: "
                f"{type(error).__name__}: {error}. Resume with the version of the plugin that saved it, or start again "
                "with another run_dir."
            ) from error

    def close(self) -> list[str]:
        """Take no more states; returns what a person should know of a resume."""
        self._is_closed = True
        left = [
            f"The state {_described(key)} in the checkpoint is left out: nothing in this run keeps it any more."
            for key in sorted(self._saved - self._kept.keys())
        ]
        return [f"The state {_described(key)} is new in this run and starts afresh." for key in self._new] + left

    def states(self) -> Iterator[tuple[str, Mapping[str, object], str]]:
        """(path in a checkpoint, state, whose it is) of each, asked for one after another.

        Raises HookFailedError naming what cannot be saved.
        """
        for key, state in self._kept.items():
            try:
                content = state.state_dict()
            except SpurlineError:
                raise
            except Exception as error:
                raise HookFailedError(
                    f"The state {_described(key)} cannot be saved: {type(error).__name__}: {error}"
                ) from error
            yield f"{FOLDER}/{key}", content, _described(key)


def _described(key: str) -> str:
    plugin, _, name = key.rpartition("/")
    return f"'{name}' of plugin '{plugin}'" if plugin else f"'{name}'"
