"""What came of a call on one rank, as plain data, and the error that the process which asked for it raises.

An exception is not pickled as it is: its class may want arguments that its text does not give back. `Raised` carries
its classes by name and what of its values can be pickled; `RankFailedError` stands for whatever no error of ours is.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import TracebackType
from typing import Any

from spurline.errors import RankFailedError, SpurlineError


@dataclass(frozen=True)
class Value:
    """The rank answered. value: plain data and numpy arrays."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The rank's code raised an exception.

    name, text: of the exception. traceback: as Python prints it. classes: `module:name` of its class and that one's
    bases, up to SpurlineError; none for other exceptions. arguments, attributes, notes: of the exception, plain data.
    """

    name: str
    text: str
    traceback: str
    classes: tuple[str, ...]
    arguments: tuple[Any, ...]
    attributes: Mapping[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        bases = type(error).__mro__ if isinstance(error, SpurlineError) else ()
        return cls(
            type(error).__name__,
            str(error),
            # Without the frame that called the rank's code.
            "".join(traceback.format_exception(type(error), error, _below(error.__traceback__))).rstrip(),
            tuple(f"{base.__module__}:{base.__qualname__}" for base in bases if issubclass(base, SpurlineError)),
            tuple(map(_plain, error.args)),
            {name: _plain(value) for name, value in vars(error).items() if name != "__notes__"},
            tuple(getattr(error, "__notes__", ())),
        )

    def error(self) -> SpurlineError | None:
        """The SpurlineError again, of the nearest class that exists here; None for another exception."""
        for name in self.classes:
            try:
                found = resolve_name(name)
            except (ImportError, AttributeError, ValueError):
                # Such as a class inside a function.
                continue
            # Not by calling the class, which may want other arguments than those that its base was given.
            error = found.__new__(found, *self.arguments)
            vars(error).update(self.attributes)
            for note in self.notes:
                error.add_note(note)
            return error
        return None


@dataclass(frozen=True)
class Died:
    """The rank's process ended. how: such as `was killed by SIGKILL`. last_words: the end of what it wrote."""

    how: str
    last_words: str = ""


Outcome = Value | Raised | Died


@dataclass(frozen=True)
class Identity:
    """Which process it is: rank of `world`, its machine's name and its process id there."""

    rank: int
    world: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} (process {self.pid} on {self.node})"


class _TracebackOfRank(Exception):  # noqa: N818 - no error of its own: it shows where another one began
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def first_cause(failures: Sequence[tuple[Identity, Raised | Died]]) -> tuple[Identity, Raised | Died]:
    """The failure that explains the others, of several in the order in which they came.

    Where a rank dies the others fail in the exchange with it, and may say so before its death is noticed.
    """

    def importance(failure: tuple[Identity, Raised | Died]) -> int:
        return 0 if isinstance(failure[1], Died) else 1 if failure[1].classes else 2

    return min(failures, key=importance)


def error_of(who: Identity, call: str, failure: Raised | Died) -> SpurlineError:
    """The error to raise for a failure during `call`. The traceback of an error of ours is its cause: what the user is
    told needs none."""
    if isinstance(failure, Died):
        text = f"{at_beginning(who)} {failure.how} during `{call}`."
        if failure.last_words:
            text += f" The end of what it wrote:\n{failure.last_words}"
        return RankFailedError(text, who.rank, who.node, who.pid, call)
    if (error := failure.error()) is not None:
        error.add_note(f"This is from {who}, during `{call}`.")
        # As Python shows it where it shows tracebacks at all.
        error.__cause__ = _TracebackOfRank(failure.traceback)
        return error
    return RankFailedError(
        f"{at_beginning(who)} failed during `{call}`: {failure.name}: {failure.text}\n{failure.traceback}",
        who.rank,
        who.node,
        who.pid,
        call,
        failure.traceback,
    )


def at_beginning(who: Identity) -> str:
    """Return the rank as the beginning of a sentence."""
    text = str(who)
    return text[0].upper() + text[1:]


def _below(frames: TracebackType | None) -> TracebackType | None:
    return frames.tb_next if frames is not None else None


def _plain(value: object) -> object:
    """The value, or its text where it cannot be pickled and read again."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - what was pickled here
    except Exception:  # noqa: BLE001 - any code of the value's class runs here; its text stands for it
        return str(value)
    return value
