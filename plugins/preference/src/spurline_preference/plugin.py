"""Register the components of `preference`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_preference import configs

PLUGIN = Plugin("preference", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(configs.PreferenceSourceConfig, "spurline_preference.source:PreferenceSource")
    registry.add(configs.LabelSourceConfig, "spurline_preference.source:LabelSource")
    registry.add(configs.DpoConfig, "spurline_preference.dpo:Dpo")
    registry.add(configs.SimpoConfig, "spurline_preference.reference_free:Simpo")
    registry.add(configs.CpoConfig, "spurline_preference.reference_free:Cpo")
    registry.add(configs.OrpoConfig, "spurline_preference.reference_free:Orpo")
    registry.add(configs.KtoConfig, "spurline_preference.kto:Kto")
    panel = "spurline_insight.report_panel:ReportPanelConfig"
    registry.add_to("report_panel", panel, "spurline_preference.panel:PreferencePanel", name="preference")
