"""What must be alike on all machines of a cluster, and which machine is named when it is not.

The checks ask real questions of this machine; what another machine would answer otherwise is changed in the answer, or
by what its process sees.
"""

from __future__ import annotations

import fcntl
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from backend_batches import run_config

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ConfigError, ModelError
from spurline.protocols.ranks import ClusterNeed
from spurline_ranks import cluster_checks
from spurline_ranks.cluster_checks import check_nodes, prepare_nodes, software

Change = Callable[[str, Any], Any]


def ask_two(second: Callable[..., Any]) -> Callable[..., Mapping[str, Any]]:
    """Machines `a`, which is this one, and `b`, which answers `second(function, *arguments)`."""

    def ask(function: str, *arguments: Any, doing: str | None = None) -> Mapping[str, Any]:
        assert (doing is not None) == (function.endswith(":fetch_model")), "this alone takes long"
        return {"a": resolve_name(function)(*arguments), "b": second(resolve_name(function), *arguments)}

    return ask


@pytest.fixture
def run(spurline_tiny_model: Path, tmp_path: Path) -> RunConfig:
    return run_config(spurline_tiny_model, run_dir=tmp_path / "run")


def test_machines_that_are_alike_pass_and_nothing_is_left_in_the_run_directory(run: RunConfig) -> None:
    asked: list[str] = []

    def alike(function: Any, *arguments: Any) -> Any:
        asked.append(function.__name__)
        return function(*arguments)

    check_nodes(run)(ask_two(alike))
    assert asked == ["software", "answer_token", "digest_of_file"]
    assert list(Path(run.run_dir).iterdir()) == []


def test_a_machine_with_another_version_is_named_with_it(run: RunConfig) -> None:
    def older(function: Any, *arguments: Any) -> Any:
        answer = function(*arguments)
        return answer | {"torch": "2.9.0"} if function is software else answer

    with pytest.raises(ConfigError) as raised:
        check_nodes(run)(ask_two(older))
    ours = software([])["torch"]
    assert f"machines that differ: torch is {ours} on this machine, a and 2.9.0 on b. Give all" in str(raised.value)


def test_what_engines_compute_with_counts_where_there_are_engines(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(function: Any, *arguments: Any) -> Any:
        answer = function(*arguments)
        return {**answer, "yaml": "PyYAML 5"} if function is software and "yaml" in answer else answer

    check_nodes(run)(ask_two(other))
    # A module whose distribution has another name, as vLLM for CPUs has.
    need = ClusterNeed("engines", 1, 1, 1, modules=("yaml",))
    monkeypatch.setattr(cluster_checks, "cluster_needs", lambda run: [("source.engine", need)])
    with pytest.raises(ConfigError, match=r"differ: yaml is PyYAML [6-9]\S* on this machine, a and PyYAML 5 on b"):
        check_nodes(run)(ask_two(other))


@pytest.mark.parametrize(("plugin", "listed"), [("async_rl", ["async_rl"]), ("models", []), ("models", ["models"])])
def test_the_files_of_a_plugin_count_and_not_its_version_alone(
    plugin: str, listed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = software([*listed, "of_nobody"])
    assert before["plugin of_nobody"] == before["the files of plugin of_nobody"] == "not there"
    _change_files(f"spurline_{plugin}", tmp_path, monkeypatch)
    after = software([*listed, "of_nobody"])
    assert {what for what in after if after[what] != before[what]} == {f"the files of plugin {plugin}"}


def test_a_machine_with_other_files_of_a_plugin_that_is_not_listed_is_refused(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "models" not in run.plugins

    def changed(function: Any, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            _change_files("spurline_models", tmp_path, patch)
            return function(*arguments)

    with pytest.raises(ConfigError, match=r"differ: the files of plugin models is \w+ on this machine, a and \w+ on b"):
        check_nodes(run)(ask_two(changed))


def test_a_default_plugin_that_is_left_out_does_not_count() -> None:
    assert "plugin trackers" in software([])
    assert not [what for what in software(["-trackers"]) if "trackers" in what]


def test_a_default_plugin_that_one_machine_lacks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = software([])
    known = {name: plugin for name, plugin in cluster_checks.installed_plugins().items() if name != "trackers"}
    monkeypatch.setattr(cluster_checks, "installed_plugins", lambda: known)
    there = software([])
    assert there.keys() == here.keys()
    assert there["plugin trackers"] == there["the files of plugin trackers"] == "not there"


def test_a_machine_that_does_not_see_the_run_directory_is_named(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_checks, "TOKEN_TIMEOUT_S", 0.3)

    def elsewhere(function: Any, folder: Any, *arguments: Any) -> Any:
        return function(str(tmp_path) if function.__name__ == "answer_token" else folder, *arguments)

    with pytest.raises(ConfigError, match=r"run_dir is .*/run, which the machines of the cluster do not share: .* is "):
        check_nodes(run)(ask_two(elsewhere))
    assert list(Path(run.run_dir).iterdir()) == []


def test_what_a_machine_has_written_must_be_seen_here(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_checks, "TOKEN_TIMEOUT_S", 0.3)

    def forgets(function: Any, *arguments: Any) -> Any:
        answer = function(*arguments)
        if function.__name__ == "answer_token":
            (Path(run.run_dir) / answer).unlink()
        return answer

    with pytest.raises(ConfigError, match="what b has written there is not seen here"):
        check_nodes(run)(ask_two(forgets))


def test_locks_that_do_not_hold_between_machines_are_refused(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(function: Any, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fcntl, "flock", lambda *_: None)
            return function(*arguments)

    with pytest.raises(ConfigError, match="is locked by the run's controller, but not for other machines"):
        check_nodes(run)(ask_two(unlocked))


def test_a_machine_with_another_model_at_the_same_path_is_named(run: RunConfig) -> None:
    def another(function: Any, *arguments: Any) -> Any:
        return "123" if function.__name__ == "digest_of_file" else function(*arguments)

    with pytest.raises(ConfigError, match=r"model.path is .* its config.json is not the same on b \(another\)"):
        check_nodes(run)(ask_two(another))


def test_a_model_that_is_no_folder_is_fetched_by_one_process_of_each_machine(run: RunConfig, tmp_path: Path) -> None:
    there = run.model_copy(update={"model": ModelConfig(path="nobody/no-such-model")})
    asked: list[str] = []

    def count(function: Any, *arguments: Any) -> Any:
        asked.append(function.__name__)
        return function(*arguments)

    check_nodes(there)(ask_two(count))
    assert asked == ["software", "answer_token"], "checks download nothing"
    # Tests have no network; the error says what was tried, and where.
    with pytest.raises(ModelError, match=r"model.path nobody/no-such-model is no folder, and cannot be downloaded to "):
        prepare_nodes(there)(ask_two(lambda function, *arguments: function(*arguments)))


def _change_files(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this package found with other files."""
    package = folder / module
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("# another one")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        cluster_checks.importlib.util, "find_spec", lambda name: _spec_of(package) if name == module else real(name)
    )


def _spec_of(package: Path) -> Any:
    from importlib.util import spec_from_file_location

    return spec_from_file_location(package.name, package / "__init__.py", submodule_search_locations=[str(package)])
