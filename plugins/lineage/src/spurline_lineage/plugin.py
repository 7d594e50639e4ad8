"""Register the section `lineage`, and record the lineage of each run. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from spurline.config.section import OnResume
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_lineage.configs import LineageConfig

if TYPE_CHECKING:
    from spurline.plugins.run_view import RunView

PLUGIN = Plugin("lineage", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_section("lineage", Annotated[LineageConfig, OnResume.FREE])


@hookimpl
def on_run_start(run: RunView) -> None:
    from spurline_lineage.recorder import Recorder

    Recorder(run)
