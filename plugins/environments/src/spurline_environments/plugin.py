"""Register the components of `environments`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_environments.configs import ToolsConfig

PLUGIN = Plugin("environments", api=API_VERSION, requires=("rl",))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(ToolsConfig, "spurline_environments.tools:Tools")
