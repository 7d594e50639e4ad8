"""What must be alike on all machines of a cluster, and which machine is named when it is not.

The checks ask real questions of this machine; what another machine would answer otherwise is changed in the answer, or
by what its process sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from backend_batches import run_config

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_ranks import cluster_checks
from spurline_ranks.cluster_checks import check_machines, software
from spurline_ranks.group import ClusterNeed


def ask_two(second: Callable[..., Any]) -> Callable[..., Mapping[str, Any]]:
    """Machines `a`, which is this one, and `b`, which answers `second(function, *arguments)`."""

    def ask(function: str, *arguments: Any) -> Mapping[str, Any]:
        return {"a": resolve_name(function)(*arguments), "b": second(resolve_name(function), *arguments)}

    return ask


def answering(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A machine that answers as this one, but for one function."""
    return lambda function, *arguments: (
        change(function(*arguments)) if function.__name__ == name else function(*arguments)
    )


@pytest.fixture
def run(spurline_tiny_model: Path, tmp_path: Path) -> RunConfig:
    return run_config(spurline_tiny_model, run_dir=tmp_path / "run")


def test_machines_that_are_alike_pass_and_nothing_is_left_in_the_run_directory(run: RunConfig) -> None:
    asked: list[str] = []

    def alike(function: Any, *arguments: Any) -> Any:
        asked.append(function.__name__)
        return function(*arguments)

    check_machines(run, ask_two(alike))
    assert asked == ["software", "answer_token"]
    assert list(Path(run.run_dir).iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.9.0"}, r"torch is \S+ on this machine, a and 2\.9\.0 on b"),
        ({"plugin models": "not installed"}, r"plugin models is .* and not installed on b"),
    ],
)
def test_a_machine_that_differs_is_named_with_how(run: RunConfig, change: Mapping[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_machines(run, ask_two(answering("software", lambda found: found | change)))


def test_what_engines_compute_with_counts_where_there_are_engines(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = answering("software", lambda found: {**found, "yaml": "PyYAML 5"} if "yaml" in found else found)
    check_machines(run, ask_two(other))
    # A module whose distribution has another name, as vLLM for CPUs has.
    need = ClusterNeed("engines", 1, 1, 1, modules=("yaml",))
    monkeypatch.setattr(cluster_checks, "cluster_needs", lambda run: [need])
    with pytest.raises(ConfigError, match=r"yaml is PyYAML [6-9]\S* on this machine, a and PyYAML 5 on b"):
        check_machines(run, ask_two(other))


def test_default_plugins_count_unless_they_are_left_out_also_where_one_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = software([])
    assert "plugin trackers" in here
    assert software(["of_nobody"])["plugin of_nobody"] == "not installed"
    assert not [what for what in software(["-trackers"]) if "trackers" in what]
    known = {name: plugin for name, plugin in cluster_checks.installed_plugins().items() if name != "trackers"}
    monkeypatch.setattr(cluster_checks, "installed_plugins", lambda: known)
    assert software([]) == here | {"plugin trackers": "not installed"}


def test_a_run_directory_that_machines_do_not_share_is_refused(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_checks, "TOKEN_TIMEOUT_S", 0.3)

    def elsewhere(function: Any, token: Any, *arguments: Any) -> Any:
        return function(str(tmp_path / "token") if function.__name__ == "answer_token" else token, *arguments)

    with pytest.raises(ConfigError, match=r"run_dir is .*/run, which b does not share"):
        check_machines(run, ask_two(elsewhere))
    assert list(Path(run.run_dir).iterdir()) == []
