"""Register what other trainers call our settings, beside the commands of the package. Imports no torch."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_planning.other_names import NAMES

PLUGIN = Plugin("planning", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_other_names(NAMES)
