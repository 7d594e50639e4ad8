"""Keep the state of hooks in the checkpoint, under `hooks/PLUGIN/NAME`.

A hook registers an object with `Run.keep_state` before the first step. In a resumed run, this call restores the object.
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
        """Save this state in every later checkpoint. In a resumed run, restore it now or in `restore`.

        `plugin` is the name of the plugin whose hook called `Run.keep_state`, or None if no plugin called it.

        Raises PluginError if training has begun or an argument is invalid, and CheckpointError if restoring fails.
        """
        asked = f"keep_state({name!r})"
        if self._is_closed:
            raise PluginError(f"{asked} was called after training began. Call it in on_run_start.")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"{asked}: use only letters, digits, dots, dashes and underscores, as in 'average'.")
        if isinstance(state, type) or not isinstance(state, Stateful):
            raise PluginError(
                f"{asked} was given {state!r:.60}. Give it an object with state_dict() and load_state_dict(state)."
            )
        key = name if plugin is None else f"{re.sub(r'[^A-Za-z0-9_.-]', '-', plugin)}/{name}"
        if key in self._kept:
            raise PluginError(f"{asked}: another state has this name. Give each state a different name.")
        self._kept[key] = state
        if self._checkpoint is not None:
            self._restore(key)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore all registered states from the checkpoint. A state that is registered later is restored by `keep`."""
        self._checkpoint = checkpoint
        folder = checkpoint.path / FOLDER
        # Files in deeper folders belong to the `StateParts` of these states.
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
        """Refuse further states. Return a note on each state that is only in the checkpoint or only in this run."""
        self._is_closed = True
        left = [
            f"The checkpoint has the state {_described(key)}, which nothing in this run uses. It is not restored."
            for key in sorted(self._saved - self._kept.keys())
        ]
        return [f"The state {_described(key)} is new in this run." for key in self._new] + left

    def states(self) -> Iterator[tuple[str, Mapping[str, object], str]]:
        """Yield (path in a checkpoint, content, description for messages) of each state.

        Raises HookFailedError if a state cannot be saved.
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
