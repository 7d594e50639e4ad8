"""Register the components of `preference`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_preference.configs import DpoConfig, PreferenceSourceConfig

PLUGIN = Plugin("preference", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(PreferenceSourceConfig, "spurline_preference.source:PreferenceSource")
    registry.add(DpoConfig, "spurline_preference.dpo:Dpo")
    panel = "spurline_insight.report_panel:ReportPanelConfig"
    registry.add_to("report_panel", panel, "spurline_preference.panel:PreferencePanel", name="preference")
