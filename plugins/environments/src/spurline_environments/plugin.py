"""Register the components of `environments`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_environments.configs import (
    AutoFormatConfig,
    ByEnvironmentConfig,
    ByRowConfig,
    GymnasiumConfig,
    OpenEnvConfig,
    ToolFormatConfig,
    ToolsConfig,
    VllmFormatConfig,
)

PLUGIN = Plugin("environments", api=API_VERSION, requires=("rl",))

FORMATS = ("harmony", "kimi_k2", "deepseek_v3", "mistral", "glm45", "qwen3_coder", "hermes", "pythonic", "llama3_json")


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_kind(ToolFormatConfig, "spurline_environments.tool_formats:ToolFormat")
    registry.add(AutoFormatConfig, "spurline_environments.tool_formats:choose_format", default=True)
    registry.add(VllmFormatConfig, "spurline_environments.vllm_format:VllmFormat")
    for name in FORMATS:
        registry.add(ToolFormatConfig, "spurline_environments.tool_formats:MarkedFormat", name=name)
    registry.add(ToolsConfig, "spurline_environments.tools:Tools")
    registry.add(GymnasiumConfig, "spurline_environments.gymnasium:GymnasiumEnvironment")
    registry.add(OpenEnvConfig, "spurline_environments.openenv:OpenEnvEnvironment")
    registry.add(ByRowConfig, "spurline_environments.by_row:ByRow")
    registry.add(ByEnvironmentConfig, "spurline_environments.by_environment:ByEnvironment")
    panel = "spurline_insight.report_panel:ReportPanelConfig"
    registry.add_to("report_panel", panel, "spurline_environments.panel:EnvironmentsPanel", name="environments")
