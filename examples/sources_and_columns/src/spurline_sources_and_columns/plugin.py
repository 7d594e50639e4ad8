"""Declare the plugin, and register its components. This module does not import torch."""

from __future__ import annotations

from spurline.plugins import ComponentRegistrar, Plugin, hookimpl
from spurline_sources_and_columns.config import RowGradientConfig, RowWeightConfig, ShortFirstConfig, WindowsConfig

PLUGIN = Plugin("sources_and_columns", api=2)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(WindowsConfig, "spurline_sources_and_columns.windows:Windows")
    registry.add(ShortFirstConfig, "spurline_sources_and_columns.short_first:ShortFirst")
    registry.add(RowWeightConfig, "spurline_sources_and_columns.row_weight:RowWeight")
    registry.add(RowGradientConfig, "spurline_sources_and_columns.row_weight:RowGradient")
