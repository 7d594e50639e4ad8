"""The lines of `spurline plugins`: installed plugins from metadata, enabled ones in full, and a health check."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from spurline.config.loading import LoadedConfig, config_model
from spurline.errors import SpurlineError
from spurline.plugins.host import InstalledPlugin, Plugin, PluginHost, installed_commands, installed_plugins
from spurline.plugins.official import DEFAULT_PLUGINS
from spurline.plugins.registry import CORE, group_by_kind, resolve


def installed_lines() -> list[str]:
    """Return one line per installed plugin, without importing any."""
    found = installed_plugins()
    if not found:
        return ["No plugins are installed."]
    lines = [f"{name}  {plugin.version}  ({_origin(plugin)})" for name, plugin in sorted(found.items())]
    return [*lines, "Enable one with `plugins: [NAME]` in the config; leave a default one out with -NAME."]


def _origin(plugin: InstalledPlugin) -> str:
    return f"{plugin.distribution}, by default" if plugin.name in DEFAULT_PLUGINS else plugin.distribution


def enabled_lines(loaded: LoadedConfig) -> list[str]:
    """Return versions, components, hooks, report panels and commands of the plugins that a config enables."""
    return [line for name in loaded.host.plugins for line in _describe(loaded.host, name)]


def _describe(host: PluginHost, name: str) -> Iterable[str]:
    plugin = host.plugins[name]
    grouped = group_by_kind(host.registry.entries(name))
    panels = grouped.pop("report_panel", [])
    commands = [entry.name for entry in installed_commands().values() if entry.distribution == plugin.distribution]
    hooks = [hook for hook in plugin.hooks if hook != "register_components"]
    yield f"{name}  {plugin.version}  ({plugin.distribution})"
    for kind, names in grouped.items():
        yield f"  {kind}: {', '.join(names)}"
    for label, values in (("hooks", hooks), ("report panels", panels), ("commands", commands)):
        if values:
            yield f"  {label}: {', '.join(values)}"


def diagnose() -> tuple[list[str], bool]:
    """Load each installed plugin beside the default ones that work; return a line for each, and whether all work."""
    lines: list[str] = []
    healthy = True
    installed = installed_plugins()
    unproven = {*DEFAULT_PLUGINS}
    for name, plugin in sorted(installed.items(), key=lambda item: (item[0] not in unproven, item[0])):
        needed = _requirements(plugin)
        left_out = [f"-{other}" for other in unproven - {*needed, name}]
        try:
            host = PluginHost.load([*left_out, *needed, name], installed)
            config_model(host)
            for entry in host.registry.entries(name):
                resolve(entry.factory, f"{entry.kind} '{entry.name}'")
        except SpurlineError as error:
            healthy = False
            lines.append(f"{name}: BROKEN. {error}")
        else:
            unproven.discard(name)
            lines.append(f"{name}: works ({plugin.distribution} {plugin.version})")
    return sorted(lines) or [f"No plugins are installed; {CORE} alone works."], healthy


def _requirements(plugin: InstalledPlugin) -> tuple[str, ...]:
    """Return the plugins that must be listed before this one; none if its module cannot be imported."""
    try:
        declaration = getattr(importlib.import_module(plugin.module), "PLUGIN", None)
    except Exception:  # noqa: BLE001 - loading it properly reports this in full
        return ()
    return declaration.requires if isinstance(declaration, Plugin) else ()
