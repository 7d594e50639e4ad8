"""Answer what the page of `spurline view` asks about rollouts, as JSON values.

A request names a run by its number and an attempt by its step and place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from spurline_rl.kept_rollouts import KeptAttempt
from spurline_rl.viewing.attempts import attempt_facts, difference
from spurline_rl.viewing.rollout_index import RolloutFilter, RolloutIndex, SortKey

INDEXING_S = 0.3
"""Seconds that a request waits for steps of the file that are not in the index yet. The page then asks again."""


@dataclass(frozen=True)
class _ListQuery:
    """The query of a list of attempts, without its filter. limit: the most attempts in an answer."""

    run: int
    sort: SortKey = "step"
    ascending: bool = False
    offset: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1, le=500)] = 50


@dataclass(frozen=True)
class _AttemptQuery:
    run: int
    step: int
    place: int


@dataclass(frozen=True)
class _DiffQuery:
    run: int
    step: int
    place: int
    other_run: int
    other_step: int
    other_place: int


def answers(run_dirs: Sequence[Path]) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
    """Return what answers requests about the rollouts of these runs, by the name of the request."""
    indexes = [RolloutIndex(run_dir) for run_dir in run_dirs]
    functions = {"rollouts": _rollouts, "attempt": _attempt, "diff": _diff}
    return {name: partial(function, indexes) for name, function in functions.items()}


def _rollouts(indexes: Sequence[RolloutIndex], query: Mapping[str, str]) -> Any:
    # An empty field of a form asks for all.
    given = {name: value for name, value in query.items() if value != ""}
    asked = _LIST.validate_python({name: given[name] for name in given.keys() & _LIST_NAMES})
    wanted = _FILTER.validate_python({name: given[name] for name in given.keys() & _FILTER_NAMES})
    index = _index(indexes, asked.run)
    state = index.update(INDEXING_S)
    found = index.find(wanted, sort=asked.sort, ascending=asked.ascending, offset=asked.offset, limit=asked.limit)
    given_up = asdict(index.given_up(wanted))
    return {**asdict(state), "matching": found.matching, "rows": found.attempts, "given_up": given_up}


def _attempt(indexes: Sequence[RolloutIndex], query: Mapping[str, str]) -> Any:
    asked = _ATTEMPT.validate_python(dict(query))
    return attempt_facts(_find(indexes, asked.run, asked.step, asked.place))


def _diff(indexes: Sequence[RolloutIndex], query: Mapping[str, str]) -> Any:
    asked = _DIFF.validate_python(dict(query))
    left = _find(indexes, asked.run, asked.step, asked.place)
    right = _find(indexes, asked.other_run, asked.other_step, asked.other_place)
    return difference(left, right)


def _index(indexes: Sequence[RolloutIndex], number: int) -> RolloutIndex:
    if not 0 <= number < len(indexes):
        raise LookupError(f"There is no run {number}.")
    return indexes[number]


def _find(indexes: Sequence[RolloutIndex], run: int, step: int, place: int) -> KeptAttempt:
    found = _index(indexes, run).attempt(step, place)
    if found is None:
        raise LookupError(f"Step {step} has no attempt {place}, or it is not kept any more.")
    return found


_LIST = TypeAdapter(_ListQuery)
_FILTER = TypeAdapter(RolloutFilter)
_ATTEMPT = TypeAdapter(_AttemptQuery)
_DIFF = TypeAdapter(_DiffQuery)
_LIST_NAMES = frozenset(_ListQuery.__dataclass_fields__)
_FILTER_NAMES = frozenset(RolloutFilter.__dataclass_fields__)
