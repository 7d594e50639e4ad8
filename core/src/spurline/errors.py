"""Define the errors that a user can meet, and the suggestions in their texts.

Every error that a user can cause is a `SpurlineError`. Its text says where the problem is, what is wrong, and how to
fix it. The command line prints the text without a traceback. A broken internal invariant is an assertion instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class SpurlineError(Exception):
    """Base class of all expected failures. The command line prints the text and exits with `exit_code`."""

    exit_code = 1
    where: str | None = None
    """The plugin and hook that raised the error, if it came from a hook. The text then begins with them."""

    def say_where(self, where: str) -> None:
        """Put the plugin and hook `where` in front of the text, unless the text names a plugin and hook already."""
        if self.where is None:
            self.where = where
            self.args = (f"{where}: {self}",)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors of all subclasses picklable, notes included, so that processes of a run can exchange them."""
        # Unpickling must not call the class, since its `__init__` may take other arguments.
        return type(self).__new__, (type(self), *self.args), vars(self)


class UserError(SpurlineError):
    """An error that the user can fix, such as a wrong setting or a missing file."""

    exit_code = 2


class DataError(UserError):
    """A dataset, row or sample that cannot be used. The text names file, row and field."""


class PluginError(UserError):
    """A plugin that is missing, broken, or in conflict with another one."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded or that the chosen backend cannot train exactly."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, of another format, or made by an incompatible configuration."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a missing or changed file. An earlier checkpoint may be intact."""


class OtherDataError(CheckpointError):
    """A checkpoint whose run has drawn from other data."""


class RunDirectoryError(UserError):
    """A run directory that is in use, belongs to another run, or cannot be written."""


class RunFailedError(SpurlineError):
    """The run failed. Checkpoints that were saved before are intact."""


class RankFailedError(RunFailedError):
    """One of several training processes died, raised an unexpected error, or did not answer in time.

    rank: number of the process. node: its machine. pid: its process id. call: the call that failed.
    traceback: traceback of its error, or an empty text if there is none.
    """

    def __init__(self, text: str, rank: int, node: str, pid: int, call: str, traceback: str = "") -> None:
        super().__init__(text)
        self.rank, self.node, self.pid, self.call, self.traceback = rank, node, pid, call, traceback


class BucketLostError(RunFailedError):
    """A bucket of weights did not reach an engine. The engine is unchanged, so the bucket may be sent again."""


class RunDirectoryLostError(RunFailedError):
    """The run directory was removed or moved while the run was going on."""


class HookFailedError(RunFailedError):
    """A plugin's hook raised an error that is not a SpurlineError. The hook's error is the `__cause__` of this one."""


class NonFiniteLossError(RunFailedError):
    """The loss or gradient norm became NaN or infinite. The text names the samples of the step."""


class CheckpointWriteError(RunFailedError):
    """A checkpoint could not be written, for example to a full disk. Earlier checkpoints are intact."""


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    key: dotted path in the file, such as `collator.max_tokens`. Empty if the problem concerns the whole file.
    message: text that follows the key, and says what is wrong and how to fix it.
    """

    key: str
    message: str


class ConfigError(UserError):
    """All problems of one configuration.

    Each problem is a line `FILE:LINE: KEY message` of the text. The line number is left out if it is not known.
    """

    def __init__(self, problems: Sequence[Problem], origin: str = "config", lines: dict[str, int] | None = None):
        self.problems = tuple(problems)
        self.origin = origin
        located = lines or {}
        super().__init__("\n".join(self._render(problem, located) for problem in self.problems))

    @classmethod
    def at(cls, key: str, message: str) -> ConfigError:
        """Return an error with one problem, for callers that do not know the file."""
        return cls([Problem(key, message)])

    def in_file(self, origin: str) -> ConfigError:
        """Return this error with the name of the file, if it has none yet."""
        if self.origin != "config":
            return self
        located = ConfigError(self.problems, origin)
        for note in getattr(self, "__notes__", ()):
            located.add_note(note)
        return located

    def _render(self, problem: Problem, lines: dict[str, int]) -> str:
        line = line_of(problem.key, lines)
        place = f"{self.origin}:{line}" if line else self.origin
        return f"{place}: {problem.key} {problem.message}" if problem.key else f"{place}: {problem.message}"


def line_of(key: str, lines: dict[str, int]) -> int | None:
    """Return the line of `key`, or of the closest enclosing key that is in the file."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


_NAMES_SHOWN = 100


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """Return the other known word most like `word`, ignoring case, or None if the best similarity is below `cutoff`."""
    # If names differ in case alone, the first of them in sorted order is used.
    folded = {name.casefold(): name for name in sorted({*known} - {word}, reverse=True)}
    match = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=cutoff)
    return folded[match[0]] if match else None


SAME_NAME = 0.8
"""Higher cutoff for lists in which different names look alike, such as `gspo` and `grpo`, or `bf16` and `fp16`."""


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return ` Did you mean 'x'?` for the nearest known word, or an empty string if none is close."""
    match = nearest(word, known, cutoff)
    return f" Did you mean '{match}'?" if match is not None else ""


def listing(names: Iterable[str]) -> str:
    """Return at most 100 names as one sorted, comma-separated line, or `(none)` if there are none."""
    found = sorted(names)
    more = f" and {len(found) - _NAMES_SHOWN:,} more" if len(found) > _NAMES_SHOWN else ""
    return ", ".join(found[:_NAMES_SHOWN]) + more or "(none)"
