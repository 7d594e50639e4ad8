"""Answer the requests of the page: the files in `static/`, and JSON about the runs that the command line names.

Other packages answer further requests through the entry-point group `spurline.view`. An entry point `module:function`
gets the run directories, and returns a mapping from names below `/api/` to functions. A request names a run by its
number, and cannot name a path.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from spurline.errors import PluginError, SpurlineError
from spurline_insight.view.runs import ViewedRun

ENTRY_POINT_GROUP = "spurline.view"
Answer = Callable[[Mapping[str, str]], Any]
"""A function that takes the query of a request and returns JSON values. It raises LookupError for an unknown name."""


def make_app(runs: Sequence[ViewedRun]) -> Starlette:
    """Return the application for these runs. It answers every request, so `Guard` must check requests first.

    Raises:
        PluginError: If an entry point of another package fails.
    """
    answers = _answers_of_others([run.run_dir for run in runs]) | {
        "runs": partial(_runs, runs),
        "series": partial(_series, runs),
        "evaluations": partial(_evaluations, runs),
        "shares": partial(_shares, runs),
    }
    routes = [Route(f"/api/{name}", _endpoint(answer), methods=["GET"]) for name, answer in answers.items()]
    routes.append(Route("/api/{name}", _endpoint(_not_installed), methods=["GET"]))
    page = StaticFiles(packages=[("spurline_insight.view", "static")], html=True)
    return Starlette(routes=[*routes, Mount("/", page)])


def _answers_of_others(run_dirs: Sequence[Path]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            found |= entry.load()(run_dirs)
        except Exception as error:
            raise PluginError(
                f"{entry.value}, which answers requests of `spurline view`, fails: {type(error).__name__}: {error}."
            ) from error
    return found


def _not_installed(query: Mapping[str, str]) -> Any:
    raise LookupError("No installed package answers this request.")


def _endpoint(answer: Answer) -> Callable[[Request], Response]:
    """Return an endpoint that runs on a thread. So a request that reads a large file does not delay other requests."""

    def endpoint(request: Request) -> Response:
        try:
            return _json(answer(dict(request.query_params)))
        except ValidationError as error:
            wrong = error.errors()[0]
            return _json({"error": f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"}, 400)
        except LookupError as error:
            return _json({"error": str(error)}, 404)
        except SpurlineError as error:
            return _json({"error": str(error)}, 409)

    return endpoint


def _json(content: Any, status: int = 200) -> Response:
    # `json.dumps` escapes half of a surrogate pair, which UTF-8 could not encode.
    return Response(json.dumps(_finite(content), default=str), status, media_type="application/json")


def _finite(value: Any) -> Any:
    """Return the value with text in place of NaN and infinity, which browsers cannot read."""
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
    """Return the answer for one run, or `otherwise` with the error, so that the page still shows the other runs."""
    try:
        return answer()
    except SpurlineError as error:
        return {**otherwise, "error": str(error)}


def _series(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return [
        _unless_unreadable(partial(run.series, query.get("metric", "")), steps=[], values=[], means=[]) for run in runs
    ]


def _evaluations(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return [{"name": run.name, **_unless_unreadable(run.evaluations, tables=[])} for run in runs]


def _shares(runs: Sequence[ViewedRun], query: Mapping[str, str]) -> Any:
    return [{"name": run.name, **_unless_unreadable(run.shares, steps=[])} for run in runs]
