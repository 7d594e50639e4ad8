"""The errors a user can meet, and the near-miss suggestions in them.

Every error that a user can cause is a `SpurlineError` whose text says where, what and the nearest fix. The command
line prints that text without a traceback and exits with `exit_code`. A broken internal invariant is an assertion, not
one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class SpurlineError(Exception):
    """Base of every expected failure. `exit_code` is what the command line returns for it."""

    exit_code = 1
    where: str | None = None
    """The plugin and hook that raised it, where that was one; then the text begins with it."""

    def say_where(self, where: str) -> None:
        """Begin the text with this place, unless it has one already."""
        if self.where is None:
            self.where = where
            self.args = (f"{where}: {self}",)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle carry every error of ours, with its notes, between processes of one run."""
        # Not by calling the class, which may want other arguments than its text.
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[SpurlineError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> SpurlineError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class UserError(SpurlineError):
    """Something the user can fix before any training happens."""

    exit_code = 2


class DataError(UserError):
    """A dataset, row or sample that cannot be used; the text names file, row and field."""


class PluginError(UserError):
    """A plugin that is missing, broken, or in conflict with another one."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded or that the chosen backend cannot train exactly."""


class CheckpointError(UserError):
    """A checkpoint that is truncated, foreign, or made by an incompatible configuration."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a file that is missing, or has not the content that was written; an earlier one may be good."""


class RunDirectoryError(UserError):
    """A run directory that is in use, belongs to another run, or cannot be written."""


class RunFailedError(SpurlineError):
    """The run itself failed; what had been saved before is intact."""


class RankFailedError(RunFailedError):
    """A process that trained with others died, raised an error of no known kind, or did not answer in time.

    rank: its number. node: its machine. pid: its process id. call: what it was to do. traceback: of its error; empty
    where there is none.
    """

    def __init__(self, text: str, rank: int, node: str, pid: int, call: str, traceback: str = "") -> None:
        super().__init__(text)
        self.rank, self.node, self.pid, self.call, self.traceback = rank, node, pid, call, traceback


class BucketLostError(RunFailedError):
    """A bucket of weights did not reach an engine, which is as it was before: it may be sent again."""


class HookFailedError(RunFailedError):
    """A hook of a plugin raised what is no SpurlineError; the text names both, and the cause is what it raised."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


class NonFiniteLossError(RunFailedError):
    """The loss or gradient norm became NaN or infinite; names the samples of that step."""


class CheckpointWriteError(RunFailedError):
    """A checkpoint could not be written (full disk, say); earlier checkpoints are intact."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    key: dotted path in the file, such as `collator.max_tokens`; empty for the file as a whole.
    message: what is wrong and the nearest fix, as sentences.
    """

    key: str
    message: str


class ConfigError(UserError):
    """All problems of one configuration at once.

    Each line reads `FILE:LINE: KEY message`; the line number is left out where the format has none.
    """

    def __init__(self, problems: Sequence[Problem], origin: str = "config", lines: dict[str, int] | None = None):
        self.problems = tuple(problems)
        self.origin = origin
        located = lines or {}
        super().__init__("\n".join(self._render(problem, located) for problem in self.problems))

    @classmethod
    def at(cls, key: str, message: str) -> ConfigError:
        """Return the error of one problem, where no file is at hand."""
        return cls([Problem(key, message)])

    def in_file(self, origin: str) -> ConfigError:
        """The same problems with the file's name in front, where the error was made without one."""
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
    """Return the line of `key`, or of the closest enclosing key that is written in the file."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


_NAMES_SHOWN = 100


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """Return the closest other known word, whatever its case; None if none is as close as `cutoff`, from 0 to 1."""
    # Of names that differ in case alone, the first in the alphabet stands for all.
    folded = {name.casefold(): name for name in sorted({*known} - {word}, reverse=True)}
    match = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=cutoff)
    return folded[match[0]] if match else None


SAME_NAME = 0.8
"""Cutoff for names of which similar ones mean different things: `gspo` must not correct `grpo`, nor `bf16` `fp16`."""


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return ` Did you mean 'x'?` for the nearest known word, or an empty string if none is close."""
    match = nearest(word, known, cutoff)
    return f" Did you mean '{match}'?" if match is not None else ""


def listing(names: Iterable[str]) -> str:
    """Return at most 100 names as one sorted, comma-separated line; `(none)` if there are none."""
    found = sorted(names)
    more = f" and {len(found) - _NAMES_SHOWN:,} more" if len(found) > _NAMES_SHOWN else ""
    return ", ".join(found[:_NAMES_SHOWN]) + more or "(none)"
