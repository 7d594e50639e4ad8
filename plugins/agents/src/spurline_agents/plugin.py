"""Register the environment `harness`. This module imports neither torch nor aiohttp."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_agents.configs import HarnessConfig

PLUGIN = Plugin("agents", api=API_VERSION, requires=("rl", "environments"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(HarnessConfig, "spurline_agents.environment:HarnessEnvironment")
