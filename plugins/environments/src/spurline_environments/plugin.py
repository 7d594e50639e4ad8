"""Register the components of `environments`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_environments.configs import ByEnvironmentConfig, ByRowConfig, GymnasiumConfig, OpenEnvConfig, ToolsConfig

PLUGIN = Plugin("environments", api=API_VERSION, requires=("rl",))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(ToolsConfig, "spurline_environments.tools:Tools")
    registry.add(GymnasiumConfig, "spurline_environments.gymnasium:GymnasiumEnvironment")
    registry.add(OpenEnvConfig, "spurline_environments.openenv:OpenEnvEnvironment")
    registry.add(ByRowConfig, "spurline_environments.by_row:ByRow")
    registry.add(ByEnvironmentConfig, "spurline_environments.by_environment:ByEnvironment")
    panel = "spurline_insight.report_panel:ReportPanelConfig"
    registry.add_to("report_panel", panel, "spurline_environments.panel:EnvironmentsPanel", name="environments")
