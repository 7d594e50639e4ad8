"""Register the environments `harness` and `verifiers`. This module imports neither torch nor aiohttp."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_agents.configs import HarnessConfig, VerifiersConfig, VerifiersRowsConfig

PLUGIN = Plugin("agents", api=API_VERSION, requires=("rl", "environments"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(HarnessConfig, "spurline_agents.environment:HarnessEnvironment")
    registry.add(VerifiersConfig, "spurline_agents.verifiers:VerifiersEnvironment")
    registry.add(VerifiersRowsConfig, "spurline_agents.verifiers:VerifiersRows")
