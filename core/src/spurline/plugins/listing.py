"""The command `spurline plugins`: what is installed, and what the plugins of a config provide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from spurline.cli_options import load
from spurline.plugins.host import PluginHost, installed_commands, installed_plugins
from spurline.plugins.official import DEFAULT_PLUGINS
from spurline.plugins.registry import group_by_kind


def plugins(
    config: Annotated[
        Path | None, typer.Option(help="Show what the plugins enabled in this config provide instead.")
    ] = None,
) -> None:
    """List installed plugins from package metadata, or what the enabled ones provide."""
    if config is not None:
        host = load(config, None).host
        lines = [line for name in host.plugins for line in _describe(host, name)]
    else:
        lines = [
            f"{name}  {plugin.version}  ({plugin.distribution}{', by default' if name in DEFAULT_PLUGINS else ''})"
            for name, plugin in sorted(installed_plugins().items())
        ]
        lines.append("Enable one with `plugins: [NAME]` in the config; leave a default one out with -NAME.")
    typer.echo("\n".join(lines))


def _describe(host: PluginHost, name: str) -> Iterator[str]:
    plugin = host.plugins[name]
    commands = [entry.name for entry in installed_commands().values() if entry.distribution == plugin.distribution]
    hooks = [hook for hook in plugin.hooks if hook != "register_components"]
    yield f"{name}  {plugin.version}  ({plugin.distribution})"
    for label, values in {**group_by_kind(host.registry.entries(name)), "hooks": hooks, "commands": commands}.items():
        if values:
            yield f"  {label}: {', '.join(values)}"
