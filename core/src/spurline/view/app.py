"""The routes of the page: three files of the package, and JSON of the runs that were given at start.

A request names a run by its number and an attempt by its step and place; no path is made of anything that it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spurline.errors import SpurlineError
from spurline.rl.kept_rollouts import KeptAttempt
from spurline.view.attempts import attempt_facts, difference
from spurline.view.rollout_index import RolloutFilter, SortKey
from spurline.view.runs import ViewedRun
from spurline.view.samples import read_samples

INDEXING_S = 0.3
"""Seconds that a request waits for steps of the file that are not in the index yet. The page then asks again."""
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


@dataclass(frozen=True)
class _ListQuery:
    """What a list of attempts is asked with, beside the filter. limit: at most so many in an answer."""

    run: int
    sort: SortKey = "step"
    ascending: bool = False
    offset: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1, le=500)] = 50


@dataclass(frozen=True)
class _SamplesQuery:
    run: int


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


class _NotThereError(Exception):
    """What a request names is not there."""


def make_app(runs: Sequence[ViewedRun]) -> Starlette:
    """The application over these runs, which anybody may ask: see `guard` for who may."""
    routes = [Route(path, _file(*entry), methods=["GET"]) for path, entry in _FILES.items()]
    answers: Mapping[str, Callable[..., Any]] = {
        "/api/runs": _runs,
        "/api/series": _series,
        "/api/evaluations": _evaluations,
        "/api/rollouts": _rollouts,
        "/api/samples": _samples,
        "/api/attempt": _attempt,
        "/api/diff": _diff,
    }
    routes += [Route(path, _endpoint(partial(answer, runs)), methods=["GET"]) for path, answer in answers.items()]
    return Starlette(routes=routes)


def _file(name: str, media_type: str) -> Callable[[Request], Response]:
    content = files("spurline.view").joinpath("static", name).read_bytes()
    return lambda request: Response(content, media_type=media_type)


def _endpoint(answer: Callable[[Mapping[str, str]], Any]) -> Callable[[Request], Response]:
    """Answers on a thread, so that a long look at one file holds up no other request."""

    def endpoint(request: Request) -> Response:
        try:
            return _json(answer(dict(request.query_params)))
        except ValidationError as error:
            wrong = error.errors()[0]
            return _json({"error": f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"}, 400)
        except _NotThereError as error:
            return _json({"error": str(error)}, 404)
        except SpurlineError as error:
            return _json({"error": str(error)}, 409)

    return endpoint


def _json(content: Any, status: int = 200) -> Response:
    try:
        # In ASCII: a text may hold half a surrogate pair, which UTF-8 has no form for.
        text = json.dumps(content, default=str, allow_nan=False)
    except ValueError:
        # An environment may tell anything in `info`, and what is not finite no browser reads.
        text = json.dumps(_finite(content), default=str)
    return Response(text, status, media_type="application/json")


def _finite(value: Any) -> Any:
    """The value with text in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _runs(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return [
        {"name": run.name, "path": str(run.run_dir), **_unless_unreadable(run.state, status="unreadable", metrics=[])}
        for run in runs
    ]


def _unless_unreadable(answer: Callable[[], Mapping[str, Any]], **otherwise: Any) -> Mapping[str, Any]:
    """The answer of one run, or `otherwise` with the error: other runs are shown all the same."""
    try:
        return answer()
    except SpurlineError as error:
        return {**otherwise, "error": str(error)}


def _series(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return [_unless_unreadable(partial(run.series, query.get("metric", "")), steps=[], values=[]) for run in runs]


def _evaluations(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return [{"name": run.name, **_unless_unreadable(run.evaluations, tables=[])} for run in runs]


def _rollouts(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    # An empty field of a form asks for all.
    given = {name: value for name, value in query.items() if value != ""}
    asked = _LIST.validate_python({name: given[name] for name in given.keys() & _LIST_NAMES})
    wanted = _FILTER.validate_python({name: given[name] for name in given.keys() & _FILTER_NAMES})
    index = _run(runs, asked.run).rollouts
    state = index.update(INDEXING_S)
    found = index.find(wanted, sort=asked.sort, ascending=asked.ascending, offset=asked.offset, limit=asked.limit)
    given_up = asdict(index.given_up(wanted))
    return {**asdict(state), "matching": found.matching, "rows": found.attempts, "given_up": given_up}


def _samples(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return read_samples(_run(runs, _SAMPLES.validate_python(dict(query)).run).run_dir)


def _attempt(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    asked = _ATTEMPT.validate_python(dict(query))
    return attempt_facts(_find(runs, asked.run, asked.step, asked.place))


def _diff(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    asked = _DIFF.validate_python(dict(query))
    left = _find(runs, asked.run, asked.step, asked.place)
    right = _find(runs, asked.other_run, asked.other_step, asked.other_place)
    return difference(left, right)


def _run(runs: Sequence[ViewedRun], number: int) -> ViewedRun:
    if not 0 <= number < len(runs):
        raise _NotThereError(f"There is no run {number}.")
    return runs[number]


def _find(runs: Sequence[ViewedRun], run: int, step: int, place: int) -> KeptAttempt:
    found = _run(runs, run).rollouts.attempt(step, place)
    if found is None:
        raise _NotThereError(f"Step {step} has no attempt {place}, or it is not kept any more.")
    return found


_LIST = TypeAdapter(_ListQuery)
_FILTER = TypeAdapter(RolloutFilter)
_SAMPLES = TypeAdapter(_SamplesQuery)
_ATTEMPT = TypeAdapter(_AttemptQuery)
_DIFF = TypeAdapter(_DiffQuery)
_LIST_NAMES = frozenset(_ListQuery.__dataclass_fields__)
_FILTER_NAMES = frozenset(RolloutFilter.__dataclass_fields__)
