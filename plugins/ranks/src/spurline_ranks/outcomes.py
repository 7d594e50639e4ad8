"""The outcome of a call on one rank, and the error that the controller raises for it.

If a rank raises a SpurlineError, the controller raises the same error. Any other exception becomes a `RankFailedError`
with the traceback as text.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spurline.errors import RankFailedError, SpurlineError


@dataclass(frozen=True)
class Value:
    """The rank answered with plain data and numpy arrays."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The rank's code raised an exception. `error` is the exception itself if it is a SpurlineError."""

    text: str
    traceback: str
    error: SpurlineError | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        # Leave out the frame of `outcome_of`.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        shown = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        return cls(f"{type(error).__name__}: {error}", shown, _ours(error))


@dataclass(frozen=True)
class Died:
    """The rank's process ended. `how` is a predicate, such as `was killed by SIGKILL`."""

    how: str
    work: str = ""
    """The rank's last work, such as `micro-batch 5 of 8, for 3 s`."""
    last_words: str = ""
    """The end of the process's log."""


Outcome = Value | Raised | Died


def outcome_of(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Call a function, and return the packed `Value` or `Raised`."""
    try:
        return packed(Value(function(*arguments)))
    except BaseException as error:  # noqa: BLE001 - raised where the call was made
        return packed(Raised.of(error))


def packed(message: object) -> bytes:
    """Return data for another process of this run."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(wire: bytes) -> Any:
    """Read the data of another process of this run."""
    return pickle.loads(wire)  # noqa: S301


def read_outcome(said: bytes | Died) -> Outcome:
    """Return the outcome of a rank. If it cannot be read, the outcome is the error of reading it."""
    try:
        return said if isinstance(said, Died) else unpacked(said)
    except Exception as error:  # noqa: BLE001 - raised where the call was made
        return Raised.of(error)


@dataclass(frozen=True)
class Identity:
    """A rank with its machine's name and its process id."""

    rank: int
    world: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} (process {self.pid} on {self.node})"

    def failed(self, text: str, call: str, traceback: str = "") -> RankFailedError:
        """Return a RankFailedError that names this rank."""
        return RankFailedError(text, self.rank, self.node, self.pid, call, traceback)


class _TracebackOfRank(Exception):  # noqa: N818 - the cause of another error
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def first_cause(failures: Sequence[tuple[Identity, Raised | Died]]) -> tuple[Identity, Raised | Died]:
    """Return the failure that probably caused the others: a death, else a SpurlineError, else the first failure.

    When a rank dies, exchanges with it fail in other ranks, perhaps before its death is noticed.
    """

    def importance(failure: tuple[Identity, Raised | Died]) -> int:
        if isinstance(failure[1], Died):
            return 0
        return 2 if failure[1].error is None else 1

    return min(failures, key=importance)


def error_of(who: Identity, call: str, failure: Raised | Died) -> SpurlineError:
    """Return the error to raise for a failure during `call`."""
    name = f"R{str(who)[1:]}"
    if isinstance(failure, Died):
        text = f"{name} {failure.how} during `{call}`."
        if failure.work:
            text += f" Its last work: {failure.work}."
        if failure.last_words:
            text += f" The end of what it wrote:\n{failure.last_words}"
        return who.failed(text, call)
    if failure.error is not None:
        failure.error.add_note(f"This is from {who}, during `{call}`.")
        # Python shows the cause in its tracebacks. The message to the user does not contain the cause.
        failure.error.__cause__ = _TracebackOfRank(failure.traceback)
        return failure.error
    text = f"{name} failed during `{call}`: {failure.text}\n{failure.traceback}"
    return who.failed(text, call, failure.traceback)


def _ours(error: BaseException) -> SpurlineError | None:
    """Return the error if it is a SpurlineError that another process can unpickle, else None."""
    if not isinstance(error, SpurlineError):
        return None
    try:
        unpacked(packed(error))
    except Exception:  # noqa: BLE001 - unpickling runs code of the error's class
        return None
    return error
