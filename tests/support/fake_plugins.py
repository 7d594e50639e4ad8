"""Plugins that exist only in memory, and modules that are installed as plugins for a test."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest

from spurline.config.section import ComponentConfig, Section
from spurline.errors import PluginError
from spurline.plugins.hookspecs import hookimpl
from spurline.plugins.host import API_VERSION, InstalledPlugin, Plugin, PluginHost
from spurline.plugins.registry import ComponentRegistrar

KINDS = PluginHost.load([]).registry.kinds


class FakePlugins:
    """Puts plugin modules into `sys.modules` and takes them out again at the end of a `with`."""

    def __init__(self) -> None:
        self.available: dict[str, InstalledPlugin] = {}

    def __enter__(self) -> FakePlugins:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for plugin in self.available.values():
            sys.modules.pop(plugin.module, None)

    def add(
        self,
        name: str,
        *,
        api: int = API_VERSION,
        config: type[Section] | None = None,
        requires: tuple[str, ...] = (),
        register: Callable[[ComponentRegistrar], None] | None = None,
        hooks: tuple[Callable[..., Any], ...] = (),
        **attributes: Any,
    ) -> dict[str, InstalledPlugin]:
        """Install a plugin and return everything installed so far, as `available=` takes it.

        register: body of its `register_components`. hooks: functions named like hooks. attributes: set on the module
        as they are, also in place of what would be there.
        """
        module = ModuleType(f"spurline_fake_{name}")
        module.__dict__["PLUGIN"] = Plugin(name, api, config, requires)
        if register is not None:
            body = register

            @hookimpl
            def register_components(registry: ComponentRegistrar) -> None:
                body(registry)

            module.__dict__["register_components"] = register_components
        for function in hooks:
            module.__dict__[function.__name__] = hookimpl(function)
        module.__dict__.update(attributes)
        sys.modules[module.__name__] = module
        self.available[name] = InstalledPlugin(name, module.__name__, f"spurline-{name}", "1.2.3")
        return self.available


def install_plugin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, source: Path = Path(__file__).parent
) -> None:
    """Install a module as a plugin for this process and for those it starts.

    Args:
        folder: A new folder for the metadata.
        monkeypatch: Takes it back.
        name: The name of the plugin.
        module: The module, which lies in `source`.
        source: A folder of modules; this one by default.
    """
    metadata = folder / f"{name}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[spurline.plugins]\n{name} = {module}\n")
    for path in (source, folder):
        monkeypatch.syspath_prepend(str(path))
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)


def refused(names: list[str], available: Mapping[str, InstalledPlugin], pattern: str) -> None:
    """Assert that loading these plugins fails with this text in the message."""
    with pytest.raises(PluginError, match=re.escape(pattern)):
        PluginHost.load(names, available)


def of_kind(config: type[ComponentConfig], kind: str) -> type[ComponentConfig]:
    """Return the config class as one of this kind. A kind that does not exist is only named."""
    if kind not in KINDS:
        return type(config)(config.__name__, (config,), {"kind": kind})
    return type(config)(config.__name__, (config, KINDS[kind].config), {})
